// The step between backwards: a local optimizer that holds this rank's shard of the parameters, as a Division cuts it,
// under the options of the whole groups; or masters of them, where such are wanted. Internal to zero; made by
// ZeroOptimizer.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/zero/local_optimizer.h"
#include "lockstep/zero/master_weights.h"
#include "lockstep/zero/sharding.h"

namespace lockstep::detail {

class ShardedStep final : public Sharding {
 public:
  /// `whole` has the groups that programs see; they are divided at once. `master_dtype` as of ZeroOptions. `who` opens
  /// messages.
  ShardedStep(torch::optim::Optimizer& whole, const LocalOptimizerType& type, std::unique_ptr<Division> division,
              std::optional<at::ScalarType> master_dtype, std::string who);

  void on_group_change() override;
  void on_trainability_change() override;
  at::Tensor step(const LocalStep& local_step, torch::optim::Optimizer::LossClosure closure) override;
  std::vector<Arrival> launch_sync() override { return division_->launch_sync(); }
  std::vector<const FlatShard*> flat_buffers() const override { return division_->flat_buffers(); }
  std::vector<at::Tensor> own_gradients() const override { return division_->own_gradients(); }
  void drop_gradients() override { division_->drop_gradients(); }
  void check_has_state(const char* /*what*/) const override {}
  void take_options() override { copy_options(whole_, *local_); }
  void follow_parameters() override { masters_.follow_parameters(); }
  std::vector<StatePiece> pieces() const override { return division_->pieces(local_state()); }
  void load(const StateSource& source) override;
  ShardingBytes bytes() const override;
  std::vector<at::Tensor> own_parameters() const override;
  torch::optim::Optimizer* local() override { return local_.get(); }

 private:
  std::vector<std::vector<at::Tensor>> whole_groups() const;
  /// What the local optimizer steps; makes masters of what has none yet.
  LocalOptimizerType::Groups local_groups();
  /// The local optimizer's, with masters.
  OptimizerStateDict local_state() const;
  void copy_options(torch::optim::Optimizer& from, torch::optim::Optimizer& to) const;
  void assign_options(const torch::optim::OptimizerOptions& from, torch::optim::OptimizerParamGroup& to) const;
  /// Lets the division cut the shard anew, and gives it to the local optimizer with this state. If the optimizer throws
  /// it has what it had.
  void rebuild_local(const StateSource& source);
  void exchange_parameters(std::vector<std::vector<at::Tensor>>& parameters);
  void take_gradients();

  torch::optim::Optimizer& whole_;
  const LocalOptimizerType& type_;
  const std::unique_ptr<Division> division_;
  const std::string who_;
  MasterWeights masters_;
  std::unique_ptr<torch::optim::Optimizer> local_;
  bool has_warned_of_whole_gradients_ = false;
};

}  // namespace lockstep::detail
