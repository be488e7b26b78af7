#include "lockstep/rpc/flow_limit.h"

#include <algorithm>

namespace lockstep::rpc::detail {

void FlowLimit::set_limit(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
  peak_ = 0;
  under_way_.clear();
}

void FlowLimit::take(int worker, std::size_t bytes) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    const auto now = under_way_[worker];
    return limit_ == 0 || now == 0 || now + bytes <= limit_;
  });
  auto& now = under_way_[worker];
  now += bytes;
  peak_ = std::max(peak_, now);
}

void FlowLimit::give_back(int worker, std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    auto& now = under_way_[worker];
    now -= std::min(now, bytes);
  }
  changed_.notify_all();
}

std::size_t FlowLimit::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace lockstep::rpc::detail
