// Flat buffers of one length, as few as are in use at a time: for buckets that keep none of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

class BufferPool {
 public:
  /// One fills while one is on its way to the other ranks. More only if gradients come out of order.
  static constexpr std::size_t kWanted = 2;

  /// All buffers are made this long.
  BufferPool(int64_t elements, GroupPtr group) : elements_(elements), group_(std::move(group)) {}

  /// A buffer with these options. If all that are wanted are in use, asks `make_room` to end a reduction and release
  /// its buffer; makes another one if that returns false.
  at::Tensor acquire(const at::TensorOptions& options, const std::function<bool()>& make_room);
  void release(at::Tensor buffer);
  /// Those in use will not come back.
  void forget();
  /// Bytes of all that were made.
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t elements_;
  const GroupPtr group_;
  std::vector<at::Tensor> free_;
  std::size_t made_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace lockstep::detail
