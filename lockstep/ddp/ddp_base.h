// DistributedDataParallel without its module's type: all that can be asked of a wrapper of any module. Programs make
// the template of distributed_data_parallel.h; functions that take any wrapper take this.
#pragma once

#include <c10/util/Logging.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/buffer_hook.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/optimizer_in_backward.h"
#include "lockstep/ddp/options.h"
#include "lockstep/ddp/parameter_hook.h"
#include "lockstep/ddp/recovered.h"
#include "lockstep/ddp/snapshot.h"
#include "lockstep/join/join.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

class DdpEngine;

/// While it lives, steps whose forward runs in it stay local: gradients add up, and the first synced step after it
/// reduces the sum. Nests.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(DdpEngine& engine, bool is_local = true);
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  DdpEngine& engine_;
  const bool was_enabled_;
};

class DdpBase : public Joinable {
 public:
  ~DdpBase() override;

  /// Backward of `loss`, with this rank's gradients counting `weight` times (its samples, or its tokens): the exact
  /// mean over all samples even if ranks have different numbers of them. Under no_sync() weights add up like gradients.
  /// All of an accumulation is weighted, or nothing; gradients are zeroed before it.
  /// A rank without samples gives 0; its gradients are then left out, even if the mean over nothing made them NaN.
  void backward(const at::Tensor& loss, double weight = 1);

  /// Forwards inside this scope, and their backwards, do not communicate. With false it changes nothing, for loops that
  /// accumulate: `const auto guard = ddp.no_sync(step % 4 != 3);`.
  [[nodiscard]] NoSyncGuard no_sync(bool is_local = true);

  /// A scope in which ranks may have different numbers of inputs: `auto scope = ddp.join();`, then forward and
  /// backward as often as there are inputs, then scope.finish(), or `ddp.join().run([&] { … });`. See
  /// lockstep/join/join.h, also for scopes with an optimizer that communicates.
  [[nodiscard]] Join join(bool divide_by_initial_world_size = true, bool enable = true,
                          bool throw_on_early_termination = false);
  /// With all settings: ddp.join({.options = {.weighted = true}}).
  [[nodiscard]] Join join(JoinSettings settings);
  void check_join(const JoinSettings& settings) const override;
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  GroupPtr join_process_group() const override;
  std::string join_name() const override;
  JoinPhase join_phase() const override;
  JoinProgress join_progress() const override;

  /// hook(bucket), or hook(state, bucket), whose state is kept here; returns a future of the tensor that replaces the
  /// bucket's buffer. Instead of averaging; the gradients it gets are not divided. One per wrapper.
  template <BucketHook Hook>
  void register_comm_hook(Hook hook, const std::string& name = "user hook") {
    register_comm_hook(CommHook{.name = name, .run = std::move(hook)});
  }
  template <class State, class Hook>
    requires StatefulBucketHook<Hook, State>
  void register_comm_hook(std::shared_ptr<State> state, Hook hook, const std::string& name = "user hook") {
    register_comm_hook(
        CommHook{.name = name, .run = [state, hook](GradBucket& bucket) { return hook(*state, bucket); }});
  }
  void register_comm_hook(CommHook hook);
  /// In per-parameter mode: hook(gradient, parameter) instead of averaging.
  void register_parameter_hook(ParameterHook hook);

  /// Every parameter, or each of `optim_params`, gets an optimizer of its own that steps as soon as its gradient is
  /// reduced, maybe while backward still computes others; its .grad stays undefined.
  void register_fused_optim(const OptimizerFactory& optim, const std::vector<at::Tensor>& optim_params = {});

  /// Syncs buffers its own way instead of copying rank 0's. What it returns is waited for at the end of backward.
  void register_buffer_comm_hook(BufferHook hook, BufferHookLocation location = BufferHookLocation::kPostForward);

  /// The graph is the same in every step. Before the first one.
  void set_static_graph();
  /// These buckets, for good: they are not laid out anew after the first step. Refused after that, and if the plan is
  /// for other parameters. Collective: the ranks' plans are compared.
  ///   ddp.use_plan(BucketPlan(ddp.bucket_plan().parameters(), {{.parameters = {3, 2}}, {.parameters = {1, 0}}}));
  void use_plan(const BucketPlan& plan);
  /// Whether outputs are cloned on their way through the sink, so that they may be changed in place.
  void set_ddp_sink_clone(bool clones);
  /// For one backward: rows of sparse gradients, by parameter name.
  void set_sparse_metadata(std::map<std::string, at::Tensor> rows);
  /// Goes on with another group, of which all members have the model as it is. Null on ranks that are not in it: they
  /// keep theirs.
  void update_process_group(const GroupPtr& group);
  /// Goes on with `group`, which surviving_group() has made after a collective threw c10::DistBackendError, in forward
  /// or backward: the step that failed is finished with what had arrived, or reduced again by those who are left.
  /// Collective over `group`; if another one dies meanwhile it throws, and can be called again with the group of those
  /// who are left then. Needs DdpOptions::recoverable.
  Recovered recover(const GroupPtr& group);
  /// Throws if a reduction was begun and not finished.
  void check_finalized();

  /// Settings and buckets, to make a wrapper like this one: DistributedDataParallel(module, group, snapshot.options).
  DdpSnapshot snapshot() const;
  /// The sync flags of a snapshot, after construction with its options.
  void restore(const DdpSnapshot& snapshot);

  const BucketPlan& bucket_plan() const;
  /// In the last synced backward.
  int64_t buckets_reduced() const;
  /// How much of the last reduction's time was hidden behind backward, from 0 to 1; none before the first.
  std::optional<double> overlap_share() const;
  c10::DDPLoggingData get_ddp_logging_data() const;
  void set_ddp_runtime_logging_sample_rate(int sample_rate);
  const GroupPtr& process_group() const;
  const DdpOptions& options() const;
  /// The part inside; its header is not installed.
  DdpEngine& engine() const { return *engine_; }
  const std::shared_ptr<DdpEngine>& shared_engine() const { return engine_; }

 protected:
  /// Collective over the group.
  DdpBase(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options);
  static DdpOptions with_group(DdpOptions options, const GroupPtr& group);

  // What a forward of the wrapper is made of; see nn/wrapped_module.h.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor*>& outputs);
  void enter_module();
  void leave_module() noexcept;
  bool casts_or_moves_inputs() const;
  at::Tensor cast_and_move(const at::Tensor& input) const;
  /// Throws if the wrapper cannot be cloned.
  void check_clone() const;

 private:
  const std::shared_ptr<DdpEngine> engine_;
};

/// The inside of the wrapper whose forward runs on this thread, null if none does.
DdpEngine* active_ddp();

/// "module.encoder.weight" without the "module." a wrapper puts before its module's names; other names as they are.
std::string strip_ddp_prefix(const std::string& name);

}  // namespace lockstep
