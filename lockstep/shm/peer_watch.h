// What a waiting rank looks at between naps: is the peer alive, has anybody given up, is the time over? Internal to
// shm.
#pragma once

#include <chrono>
#include <optional>

#include "lockstep/shm/request.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {

class PeerWatch final : public Watch {
 public:
  /// The clock starts with the first nap: what is quick needs no clock.
  PeerWatch(const Team& team, const Request& request, std::uint64_t sequence)
      : team_(team), request_(request), sequence_(sequence) {}

  void waits_for(int rank) { rank_ = rank; }
  /// A rank that has finished the steps before this one has done its part of the call.
  void ends_before(std::uint32_t step) { end_ = step; }
  void check() override;

 private:
  [[noreturn]] void give_up(const std::string& why) const;
  /// A rank that is gone without having done its part; -1 if there is none.
  int find_gone() const;

  const Team& team_;
  const Request& request_;
  const std::uint64_t sequence_;
  int rank_ = 0;
  std::uint32_t end_ = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  int seen_gone_ = -1;
};

}  // namespace lockstep::shm
