// Model averagers: ranks that train apart, without an average of gradients in every step, meet now and then at the mean
// of their parameters. Python's torch.distributed.algorithms.model_averaging.
//
//   lockstep::PeriodicModelAverager averager(/*period=*/4, /*warmup_steps=*/100);
//   for (…) {
//     …
//     optimizer.step();
//     averager.average_parameters(*model);
//   }
//
// For the thread that trains. PostLocalSGDOptimizer does both calls in one.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Counts steps and says in which of them who averages.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;
  ModelAverager(const ModelAverager&) = delete;
  ModelAverager& operator=(const ModelAverager&) = delete;

  /// Called after every step of the optimizer, on all ranks: counts it, and if it is time, gives the parameters that
  /// have a gradient their mean over the ranks. Then it is collective over averaging_group() and blocking, and throws
  /// on all its ranks, having changed nothing, if they are at different steps or have other gradients.
  void average_parameters(const std::vector<at::Tensor>& params);
  void average_parameters(const torch::nn::Module& module);
  void average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  /// Where the next call averages; null if it only counts. Local.
  virtual GroupPtr averaging_group() const = 0;

  /// Calls so far. It is part of a checkpoint: set it, on all ranks, to what it was.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }

  int64_t warmup_steps() const { return warmup_steps_; }
  const GroupPtr& process_group() const { return process_group_; }

 protected:
  /// A null group means the default group. Refuses a negative number of steps.
  ModelAverager(int64_t warmup_steps, GroupPtr process_group);

 private:
  const int64_t warmup_steps_;
  const GroupPtr process_group_;
  int64_t step_ = 0;
};

/// Averages over all ranks in every `period`-th step, beginning with the first one after `warmup_steps`.
class PeriodicModelAverager : public ModelAverager {
 public:
  /// A null group means the default group. Local. Refuses a period below 1, and warns of a period of 1.
  explicit PeriodicModelAverager(int64_t period, int64_t warmup_steps = 0, GroupPtr process_group = nullptr);

  GroupPtr averaging_group() const override;
  int64_t period() const { return period_; }

 private:
  const int64_t period_;
};

/// Averages within small groups often and within larger ones seldom: in each step at most once, in the group of the
/// largest period that divides the number of the step.
class HierarchicalModelAverager : public ModelAverager {
 public:
  /// Python's ordered dict: periods, increasing, each with the size of the groups that average by it; the last size is
  /// that of `process_group`, and every size divides it. {{4, 8}, {16, 16}}: eight neighbours every 4 steps, all 16
  /// ranks every 16.
  using PeriodGroupSizes = std::vector<std::pair<int64_t, int>>;

  /// A null group means the default group. Makes the smaller groups, so it is collective over `process_group`. Refuses
  /// what does not fit the description above, before anything is made; warns of a largest period of 1.
  explicit HierarchicalModelAverager(const PeriodGroupSizes& period_group_size_dict, int64_t warmup_steps = 0,
                                     GroupPtr process_group = nullptr);

  GroupPtr averaging_group() const override;
  /// By period, in their order: the group this rank averages in.
  const std::vector<std::pair<int64_t, GroupPtr>>& period_process_groups() const { return groups_; }

 private:
  std::vector<std::pair<int64_t, GroupPtr>> groups_;
};

}  // namespace lockstep
