// What is inside of a DistributedDataParallel: construction, and the phases of a step. One per wrapper. Internal to
// ddp.
#pragma once

#include <c10/util/Logging.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/ddp/averaging_group.h"
#include "lockstep/ddp/backward_sync.h"
#include "lockstep/ddp/buffer_sync.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/module_checks.h"
#include "lockstep/ddp/module_watch.h"
#include "lockstep/ddp/optimizer_in_backward.h"
#include "lockstep/ddp/options.h"
#include "lockstep/ddp/per_parameter_reduction.h"
#include "lockstep/ddp/recovered.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/ddp/replica_check.h"
#include "lockstep/ddp/snapshot.h"
#include "lockstep/ddp/weighted_backward.h"
#include "lockstep/join/join.h"
#include "lockstep/nn/module_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace detail {
class DdpLogger;
class DelayedAllReduce;
class LowPrecision;
}  // namespace detail

class DdpEngine : public std::enable_shared_from_this<DdpEngine> {
 public:
  /// Collective over the group: compares the ranks' models and copies rank 0's to all. Bad options throw before that.
  static std::shared_ptr<DdpEngine> make(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options);
  ~DdpEngine();
  DdpEngine(const DdpEngine&) = delete;
  DdpEngine& operator=(const DdpEngine&) = delete;

  // The four phases of a step; the last two are the autograd engine's.
  void pre_forward();
  /// The module's outputs, in place: they may be exchanged for ones that have passed the sink.
  void post_forward(const std::vector<at::Tensor*>& outputs);

  /// Around the module's own forward: makes this the active one of the thread; the outer one comes back afterwards.
  void enter_module();
  void leave_module() noexcept;
  /// What the module is called with: moved to its device, and cast.
  at::Tensor prepare_input(const at::Tensor& input) const;
  bool changes_inputs() const { return low_ || moves_inputs(); }

  /// See WeightedBackward.
  void backward(const at::Tensor& loss, double weight);

  // Join; see join_hook.cpp.
  /// What stands in scopes for this engine: its wrapper, which outlives every scope it is in.
  void set_joinable(Joinable* joinable) { joinable_ = joinable; }
  void check_join(const JoinSettings& settings) const;
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options);
  /// One iteration of ranks with inputs, on one without. Collective.
  void mirror_iteration();
  /// Parameters, and buffers if asked for, become those of rank `source`. Collective.
  void take_state_of(int source, bool has_buffers);
  bool has_forward_buffers() const { return has_forward_buffers_; }
  /// The steps that others' optimizers take inside of backwards; ranks of a scope compare them.
  JoinProgress& join_progress() { return join_progress_; }
  /// A scope ends on all ranks: parameters become those of `source`.
  void end_join(const Join& scope, int source);

  bool is_sync_enabled() const { return is_sync_enabled_; }
  /// Refuses to turn it off if optimizers step in backward.
  void set_sync_enabled(bool is_enabled);
  void set_static_graph();
  void use_plan(const BucketPlan& plan);
  void set_sink_clones(bool clones) { sink_clones_ = clones; }
  void register_comm_hook(CommHook hook);
  /// In per-parameter mode only.
  void register_parameter_hook(ParameterHook hook);
  /// An optimizer of its own for every parameter, or for some, that steps when the gradient is reduced. Once; takes the
  /// place of a comm hook.
  void register_fused_optim(const OptimizerFactory& factory, const std::vector<at::Tensor>& parameters);
  void register_buffer_comm_hook(BufferHook hook, BufferHookLocation location);
  void update_process_group(const GroupPtr& group);
  /// See DdpBase::recover().
  Recovered recover(const GroupPtr& group);
  c10::DDPLoggingData logging_data() const;
  std::optional<double> overlap_share() const;
  void set_runtime_logging_sample_rate(int sample_rate);
  DdpSnapshot snapshot() const;
  /// The flags of a snapshot, on a wrapper that was made with its options.
  void restore(const DdpSnapshot& snapshot);

  const DdpOptions& options() const { return options_; }
  const GroupPtr& group() const { return group_; }
  const std::set<std::string>& ignored() const { return ignored_; }
  /// Null if there is nothing to reduce in buckets.
  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }
  /// Throws, naming `what` needs it, if there is none.
  Reducer& reducer_for(const char* what) const;
  torch::nn::Module& module() const { return *module_; }
  c10::Device device() const { return traits_.device; }

 private:
  explicit DdpEngine(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options);
  void sync_states(const std::vector<ParameterInfo>& infos);
  void check_parameters_unchanged() const;
  /// Throws if what this wrapper does with gradients it could not do in a context of distributed autograd.
  void check_context() const;
  void check_no_new_parameters();
  /// A backward of `loss` would be: it goes through a synced forward.
  bool is_reduced(const at::Tensor& loss) const;
  void arm_reducer(const std::vector<at::Tensor*>& outputs);
  void pass_through_sink(const std::vector<at::Tensor*>& outputs);
  void make_reducer();
  void set_up_once();
  void set_up_optimizers_in_backward();
  void step_in_backward(std::vector<std::vector<OptimizerPtr>> optimizers, const std::string& reason);
  JoinTally begin_join_iteration(bool is_synced);
  bool is_joining() const { return joinable_ != nullptr && joinable_->join_config().enable; }
  void set_join_divisor(const JoinTally& tally);
  /// To ranks that wait for others; empty in a scope.
  std::string advice_on_uneven_inputs() const;
  /// A reduction begins. Collective now and then.
  void compare_replicas();
  void tell_of_difference(const std::string& message);
  bool moves_inputs() const;
  std::string who() const;
  [[noreturn]] void fail(const std::string& message) const;

  // Fixed after construction.
  const std::shared_ptr<torch::nn::Module> module_;
  const DdpOptions options_;
  GroupPtr group_;
  std::set<std::string> ignored_;
  NamedTensors parameters_;  // not ignored, frozen ones too
  detail::ManagedParameters managed_;
  std::optional<detail::AveragedParameters> averaged_;
  detail::ModuleTraits traits_;
  bool has_forward_buffers_ = true;  // buffers are synced before each forward
  bool has_initial_buffers_ = true;

  std::shared_ptr<Reducer> reducer_;
  std::unique_ptr<detail::BufferSync> buffers_;
  std::unique_ptr<detail::DdpLogger> logger_;
  std::optional<detail::WeightedBackward> weighted_;  // with a reducer
  std::unique_ptr<detail::LowPrecision> low_;
  std::shared_ptr<detail::DelayedAllReduce> delayed_;
  std::unique_ptr<detail::PerParameterReduction> per_parameter_;
  const std::shared_ptr<detail::BackwardSync> backward_sync_ =
      std::make_shared<detail::BackwardSync>();  // without a reducer

  // Steps.
  bool is_sync_enabled_ = true;
  bool sink_clones_ = true;
  bool has_set_up_ = false;           // what is done in the first forward
  std::string steps_in_backward_by_;  // what makes optimizers step in backward; empty if nothing does
  detail::ModuleWatch watch_;         // as it was when all its parameters were known

  // Join. The options are those of the last scope.
  Joinable* joinable_ = nullptr;
  JoinOptions join_options_;
  JoinProgress join_progress_;
  bool is_mirroring_ = false;   // since the last forward
  bool is_after_join_ = false;  // one in which ranks ran out of inputs
  detail::ReplicaCheck replicas_;
};

}  // namespace lockstep
