// Flat buffers of one length, as few as are in use at a time: for buckets that keep none of their own.
//
// On an accelerator work on a buffer may still be queued when it is released: the pool records an event on the stream
// that is current then, and the stream that is current in acquire() waits for it. On the CPU there are no events.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

class BufferPool {
 public:
  /// One fills while one is on its way to the other ranks. More only if gradients come out of order.
  static constexpr std::size_t kWanted = 2;

  /// All buffers are made this long.
  BufferPool(int64_t elements, GroupPtr group) : elements_(elements), group_(std::move(group)) {}

  /// A buffer with these options, which the current stream may use. If all that are wanted are in use, asks `make_room`
  /// to end a reduction and release its buffer; makes another one if that returns false.
  at::Tensor acquire(const at::TensorOptions& options, const std::function<bool()>& make_room);
  /// Takes back a buffer that the current stream, or those it has waited for, used last.
  void release(at::Tensor buffer);
  /// Those in use will not come back.
  void forget();
  /// Bytes of all that were made.
  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    at::Tensor buffer;
    std::optional<c10::Event> used;  // none on the CPU
  };

  const int64_t elements_;
  const GroupPtr group_;
  std::vector<Free> free_;
  std::size_t made_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace lockstep::detail
