// A schedule that looks for trouble: rank threads yield and sleep at random where they meet, and some results come only
// in wait(). Everything follows from the seed, so a failing one can be replayed: LOCKSTEP_CHAOS_SEED=… runs it again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/comm/threads/thread_backend.h"

namespace lockstep::testing {

class ChaosSchedule : public ThreadSchedule {
 public:
  ChaosSchedule(std::uint64_t seed, int world_size);
  void pause(int rank) override;
  bool completes_late(int rank) override;

  /// What was decided so far, per rank: pauses in microseconds (0: none) and late completions (-1), in order.
  std::vector<int> decisions(int rank) const;

 private:
  struct Rank {
    std::uint64_t state = 0;
    std::vector<int> decisions;
  };
  /// Decisions of a rank depend on the seed and on how many it made, never on the other ranks.
  std::uint64_t next(int rank);

  std::vector<Rank> ranks_;  // each used by its own thread alone
};

/// Every result comes late; nothing else is disturbed.
class LateSchedule : public ThreadSchedule {
 public:
  bool completes_late(int) override { return true; }
};

}  // namespace lockstep::testing
