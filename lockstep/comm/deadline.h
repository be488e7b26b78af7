// When a call that has several stages must be over: each stage gets what the ones before it left. Internal to comm.
#pragma once

#include <algorithm>
#include <chrono>

#include "lockstep/base/deadline.h"

namespace lockstep::detail {

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout) : end_(deadline_after(timeout)) {}

  /// At least 1 ms: transports read zero as "no limit" or "the default".
  std::chrono::milliseconds left() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }

 private:
  std::chrono::steady_clock::time_point end_;
};

}  // namespace lockstep::detail
