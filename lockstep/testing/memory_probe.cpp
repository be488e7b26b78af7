#include "lockstep/testing/memory_probe.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "lockstep/base/str.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing {
namespace {

using Label = std::pair<std::string, std::string>;
thread_local Label current_label;

void add(MemoryUse& use, int64_t bytes) {
  use.current_bytes += bytes;
  use.peak_bytes = std::max(use.peak_bytes, use.current_bytes);
}

}  // namespace

MemoryLabel::MemoryLabel(std::string unit, std::string kind)
    : previous_(std::exchange(current_label, {std::move(unit), std::move(kind)})) {}

MemoryLabel::~MemoryLabel() {
  current_label = previous_;
}

class MemoryProbe::Counter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* ptr, int64_t alloc_size, size_t, size_t, c10::Device) override {
    const std::lock_guard lock(mutex_);
    if (alloc_size > 0) {
      forget(ptr);  // freed where we did not see it
      blocks_[ptr] = {alloc_size, current_label};
      add(total_, alloc_size);
      add(by_label_[current_label], alloc_size);
    } else {
      forget(ptr);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  MemoryUse total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  std::map<Label, MemoryUse> by_label() const {
    const std::lock_guard lock(mutex_);
    return by_label_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    total_.peak_bytes = total_.current_bytes;
    for (auto& [label, use] : by_label_) use.peak_bytes = use.current_bytes;
  }

 private:
  void forget(void* ptr) {
    const auto found = blocks_.find(ptr);
    if (found == blocks_.end()) return;
    add(total_, -found->second.first);
    add(by_label_[found->second.second], -found->second.first);
    blocks_.erase(found);
  }

  mutable std::mutex mutex_;  // memory may be freed by another thread
  std::unordered_map<void*, std::pair<int64_t, Label>> blocks_;
  MemoryUse total_;
  std::map<Label, MemoryUse> by_label_;
};

MemoryProbe::MemoryProbe()
    : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

MemoryProbe::~MemoryProbe() = default;

MemoryUse MemoryProbe::total() const {
  return counter_->total();
}

std::map<Label, MemoryUse> MemoryProbe::by_label() const {
  return counter_->by_label();
}

void MemoryProbe::reset_peak() {
  counter_->reset_peak();
}

void MemoryProbe::expect_peak_at_most(int64_t bytes) const {
  const auto use = total();
  if (use.peak_bytes <= bytes) return;
  std::string table;
  for (const auto& [label, part] : by_label()) {
    table += str("  ", label.first.empty() ? "(no unit)" : label.first, " ", label.second, ": peak ", part.peak_bytes,
                 ", now ", part.current_bytes, "\n");
  }
  throw CheckFailure(str("peak memory ", use.peak_bytes, " bytes, allowed ", bytes, ":\n", table));
}

}  // namespace lockstep::testing
