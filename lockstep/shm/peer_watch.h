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

  void waits_for(int rank) {
    if (rank != rank_) was_gone_ = false;
    rank_ = rank;
  }
  void check() override;

 private:
  [[noreturn]] void give_up(const std::string& why) const;

  const Team& team_;
  const Request& request_;
  const std::uint64_t sequence_;
  int rank_ = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  bool was_gone_ = false;
};

}  // namespace lockstep::shm
