// How units gather and reduce: objects a program may replace, unit by unit.
//
//   struct Counting : lockstep::AllGatherComm {
//     lockstep::Pending run(…) override { ++count; return AllGatherComm::run(outputs, inputs, group); }
//     int count = 0;
//   };
//   unit.set_custom_all_gather(std::make_shared<Counting>());
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/pending.h"

namespace lockstep {

/// The default takes memory that the group's backend reaches without a copy.
class AllGatherComm {
 public:
  virtual ~AllGatherComm() = default;
  /// A flat tensor for what is gathered.
  virtual at::Tensor allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& group);
  /// outputs[i] receives the inputs[i] of all ranks, one behind the other.
  virtual Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      const GroupPtr& group);
};

class ReduceScatterComm {
 public:
  virtual ~ReduceScatterComm() = default;
  /// A flat tensor for what is reduced.
  virtual at::Tensor allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& group);
  /// outputs[i] receives this rank's share of the sum of all ranks' inputs[i].
  virtual Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      const GroupPtr& group);
};

}  // namespace lockstep
