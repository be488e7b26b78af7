// How rank processes find each other and pass descriptors around, once, when a team is made. Internal to shm.
//
// Rank 0 listens, the others come and say which process they are; only what a process has not mapped yet travels:
//
//   rank to 0   hello: its process, the memory it shows to this team
//   0 to rank   table: the processes of all ranks         rank to 0   needs: whose pools it has not mapped
//   0 to rank   wanted: does anybody need yours?          rank to 0   pool: pool and lifeline, if so
//   0 to rank   memory of each other rank, with pool and lifeline if it needs them
//   rank to 0   done: all is mapped                       0 to rank   begin: everybody is done
//
// Who fails says farewell with its reason, so that all ranks have a team or the same story.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/shm/memory.h"
#include "lockstep/shm/process.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {

/// What I show.
struct Offer {
  SharedMemory& memory;
  const OwnProcess& process;
};

/// What I got from a peer: its memory, and its process unless that is mine.
struct Peer {
  SharedMemory memory;
  std::shared_ptr<PeerProcess> process;
};

/// Tells the others why this rank cannot come, through `agree`, in the place of what meet() would have said first.
void complain(const std::function<std::string(const std::string&)>& agree, const std::string& reason) noexcept;

/// Shows mine to all ranks and returns theirs, by rank; mine stays empty. Only processes of this user are let in.
/// Throws PeerError naming who did not come in time or what went wrong there.
std::vector<Peer> meet(const Seat& seat, const Offer& mine,
                       const std::function<std::string(const std::string&)>& agree);

}  // namespace lockstep::shm
