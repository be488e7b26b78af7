// Batch normalisation whose statistics are those of the batches of all ranks together.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "lockstep/comm/group.h"

namespace lockstep {

namespace detail {
struct BatchStatistics;
}

/// What a batch normalisation keeps; undefined where it has none.
struct BatchNormTensors {
  at::Tensor weight = {};
  at::Tensor bias = {};
  at::Tensor running_mean = {};
  at::Tensor running_var = {};
  at::Tensor num_batches_tracked = {};
};

/// As torch::nn::BatchNorm1d/2d/3d, for inputs of any number of dims with channels in dim 1. In training its forward
/// and its backward are collective over `process_group`; ranks may have batches of different sizes, empty ones too. In
/// evaluation, and for a group of one rank, it is the plain layer.
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// A null group means the default group, asked for in forward.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, GroupPtr process_group = nullptr);
  explicit SyncBatchNormImpl(int64_t num_features) : SyncBatchNormImpl(torch::nn::BatchNormOptions(num_features)) {}
  /// With tensors that are there already, not with copies.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, GroupPtr process_group,
                    const BatchNormTensors& tensors);

  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  at::Tensor forward(const at::Tensor& input);

  torch::nn::BatchNormOptions options;
  GroupPtr process_group;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;

 private:
  void update_running_stats(const detail::BatchStatistics& statistics);
  void register_tensors(const BatchNormTensors& tensors);
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep
