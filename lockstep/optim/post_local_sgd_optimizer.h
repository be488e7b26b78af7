// PostLocalSGDOptimizer: an optimizer that trains on this rank and averages parameters over the ranks now and then.
// Python's torch.distributed.optim of that name. It goes with the comm hook of ddp/post_local_sgd.h, see docs/ddp.md.
//
//   lockstep::PostLocalSGDOptimizer optimizer(std::make_unique<lockstep::optim::SGD>(ddp.parameters(), …),
//                                             std::make_shared<lockstep::PeriodicModelAverager>(4, 100));
//
// What counts are the groups, options and state of this optimizer, so schedulers, clipping and GradScaler are given
// this one; the one inside has them while it steps. For the thread that trains.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/optim/model_averager.h"
#include "lockstep/optim/sharded_gradients.h"

namespace lockstep {

class PostLocalSGDOptimizer : public torch::optim::Optimizer, public ShardedGradients {
 public:
  /// Local. `averager` counts the steps of this optimizer only. Refuses an optimizer that divides its work among ranks:
  /// it relies on parameters that are the same everywhere.
  PostLocalSGDOptimizer(std::shared_ptr<torch::optim::Optimizer> optim, std::shared_ptr<ModelAverager> averager);

  /// Steps the optimizer inside, then averages the parameters if it is time: see ModelAverager::average_parameters().
  /// Throws if somebody has changed the options of the optimizer inside, whose change would be lost.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// To the optimizer inside, too. Through a reference to the base class it is noticed by the next step.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// The archive of the optimizer inside, and "step", that of the averager. Interchangeable with archives of the
  /// optimizer inside: one without "step" warns and begins at step 0, warm-up included. Local; load on all ranks.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  ModelAverager& averager() { return *averager_; }

  /// Every rank has its own gradients, whole.
  std::vector<GradientShard> own_gradients() override;
  /// A rank that leaves out a step would leave the others waiting for its parameters: GradScaler asks all.
  std::vector<GroupPtr> stepping_groups() const override { return {averager_->process_group()}; }
  void discard_gradients() override { zero_grad(); }
  c10::Device gradient_device() const override;

 private:
  /// A group with exactly these options: the base class replaces those it does not know by the defaults.
  static void append_group(torch::optim::Optimizer& to, const torch::optim::OptimizerParamGroup& group);
  /// Gives the optimizer inside the groups and options of this one.
  void hand_over_groups() const;
  /// Takes its options.
  void take_over_options();
  void check_is_untouched() const;

  const std::shared_ptr<torch::optim::Optimizer> optim_;
  const std::shared_ptr<ModelAverager> averager_;
  /// By group: the numbers in the options that the optimizer inside was given last.
  mutable std::vector<std::vector<std::pair<const char*, double>>> given_;
};

}  // namespace lockstep
