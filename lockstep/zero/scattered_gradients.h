// The gradients of ZeRO's second stage: of every bucket of DDP this rank's slice of the average. Internal to zero.
//
// Backwards add to it, as they add to .grad; a step uses it up. Filled by the reducer on threads of the autograd
// engine, read between backwards.
#pragma once

#include <optional>
#include <vector>

#include "lockstep/comm/pending.h"
#include "lockstep/ddp/gradient_scatter.h"
#include "lockstep/shard/slice_plan.h"

namespace lockstep::detail {

class ScatteredGradients final : public GradientScatter {
 public:
  /// How a bucket is cut, and what its gradients are.
  struct Cut {
    SlicePlan plan = {};
    at::TensorOptions options = {};
  };

  /// `optimizer_indices` by the reducer's.
  ScatteredGradients(std::vector<Cut> cuts, std::vector<int64_t> optimizer_indices, GroupPtr group);

  /// Whether the parameter has got a gradient, on any rank, since the last drop().
  bool has(int64_t index) const { return has_[index]; }
  /// This rank's slice of the bucket; where has() is false it means nothing.
  const at::Tensor& slice(std::size_t bucket) const { return slices_[bucket].gradients; }
  void drop();
  int64_t bytes() const;

  int64_t buffer_elements(std::size_t bucket) const override { return cuts_[bucket].plan.padded(); }
  void launch(std::size_t bucket, const at::Tensor& buffer) override;
  void wait_for(std::size_t bucket) override;
  void end_backward(const std::vector<bool>& is_used) override;
  void give_up() override;

 private:
  struct Slice {
    at::Tensor gradients = {};
    at::Tensor arriving = {};  // in a backward, if there are gradients to add to
    std::optional<Pending> reduction = std::nullopt;
  };

  const std::vector<Cut> cuts_;
  const std::vector<int64_t> optimizer_indices_;
  const GroupPtr group_;
  std::vector<Slice> slices_;
  std::vector<bool> has_;  // by the optimizer's indices
  bool has_any_ = false;
};

}  // namespace lockstep::detail
