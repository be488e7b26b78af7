// Runs collectives among the ranks of a team. See docs/shm.md for the protocol.
//
// All calls of a rank come from one thread at a time, in the same order on every rank. Work moves in *steps*: each rank
// publishes a chunk in the next slot of its ring, waits for the others' and reads them. The first step of a call also
// carries its header, so ranks notice that they disagree before anything is written.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/shm/request.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {

class Collectives {
 public:
  explicit Collectives(std::shared_ptr<Team> team);

  /// Runs one collective; returns when this rank's part is done and its tensors may be used. Throws MismatchError, or
  /// PeerError after which every call does.
  void run(const Request& request, const Patience& patience);

  Team& team() const { return *team_; }
  std::uint64_t sequence() const { return sequence_; }

 private:
  class Exchange;  // one call on its way
  const std::shared_ptr<Team> team_;
  std::uint64_t sequence_ = 0;
  std::uint32_t next_step_ = 0;
  // Room for a reduction's arguments, kept from call to call.
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte*> outputs_;
  std::vector<double> factors_;
};

}  // namespace lockstep::shm
