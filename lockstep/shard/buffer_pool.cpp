#include "lockstep/shard/buffer_pool.h"

#include <algorithm>

#include "lockstep/shard/buffer.h"

namespace lockstep::detail {

at::Tensor BufferPool::acquire(const at::TensorOptions& options, const std::function<bool()>& make_room) {
  const auto fits = [&](const at::Tensor& each) {
    return each.dtype() == options.dtype() && each.device() == options.device();
  };
  for (;;) {
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found != free_.end()) {
      auto buffer = std::move(*found);
      free_.erase(found);
      return buffer;
    }
    if (made_ < kWanted || !make_room()) break;
  }
  auto buffer = allocate_buffer(elements_, options, group_);
  ++made_;
  bytes_ += static_cast<int64_t>(buffer.nbytes());
  return buffer;
}

void BufferPool::release(at::Tensor buffer) {
  // In one order, so that buckets meet the same buffers in every step and can keep their views.
  const auto after = std::find_if(free_.begin(), free_.end(), [&](const at::Tensor& each) {
    return std::less<>()(buffer.const_data_ptr(), each.const_data_ptr());
  });
  free_.insert(after, std::move(buffer));
}

void BufferPool::forget() {
  free_.clear();
  made_ = 0;
  bytes_ = 0;
}

}  // namespace lockstep::detail
