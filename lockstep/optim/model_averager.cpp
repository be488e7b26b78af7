#include "lockstep/optim/model_averager.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/optim/average_parameters.h"

namespace lockstep {
namespace {

void warn_of_period_one(const char* period) {
  TORCH_WARN("[lockstep/optim] when ", period, " is 1, no need to use model averaging: all-reducing parameters costs ",
             "no less than all-reducing gradients by DistributedDataParallel in the backward pass. Use only that.");
}

/// The groups of `size` neighbours.
std::vector<std::vector<int>> neighbours(int world_size, int size) {
  std::vector<std::vector<int>> groups(static_cast<std::size_t>(world_size / size));
  for (int rank = 0; rank < world_size; ++rank) groups[static_cast<std::size_t>(rank / size)].push_back(rank);
  return groups;
}

void check_hierarchy(const HierarchicalModelAverager::PeriodGroupSizes& sizes, int world_size) {
  TORCH_CHECK(!sizes.empty(), "[lockstep/optim] period_group_size_dict must not be empty");
  TORCH_CHECK(sizes[0].first > 0, "[lockstep/optim] the minimum period in period_group_size_dict must be a positive ",
              "value, but is ", sizes[0].first);
  TORCH_CHECK(sizes.back().second == world_size, "[lockstep/optim] the last value in period_group_size_dict, ",
              sizes.back().second, ", must be equal to the size of process_group, ", world_size);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto [period, size] = sizes[i];
    TORCH_CHECK(i == 0 || period > sizes[i - 1].first, "[lockstep/optim] periods in period_group_size_dict must ",
                "increase, but ", period, " comes after ", sizes[i - 1].first);
    TORCH_CHECK(size > 0, "[lockstep/optim] the group size of period ", period, ", ", size, ", must be positive");
    TORCH_CHECK(size <= world_size, "[lockstep/optim] the group size of period ", period, ", ", size,
                ", must not exceed the size of process_group, ", world_size);
    TORCH_CHECK(world_size % size == 0, "[lockstep/optim] the size of process_group, ", world_size,
                ", must be divisible by the group size of period ", period, ", ", size);
  }
}

}  // namespace

ModelAverager::ModelAverager(int64_t warmup_steps, GroupPtr process_group)
    : warmup_steps_(warmup_steps), process_group_(process_group ? std::move(process_group) : default_group()) {
  TORCH_CHECK(warmup_steps >= 0, "[lockstep/optim] warmup_steps must be a non-negative number, but is ", warmup_steps);
}

void ModelAverager::average_parameters(const std::vector<at::Tensor>& params) {
  // Ranks that are at different steps would otherwise meet here and mix them.
  if (const auto group = averaging_group()) {
    detail::average_trained(params, group, {{"step of the model averager", str(step_)}});
  }
  ++step_;
}

void ModelAverager::average_parameters(const torch::nn::Module& module) {
  average_parameters(module.parameters());
}

void ModelAverager::average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  std::vector<at::Tensor> params;
  for (const auto& group : param_groups) params.insert(params.end(), group.params().begin(), group.params().end());
  average_parameters(params);
}

PeriodicModelAverager::PeriodicModelAverager(int64_t period, int64_t warmup_steps, GroupPtr process_group)
    : ModelAverager(warmup_steps, std::move(process_group)), period_(period) {
  TORCH_CHECK(period >= 1, "[lockstep/optim] period must be a positive value, but is ", period);
  if (period == 1) warn_of_period_one("period");
}

GroupPtr PeriodicModelAverager::averaging_group() const {
  const auto steps = step() - warmup_steps();
  return steps >= 0 && steps % period_ == 0 ? process_group() : nullptr;
}

HierarchicalModelAverager::HierarchicalModelAverager(const PeriodGroupSizes& period_group_size_dict,
                                                     int64_t warmup_steps, GroupPtr process_group)
    : ModelAverager(warmup_steps, std::move(process_group)) {
  const auto world_size = this->process_group()->getSize();
  check_hierarchy(period_group_size_dict, world_size);
  if (period_group_size_dict.back().first == 1) warn_of_period_one("the maximum period in period_group_size_dict");
  for (const auto& [period, size] : period_group_size_dict) {
    LOG(INFO) << "[lockstep/optim] each group of " << size << " ranks averages parameters every " << period
              << " steps, unless a larger one does";
    const bool is_whole = size == world_size;
    groups_.emplace_back(
        period, is_whole ? this->process_group() : new_subgroups(this->process_group(), neighbours(world_size, size)));
  }
}

GroupPtr HierarchicalModelAverager::averaging_group() const {
  if (step() < warmup_steps()) return nullptr;
  // As in Python it is the step itself that a period must divide, not the steps since the warm-up.
  for (auto each = groups_.rbegin(); each != groups_.rend(); ++each) {
    if (step() % each->first == 0) return each->second;
  }
  return nullptr;
}

}  // namespace lockstep
