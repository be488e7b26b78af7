// Counts bytes that the calling thread's tensors take, by unit and kind, from the allocator's own reports (CPU and
// CUDA). Tests assert limits with it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

namespace lockstep::testing {

/// While it lives, allocations of this thread belong to `unit` and `kind`: MemoryLabel label("layer 3", "gradients").
class MemoryLabel {
 public:
  MemoryLabel(std::string unit, std::string kind);
  ~MemoryLabel();
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

 private:
  std::pair<std::string, std::string> previous_;
};

struct MemoryUse {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
};

/// Watches from construction to destruction. Frees of memory that was there before do not count.
class MemoryProbe {
 public:
  MemoryProbe();
  ~MemoryProbe();
  MemoryProbe(const MemoryProbe&) = delete;
  MemoryProbe& operator=(const MemoryProbe&) = delete;

  MemoryUse total() const;
  /// By {unit, kind}; unlabelled memory is {"", ""}.
  std::map<std::pair<std::string, std::string>, MemoryUse> by_label() const;
  /// Starts a new peak at what is in use now.
  void reset_peak();

  /// Throws CheckFailure with the table if the peak was above `bytes`.
  void expect_peak_at_most(int64_t bytes) const;

 private:
  class Counter;
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace lockstep::testing
