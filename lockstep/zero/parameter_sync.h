// Sending parameters that keep their own memory. Large ones are broadcast one by one from where they lie; the others
// travel together, through one buffer that all ranks fill and read: a message costs more than moving a small parameter.
// Internal to zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/zero/arriving_parameters.h"

namespace lockstep::detail {

class ParameterSync {
 public:
  /// Parameters with at least this many elements are broadcast one by one, if they have no gaps.
  static constexpr int64_t kLargeElements = 128 << 10;

  struct Sent {
    at::Tensor parameter;
    int rank;  // that sends it
  };

  /// In the order in which forwards need them. `is_awaited_later`: nobody may touch parameters while they are on their
  /// way, so they are sent as other tensors on the same memory. Local.
  ParameterSync(const std::vector<Sent>& parameters, GroupPtr group, bool is_awaited_later);

  /// Collective.
  std::vector<Arrival> launch();

  int64_t bytes() const;

 private:
  struct Large {
    Sent sent;
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
  Arrival launch(const Packed& packed) const;
  Arrival launch(const Large& large) const;
  at::Tensor memory_of(const at::Tensor& parameter) const;
  std::vector<at::Tensor> memory_of(const std::vector<at::Tensor>& parameters) const;

  const GroupPtr group_;
  const bool is_awaited_later_;
  std::vector<Large> large_;
  std::vector<Packed> packed_;
};

}  // namespace lockstep::detail
