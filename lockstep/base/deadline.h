// The moment a timeout is over. Very long timeouts, "never" among them, do not overflow the clock.
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365 * 10);
  return std::chrono::steady_clock::now() + std::min(timeout, kForever);
}

}  // namespace lockstep
