#include "lockstep/testing/chaos.h"

#include <chrono>
#include <thread>

namespace lockstep::testing {

ChaosSchedule::ChaosSchedule(std::uint64_t seed, int world_size) : ranks_(world_size) {
  for (int rank = 0; rank < world_size; ++rank) ranks_[rank].state = seed * 0x9E3779B97F4A7C15ULL + rank + 1;
}

std::uint64_t ChaosSchedule::next(int rank) {
  // splitmix64
  std::uint64_t z = (ranks_[rank].state += 0x9E3779B97F4A7C15ULL);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

void ChaosSchedule::pause(int rank) {
  const auto draw = next(rank);
  int microseconds = 0;
  switch (draw % 8) {
    case 0:
    case 1:
      std::this_thread::yield();
      break;
    case 2:
      microseconds = static_cast<int>((draw >> 8) % 200);
      break;
    case 3:
      microseconds = static_cast<int>((draw >> 8) % 3000);
      break;
    default:
      break;
  }
  ranks_[rank].decisions.push_back(microseconds);
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

bool ChaosSchedule::completes_late(int rank) {
  const bool is_late = next(rank) % 3 == 0;
  if (is_late) ranks_[rank].decisions.push_back(-1);
  return is_late;
}

std::vector<int> ChaosSchedule::decisions(int rank) const {
  return ranks_[rank].decisions;
}

}  // namespace lockstep::testing
