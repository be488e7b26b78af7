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

  /// What every rank has to reach, and whose turn it is to be waited for.
  void waits_for(int rank, Signal Lane::*signal, std::uint32_t target) {
    rank_ = rank;
    signal_ = signal;
    target_ = target;
  }
  void check() override;

 private:
  [[noreturn]] void give_up(const std::string& why) const;
  /// A rank that is gone without having done its part; -1 if there is none.
  int find_gone() const;

  const Team& team_;
  const Request& request_;
  const std::uint64_t sequence_;
  int rank_ = 0;
  Signal Lane::*signal_ = &Lane::ready;
  std::uint32_t target_ = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  int seen_gone_ = -1;
};

}  // namespace lockstep::shm
