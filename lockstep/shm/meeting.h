// How rank processes find each other and pass descriptors around, once, when a team is made. Internal to shm.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {

/// What I show; borrowed.
struct Offer {
  int memory = -1;
  int lifeline = -1;
};

/// What I got from a peer.
struct Peer {
  UniqueFd memory;
  UniqueFd lifeline;
};

/// Gives my descriptors to all ranks and returns theirs, by rank; mine stay empty. Rank 0 listens, the others come.
/// Only processes of this user are let in. Throws PeerError naming who did not come in time.
std::vector<Peer> meet(const Seat& seat, const Offer& mine,
                       const std::function<std::string(const std::string&)>& agree);

}  // namespace lockstep::shm
