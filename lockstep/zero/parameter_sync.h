// Sending parameters that keep their own memory. Large ones are broadcast one by one from where they lie; the others
// travel together, through one buffer that all ranks fill and read: a message costs more than moving a small parameter.
// Internal to zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

class ParameterSync {
 public:
  /// Parameters with at least this many elements are broadcast one by one, if they have no gaps.
  static constexpr int64_t kLargeElements = 128 << 10;

  /// By rank, the parameters it sends. Local.
  explicit ParameterSync(const std::vector<std::vector<at::Tensor>>& per_rank, GroupPtr group);

  /// Collective and blocking.
  void sync();

  int64_t bytes() const;

 private:
  struct Large {
    at::Tensor parameter;
    std::vector<int64_t> memory_order;  // in which all ranks send it
  };
  /// Small parameters of one dtype on one device, by rank, and their places in a buffer.
  struct Packed {
    c10::Device device;
    at::ScalarType dtype;
    std::vector<std::vector<at::Tensor>> parameters = {};
    std::vector<std::vector<at::Tensor>> places = {};
    std::vector<at::Tensor> runs = {};  // of each rank
    at::Tensor buffer = {};
    bool is_even = false;  // runs are as long as each other
  };

  Packed& packed_with(const at::Tensor& parameter);
  void allocate(Packed& packed) const;
  void send(Packed& packed) const;

  const GroupPtr group_;
  std::vector<std::vector<Large>> large_;  // by rank
  std::vector<Packed> packed_;
};

}  // namespace lockstep::detail
