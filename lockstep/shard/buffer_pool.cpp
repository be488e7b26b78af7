#include "lockstep/shard/buffer_pool.h"

#include <algorithm>

#include "lockstep/comm/current_stream.h"
#include "lockstep/shard/buffer.h"

namespace lockstep::detail {

at::Tensor BufferPool::acquire(const at::TensorOptions& options, const std::function<bool()>& make_room) {
  const auto fits = [&](const Free& each) {
    return each.buffer.dtype() == options.dtype() && each.buffer.device() == options.device();
  };
  for (;;) {
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found != free_.end()) {
      if (found->used) found->used->block(current_stream(found->buffer.device()));
      auto buffer = std::move(found->buffer);
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
  const auto after = std::find_if(free_.begin(), free_.end(), [&](const Free& each) {
    return std::less<>()(buffer.const_data_ptr(), each.buffer.const_data_ptr());
  });
  std::optional<c10::Event> used;
  if (const auto device = buffer.device(); !device.is_cpu()) {
    used.emplace(device.type());
    used->record(current_stream(device));
  }
  free_.insert(after, {.buffer = std::move(buffer), .used = std::move(used)});
}

void BufferPool::forget() {
  free_.clear();
  made_ = 0;
  bytes_ = 0;
}

}  // namespace lockstep::detail
