// DistributedDataParallel: a module whose gradients are averaged over the ranks while backward still runs.
//
//   auto world = lockstep::init();
//   Net net;
//   lockstep::DistributedDataParallel ddp(net, world.group());
//   auto loss = ddp(batch).sum();
//   loss.backward();      // on return every rank's .grad is the mean over the ranks
//
// The wrapper is a torch::nn::Module with one child, "module". It is not copied; keep it until backward has run.
// Constructor, forward of a synced step and its backward are collective over the group. See docs/ddp.md.
#pragma once

#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/scatter_gather.h"
#include "lockstep/nn/module_cast.h"
#include "lockstep/nn/tensor_tree.h"

namespace lockstep {

/// While it lives, steps whose forward runs in it stay local: gradients add up, and the first synced step after it
/// reduces the sum. Nests.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(DdpEngine& engine);
  ~NoSyncGuard();
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  DdpEngine& engine_;
  const bool was_enabled_;
};

template <class M>
class DistributedDataParallel : public torch::nn::Module, public Joinable {
 public:
  /// Collective over the group.
  explicit DistributedDataParallel(M module, const DdpOptions& options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module_(std::move(module)),
        engine_(DdpEngine::make(detail::as_module(module_), options)) {
    register_module("module", detail::as_module(module_));
    engine_->set_joinable(this);
  }
  DistributedDataParallel(M module, const GroupPtr& group, DdpOptions options = {})
      : DistributedDataParallel(std::move(module), with_group(std::move(options), group)) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// What the module's forward takes and returns.
  template <class... Args>
  auto forward(Args&&... args) {
    RECORD_FUNCTION("DistributedDataParallel.forward", std::vector<c10::IValue>());
    const auto engine = engine_;
    engine->pre_forward();
    return finish_forward(run_module(std::forward<Args>(args)...));
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The wrapped module, and its members.
  M& module() { return module_; }
  const M& module() const { return module_; }
  auto* operator->() { return &*module_; }

  /// Backward of `loss`, with this rank's gradients counting `weight` times (its samples, or its tokens): the exact
  /// mean over all samples even if ranks have different numbers of them. Under no_sync() weights add up like gradients.
  /// All of an accumulation is weighted, or nothing; gradients are zeroed before it.
  /// A rank without samples gives 0; its gradients are then left out, even if the mean over nothing made them NaN.
  void backward(const at::Tensor& loss, double weight = 1) { engine_->backward(loss, weight); }

  /// Forwards inside this scope, and their backwards, do not communicate.
  [[nodiscard]] NoSyncGuard no_sync() { return NoSyncGuard(*engine_); }

  /// A scope in which ranks may have different numbers of inputs: `auto scope = ddp.join();`, then forward and
  /// backward as often as there are inputs, then scope.finish(), or `ddp.join().run([&] { … });`. See
  /// lockstep/join/join.h, also for scopes with an optimizer that communicates.
  [[nodiscard]] Join join(bool divide_by_initial_world_size = true, bool enable = true,
                          bool throw_on_early_termination = false) {
    return Join({this}, {.enable = enable,
                         .throw_on_early_termination = throw_on_early_termination,
                         .options = {.divide_by_initial_world_size = divide_by_initial_world_size}});
  }
  /// With all settings: ddp.join({.options = {.weighted = true}}).
  [[nodiscard]] Join join(JoinSettings settings) { return Join({this}, std::move(settings)); }
  void check_join(const JoinSettings& settings) const override { engine_->check_join(settings); }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override { return engine_->join_hook(options); }
  c10::Device join_device() const override { return engine_->device(); }
  GroupPtr join_process_group() const override { return engine_->group(); }
  std::string join_name() const override { return "DistributedDataParallel"; }
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }

  /// hook(bucket), or hook(state, bucket), whose state is kept here; returns a future of the tensor that replaces the
  /// bucket's buffer. Instead of averaging; the gradients it gets are not divided. One per wrapper.
  template <BucketHook Hook>
  void register_comm_hook(Hook hook, const std::string& name = "user hook") {
    engine_->register_comm_hook({.name = name, .run = std::move(hook)});
  }
  template <class State, class Hook>
    requires StatefulBucketHook<Hook, State>
  void register_comm_hook(std::shared_ptr<State> state, Hook hook, const std::string& name = "user hook") {
    engine_->register_comm_hook(
        {.name = name, .run = [state, hook](GradBucket& bucket) { return hook(*state, bucket); }});
  }
  void register_comm_hook(CommHook hook) { engine_->register_comm_hook(std::move(hook)); }
  /// In per-parameter mode: hook(gradient, parameter) instead of averaging.
  void register_parameter_hook(ParameterHook hook) { engine_->register_parameter_hook(std::move(hook)); }

  /// Every parameter, or each of `optim_params`, gets an optimizer of its own that steps as soon as its gradient is
  /// reduced; its .grad stays undefined.
  void register_fused_optim(const OptimizerFactory& optim, const std::vector<at::Tensor>& optim_params = {}) {
    engine_->register_fused_optim(optim, optim_params);
  }

  /// Syncs buffers its own way instead of copying rank 0's. What it returns is waited for at the end of backward.
  void register_buffer_comm_hook(BufferHook hook, BufferHookLocation location = BufferHookLocation::kPostForward) {
    engine_->register_buffer_comm_hook(std::move(hook), location);
  }

  /// The graph is the same in every step. Before the first one.
  void set_static_graph() { engine_->set_static_graph(); }
  /// Whether outputs are cloned on their way through the sink, so that they may be changed in place.
  void set_ddp_sink_clone(bool clones) { engine_->set_sink_clones(clones); }
  /// For one backward: rows of sparse gradients, by parameter name.
  void set_sparse_metadata(std::map<std::string, at::Tensor> rows) {
    engine_->reducer_for("set_sparse_metadata").set_sparse_metadata(std::move(rows));
  }
  /// Goes on with another group, of which all members have the model as it is. Null on ranks that are not in it: they
  /// keep theirs.
  void update_process_group(const GroupPtr& group) { engine_->update_process_group(group); }
  /// Throws if a reduction was begun and not finished.
  void check_finalized() { engine_->reducer_for("check_finalized").check_finalized(); }

  /// A batch in parts along options.dim, one per device, and back; see scatter_gather.h.
  template <class Tree>
  std::vector<Tree> scatter(const Tree& inputs, const std::vector<c10::Device>& devices) const {
    return lockstep::scatter(inputs, devices, engine_->options().dim);
  }
  template <class Tree>
  Tree gather(const std::vector<Tree>& outputs, c10::Device output_device) const {
    return lockstep::gather(outputs, output_device, engine_->options().dim);
  }

  /// Settings and buckets, to make a wrapper like this one: DistributedDataParallel(module, group, snapshot.options).
  DdpSnapshot snapshot() const { return engine_->snapshot(); }
  /// The sync flags of a snapshot, after construction with its options.
  void restore(const DdpSnapshot& snapshot) { engine_->restore(snapshot); }
  /// Wraps a copy of the module, which must be cloneable, with the same options. Collective. Hooks are not copied.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<c10::Device>& device = std::nullopt) const override {
    const auto options = engine_->options();
    TORCH_CHECK(options.delay_all_reduce_named_params.empty(),
                "[lockstep/ddp] a wrapper with delayed parameters cannot be cloned: it names tensors of its module");
    const auto copy = detail::as_module(module_)->clone(device);
    return std::make_shared<DistributedDataParallel>(detail::module_cast<M>(copy), engine_->group(), options);
  }
  /// In full precision, whatever the wrapper computes in.
  void save(torch::serialize::OutputArchive& archive) const override {
    if (!engine_->save_in_full(*this, archive)) torch::nn::Module::save(archive);
  }

  const BucketPlan& bucket_plan() const { return engine_->reducer_for("bucket_plan").plan(); }
  /// How much of the last reduction's time was hidden behind backward, from 0 to 1; none before the first.
  std::optional<double> overlap_share() const { return engine_->overlap_share(); }
  c10::DDPLoggingData get_ddp_logging_data() const { return engine_->logging_data(); }
  void set_ddp_runtime_logging_sample_rate(int sample_rate) { engine_->set_runtime_logging_sample_rate(sample_rate); }
  const GroupPtr& process_group() const { return engine_->group(); }
  DdpEngine& engine() { return *engine_; }

 private:
  static DdpOptions with_group(DdpOptions options, const GroupPtr& group) {
    TORCH_CHECK(group, "[lockstep/ddp] the process group is null: this rank is not in it");
    TORCH_CHECK(!options.process_group || options.process_group == group,
                "[lockstep/ddp] two process groups were given");
    options.process_group = group;
    return options;
  }

  template <class... Args>
  decltype(auto) run_module(Args&&... args) {
    std::optional<detail::ActiveDdpScope> active;
    if (!engine_->options().per_parameter) active.emplace(*engine_);
    if (!engine_->changes_inputs()) return module_->forward(std::forward<Args>(args)...);
    return module_->forward(prepared(std::forward<Args>(args))...);
  }

  /// A copy with every tensor moved and cast; what holds none is passed on as it is.
  template <class Arg>
  std::remove_cvref_t<Arg> prepared(Arg&& arg) const {
    std::remove_cvref_t<Arg> copy(std::forward<Arg>(arg));
    visit_tensors(copy, [&](at::Tensor& tensor) { tensor = engine_->prepare_input(tensor); });
    return copy;
  }

  template <class Output>
  std::remove_cvref_t<Output> finish_forward(Output&& output) {
    std::remove_cvref_t<Output> result(std::forward<Output>(output));
    std::vector<at::Tensor*> tensors;
    visit_tensors(result, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
    engine_->post_forward(tensors);
    return result;
  }

  M module_;
  const std::shared_ptr<DdpEngine> engine_;
};

template <class M>
DistributedDataParallel(M) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, DdpOptions) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, GroupPtr) -> DistributedDataParallel<M>;
template <class M>
DistributedDataParallel(M, GroupPtr, DdpOptions) -> DistributedDataParallel<M>;

/// "module.encoder.weight" without the "module." a wrapper puts before its module's names; other names as they are.
std::string strip_ddp_prefix(const std::string& name);

}  // namespace lockstep
