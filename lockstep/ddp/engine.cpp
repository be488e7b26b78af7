#include "lockstep/ddp/engine.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/objects.h"
#include "lockstep/ddp/ddp_base.h"
#include "lockstep/ddp/delayed_all_reduce.h"
#include "lockstep/ddp/forward_pass.h"
#include "lockstep/ddp/input_mover.h"
#include "lockstep/ddp/logger.h"
#include "lockstep/ddp/low_precision.h"
#include "lockstep/ddp/state_sync.h"
#include "lockstep/nn/capture_mark.h"
#include "lockstep/nn/output_marks.h"
#include "lockstep/nn/output_sink.h"

namespace lockstep {
namespace {

thread_local std::vector<DdpEngine*> active_engines;  // the innermost last

/// "DDP(Net) bucket", for a module of type my::NetImpl.
std::string bucket_label(const torch::nn::Module& module) {
  auto name = module.name().substr(0, module.name().find('<'));
  name = name.substr(name.rfind(':') + 1);  // all of it if there is none
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return str("DDP(", name, ") bucket");
}

void note(const char* what) {
  if (!is_observed()) return;
  Event event;
  event.kind = "ddp_forward";
  event.state = what;
  announce(std::move(event));
}

/// On the outputs of one forward.
class PassMark final : public detail::OutputMark {
 public:
  PassMark(std::weak_ptr<DdpEngine> engine, detail::PassPtr pass)
      : engine_(std::move(engine)), pass_(std::move(pass)) {}

  void reached() override {
    if (const auto engine = engine_.lock()) return engine->reducer()->reach(pass_);
    // autograd::grad() brings no gradients that would have to be averaged.
    TORCH_CHECK(!pass_->is_synced || pass_->is_reduced || detail::is_partial_backward(),
                "[lockstep/ddp] backward through the outputs of a DistributedDataParallel that is destroyed. Keep the ",
                "wrapper until backward has run.");
  }

  bool is_of(const DdpEngine& engine) const { return engine_.lock().get() == &engine; }
  bool is_to_be_reduced() const { return pass_->is_synced && !pass_->is_reduced; }

 private:
  const std::weak_ptr<DdpEngine> engine_;
  const detail::PassPtr pass_;
};

}  // namespace

DdpEngine* active_ddp() {
  return active_engines.empty() ? nullptr : active_engines.back();
}

std::shared_ptr<DdpEngine> DdpEngine::make(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options) {
  return std::shared_ptr<DdpEngine>(new DdpEngine(std::move(module), options));
}

DdpEngine::DdpEngine(std::shared_ptr<torch::nn::Module> module, const DdpOptions& options)
    : module_(std::move(module)), options_(options) {
  TORCH_CHECK(module_, "[lockstep/ddp] DistributedDataParallel was given no module");
  group_ = detail::group_of(options_);
  ignored_ = detail::ignored_names(*module_);
  ignored_.insert(options_.params_and_buffers_to_ignore.begin(), options_.params_and_buffers_to_ignore.end());
  const auto all_parameters = detail::parameters_of(*module_, ignored_);
  for (const auto& [name, tensor] : options_.delay_all_reduce_named_params) ignored_.insert(name);
  parameters_ = detail::parameters_of(*module_, ignored_);
  managed_ = detail::managed_parameters(*module_, ignored_);
  watch_.note(*module_);
  has_forward_buffers_ = options_.forward_sync_buffers.value_or(options_.broadcast_buffers.value_or(true));
  has_initial_buffers_ = options_.forward_sync_buffers || options_.broadcast_buffers.value_or(true);

  // One rank's bad module must not leave the others waiting: all tell each other before anything else.
  std::string problem;
  try {
    detail::check_options(options_);
    traits_ = detail::check_module(*module_, options_, all_parameters, parameters_, !managed_.tensors.empty(), group_);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  }
  if (options_.init_sync && group_->getSize() > 1) {
    problem = detail::common_problem(all_gather_object(problem, group_));
    if (problem.empty()) {
      check_same_on_all_ranks("DistributedDataParallel's options", detail::shared_facts(options_, has_forward_buffers_),
                              group_);
    }
  }
  TORCH_CHECK(problem.empty(), problem);

  buffers_ = std::make_unique<detail::BufferSync>(*module_, ignored_, has_forward_buffers_);
  if (options_.init_sync) sync_states(managed_.infos);
  if (!options_.delay_all_reduce_named_params.empty()) {
    delayed_ = std::make_shared<detail::DelayedAllReduce>(options_.delay_all_reduce_named_params, group_);
    delayed_->attach(options_.param_to_hook_all_reduce,
                     [this] { return reducer_ ? reducer_->is_backward_synced() : backward_sync_->is_synced(); });
  }
  if (managed_.tensors.empty()) {
    LOG(INFO) << "[lockstep/ddp] the reduction of all parameters is delayed";
  } else if (options_.per_parameter) {
    per_parameter_ = std::make_unique<detail::PerParameterReduction>(
        managed_.tensors, group_, [this] { return backward_sync_->is_synced().value_or(is_sync_enabled_); });
  } else {
    make_reducer();
  }
  averaged_.emplace(managed_.tensors, managed_.infos, *this);
  if (reducer_ && group_->getSize() > 1) {
    reducer_->set_begin_listener([this] { compare_replicas(); });
    // Not for long: ranks on machines of different kinds round differently, and that adds up.
    if (options_.init_sync) replicas_.begin(/*last=*/9);
  }
}

void DdpEngine::make_reducer() {
  std::optional<BucketPlan> plan;
  if (!options_.bucket_plan.empty()) {
    if (options_.init_sync) {
      check_same_on_all_ranks("DistributedDataParallel's bucket plan", options_.bucket_plan, group_);
    }
    plan = BucketPlan::load(options_.bucket_plan, managed_.infos);
  }
  ReducerOptions settings;
  if (const auto& precision = options_.mixed_precision) {
    settings.reduce_dtype = precision->reduce_dtype ? precision->reduce_dtype : precision->param_dtype;
  }
  settings.caps = detail::caps_of(options_);
  settings.find_unused_parameters = options_.find_unused_parameters;
  settings.static_graph = options_.static_graph;
  // Gradients in full precision are no part of a bucket.
  settings.gradient_as_bucket_view = options_.gradient_as_bucket_view && !settings.reduce_dtype;
  settings.skip_all_reduce_unused_params = options_.skip_all_reduce_unused_params;
  settings.batched_grad_copy = options_.batched_grad_copy;
  settings.recoverable = options_.recoverable;
  settings.plan = plan;
  settings.label = interned(bucket_label(*module_));
  reducer_ = std::make_shared<Reducer>(managed_.tensors, managed_.infos, group_, settings);
  std::vector<at::Tensor> delayed;
  for (const auto& [name, tensor] : options_.delay_all_reduce_named_params) delayed.push_back(tensor);
  weighted_.emplace(reducer_, std::move(delayed), [this](const std::string& message) { fail(message); });
  if (options_.static_graph && options_.find_unused_parameters) {
    TORCH_WARN("[lockstep/ddp] static_graph makes find_unused_parameters redundant: the first step shows what is used");
  }
  logger_ = std::make_unique<detail::DdpLogger>(
      reducer_, options_,
      detail::DdpLogger::Wrapper{
          .module_name = module_->name(),
          .device_ids = detail::device_ids_text(options_),
          .output_device =
              options_.output_device
                  ? *options_.output_device
                  : (options_.device_ids && !options_.device_ids->empty() ? (*options_.device_ids)[0] : -1),
          .broadcast_buffers = has_forward_buffers_,
          .has_sync_bn = !traits_.sync_batch_norm.empty(),
          .is_multi_device = traits_.is_multi_device,
          .is_static_graph = options_.static_graph});
  if (options_.mixed_precision) {
    low_ = std::make_unique<detail::LowPrecision>(*options_.mixed_precision, parameters_,
                                                  detail::buffers_of(*module_, ignored_));
    reducer_->reserve_hook_slot("mixed_precision reduces the gradients its own way");
    logger_->set_mixed_precision(detail::describe(*options_.mixed_precision));
  }
  if (options_.recoverable && !options_.mixed_precision) {
    reducer_->reserve_hook_slot("recoverable reduces gradients in a way that survivors can repeat");
  }
  reducer_->set_error_listener([this](const std::string& error) { logger_->set_error_and_log(error); },
                               [this] { return advice_on_uneven_inputs(); });
  if (c10d::debug_level() != c10d::DebugLevel::Off) {
    LOG(INFO) << who() << " wraps " << module_->name() << "\n"
              << reducer_->plan().to_string() << detail::relevant_environment();
  }
}

DdpEngine::~DdpEngine() {
  if (delayed_) delayed_->detach();
  if (!reducer_) return;
  // Somebody else may keep the reducer alive. Its listeners refer to this engine, so they must not be called any more.
  reducer_->detach();
}

void DdpEngine::fail(const std::string& message) const {
  if (logger_) logger_->set_error_and_log(message);
  TORCH_CHECK(false, message);
}

void DdpEngine::sync_states(const std::vector<ParameterInfo>& infos) {
  verify_parameters_across_ranks(infos, group_);
  take_state_of(0, has_initial_buffers_);
}

void DdpEngine::take_state_of(int source, bool has_buffers) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters_) tensors.push_back(tensor);
  for (const auto& [name, tensor] : options_.delay_all_reduce_named_params) tensors.push_back(tensor);
  if (has_buffers) {
    for (const auto& [name, tensor] : detail::buffers_of(*module_, ignored_)) tensors.push_back(tensor);
  }
  broadcast_coalesced(tensors, group_, kBroadcastChunkBytes, source);
}

void DdpEngine::check_parameters_unchanged() const {
  const auto changes = detail::changes_since(managed_, detail::managed_parameters(*module_, ignored_));
  if (changes.empty()) return;
  fail(str(who(), ": the module's parameters changed after it was wrapped: ", changes,
           ". Wrap it again after such changes."));
}

void DdpEngine::check_no_new_parameters() {
  if (group_->getSize() == 1 || !c10::GradMode::is_enabled()) return;
  // Walking the module by names costs more than a forward may.
  if (!watch_.has_changed(*module_)) return;
  const auto names = detail::names_of_new(managed_, detail::managed_parameters(*module_, ignored_));
  if (names.empty()) return watch_.note(*module_);
  // Not noted, so that the next forward is refused too.
  fail(str(who(), ": these parameters began to require gradients, or came into the module, after it was wrapped: ",
           names, ". Their gradients would not be averaged, and the ranks' copies would drift apart. Wrap the module ",
           "again after such changes, or name what is meant to differ in params_and_buffers_to_ignore."));
}

void DdpEngine::set_up_once() {
  if (has_set_up_) return;
  note("set_up");
  set_up_optimizers_in_backward();
  has_set_up_ = true;
}

void DdpEngine::check_context() const {
  if (delayed_) delayed_->refuse_context();
  if (reducer_) reducer_->check_context();
}

void DdpEngine::pre_forward() {
  check_not_capturing("DistributedDataParallel");
  check_no_new_parameters();
  if (c10::GradMode::is_enabled() && detail::is_in_autograd_context()) check_context();
  if (per_parameter_) per_parameter_->refresh_hooks();
  if (delayed_) delayed_->refresh_hooks();
  if (!reducer_) {
    begin_join_iteration(c10::GradMode::is_enabled() && is_sync_enabled_);
    return;
  }
  reducer_->refresh_hooks();
  if (options_.recoverable && c10::GradMode::is_enabled()) reducer_->begin_recoverable_forward();
  set_up_once();
  if (c10d::debug_level() != c10d::DebugLevel::Off) check_parameters_unchanged();
  weighted_->forget_zeroed();
  const bool is_synced = c10::GradMode::is_enabled() && is_sync_enabled_;
  if (is_synced) reducer_->check_none_frozen();
  const auto tally = begin_join_iteration(is_synced);
  if (is_synced) {
    note("stats");
    logger_->set_runtime_stats_and_log();
    reducer_->prepare_for_forward();
  }
  // Ranks without inputs know of synced steps only.
  if (c10::GradMode::is_enabled() && (is_synced || !is_joining())) {
    if (reducer_->rebuild_buckets()) note("rebuild");
  }
  if (const auto due = buffers_->due_before_forward(); !due.empty()) {
    note("sync_buffers");
    const int source = tally.is_open() ? tally.live_ranks().back() : 0;
    detail::with_advice([&] { reducer_->install_futures(buffers_->before_forward(due, group_, source)); },
                        [this] { return advice_on_uneven_inputs(); });
  }
}

bool DdpEngine::moves_inputs() const {
  return options_.device_ids && !options_.device_ids->empty();
}

at::Tensor DdpEngine::prepare_input(const at::Tensor& input) const {
  if (!input.defined()) return input;
  const auto moved = moves_inputs() ? detail::move_input(input, traits_.device) : input;
  return low_ ? low_->cast_input(moved) : moved;
}

void DdpEngine::enter_module() {
  if (low_) low_->enter();
  if (!options_.per_parameter) active_engines.push_back(this);
}

void DdpEngine::leave_module() noexcept {
  if (!options_.per_parameter) active_engines.pop_back();
  if (low_) low_->leave();
}

void DdpEngine::post_forward(const std::vector<at::Tensor*>& outputs) {
  if (low_) low_->keep_writes();
  if (reducer_) {
    arm_reducer(outputs);
  } else if (c10::GradMode::is_enabled()) {
    backward_sync_->mark(outputs, is_sync_enabled_);
  }
  if (!delayed_) return;
  delayed_->reset_gradients();
  if (c10::GradMode::is_enabled()) delayed_->prepare_for_backward(is_sync_enabled_);
}

void DdpEngine::arm_reducer(const std::vector<at::Tensor*>& outputs) {
  const auto futures = buffers_->after_forward();
  if (!futures.empty()) {
    note("buffer_hook");
    reducer_->install_futures(futures);
  }
  const bool is_synced = c10::GradMode::is_enabled() && is_sync_enabled_;
  buffers_->set_required(is_synced);
  if (!c10::GradMode::is_enabled()) return;
  pass_through_sink(outputs);
  // Backward may come when the wrapper's switches are set otherwise: what it has to do goes with the outputs.
  const auto pass = std::make_shared<detail::ForwardPass>(detail::ForwardPass{.is_synced = is_synced});
  pass->is_visible = detail::mark_outputs(outputs, std::make_shared<PassMark>(weak_from_this(), pass));
  if (!is_synced) return reducer_->expect_local_backward(pass);
  note("arm");
  std::vector<at::Tensor> tensors;
  if (options_.find_unused_parameters && !reducer_->is_static_graph()) {
    for (const auto* output : outputs) tensors.push_back(*output);
  }
  reducer_->prepare_for_backward(tensors, pass);
}

void DdpEngine::pass_through_sink(const std::vector<at::Tensor*>& outputs) {
  const bool searches = options_.find_unused_parameters && !reducer_->is_static_graph();
  const bool counts = reducer_->is_static_graph() && !reducer_->has_counted_static_graph();
  if (!searches && !counts) return;
  std::vector<at::Tensor> tensors;
  for (const auto* output : outputs) tensors.push_back(*output);
  const auto passed = detail::pass_through_sink(tensors, sink_clones_);
  for (std::size_t i = 0; i < outputs.size(); ++i) *outputs[i] = passed[i];
}

bool DdpEngine::is_reduced(const at::Tensor& loss) const {
  if (!reducer_->may_reduce()) return false;
  bool is_known = false;
  bool is_reduced = false;
  detail::visit_marks(loss, [&](const detail::OutputMark& mark) {
    const auto* mine = dynamic_cast<const PassMark*>(&mark);
    if (mine == nullptr || !mine->is_of(*this)) return true;
    is_known = true;
    is_reduced = mine->is_to_be_reduced();
    return !is_reduced;
  });
  return is_known ? is_reduced : reducer_->is_armed();
}

void DdpEngine::backward(const at::Tensor& loss, double weight) {
  reducer_for("a weighted backward");
  TORCH_CHECK(!is_joining() || join_options_.weighted, "[lockstep/ddp] backward(loss, weight) in a Join scope needs ",
              "JoinOptions::weighted, so that ranks without inputs take part in adding up the weights: ",
              "ddp.join({.options = {.weighted = true}})");
  TORCH_CHECK(
      !detail::is_in_autograd_context(), who(), ": backward(loss, weight) is a backward into .grad, but this ",
      "thread is in a context of distributed autograd, whose gradients are the context's. Leave the context ",
      "first; or multiply the loss by weight * ranks / (sum of the ranks' weights), all-reduced before, and run ",
      "the context's own backward.");
  weighted_->run(loss, weight, is_reduced(loss));
}

std::string DdpEngine::who() const {
  return str("[lockstep/ddp] rank ", group_->getRank(), " of ", group_->getSize());
}

Reducer& DdpEngine::reducer_for(const char* what) const {
  TORCH_CHECK(reducer_, "[lockstep/ddp] ", what,
              " needs buckets: not with per_parameter, nor with all parameters delayed");
  return *reducer_;
}

void DdpEngine::set_static_graph() {
  reducer_for("set_static_graph");
  if (reducer_->is_static_graph()) {
    TORCH_WARN("[lockstep/ddp] static_graph is set already");
    return;
  }
  reducer_->set_static_graph();
  logger_->set_static_graph();
  if (options_.find_unused_parameters) {
    TORCH_WARN("[lockstep/ddp] static_graph makes find_unused_parameters redundant: the first step shows what is used");
  }
}

void DdpEngine::set_sync_enabled(bool is_enabled) {
  TORCH_CHECK(is_enabled || steps_in_backward_by_.empty(),
              "[lockstep/ddp] no_sync cannot be used: ", steps_in_backward_by_, " steps in every backward");
  is_sync_enabled_ = is_enabled;
}

void DdpEngine::use_plan(const BucketPlan& plan) {
  auto& reducer = reducer_for("use_plan");
  // One rank's bad plan must not leave the others waiting.
  std::string problem;
  BucketPlan mine;
  try {
    mine = reducer.checked_plan(plan);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  }
  if (group_->getSize() > 1) {
    problem = detail::common_problem(all_gather_object(problem, group_));
    if (problem.empty()) check_same_on_all_ranks("the bucket plan given to use_plan()", mine.save(), group_);
  }
  TORCH_CHECK(problem.empty(), problem);
  reducer.use_plan(std::move(mine));
}

void DdpEngine::register_parameter_hook(ParameterHook hook) {
  TORCH_CHECK(per_parameter_, "[lockstep/ddp] hooks of single parameters need per_parameter mode");
  TORCH_CHECK(hook, "[lockstep/ddp] register_parameter_hook was given no hook");
  per_parameter_->add_hook(std::move(hook));
}

void DdpEngine::register_comm_hook(CommHook hook) {
  reducer_for("a comm hook");
  const auto name = hook.name;
  reducer_->register_comm_hook(std::move(hook));
  logger_->set_comm_hook(name);
}

void DdpEngine::register_buffer_comm_hook(BufferHook hook, BufferHookLocation location) {
  buffers_->set_hook(std::move(hook), location);
}

void DdpEngine::update_process_group(const GroupPtr& group) {
  if (!group) return;  // this rank is not in it
  TORCH_CHECK(reducer_ && !delayed_, "[lockstep/ddp] update_process_group is for reduction in buckets: not with ",
              "per_parameter, nor with delayed parameters. Wrap the module again.");
  reducer_->update_process_group(group);
  group_ = group;
  replicas_.stop();  // not all of its ranks may know of the last scope
}

c10::DDPLoggingData DdpEngine::logging_data() const {
  return logger_ ? logger_->data() : c10::DDPLoggingData();
}

std::optional<double> DdpEngine::overlap_share() const {
  return logger_ ? logger_->overlap_share() : std::nullopt;
}

void DdpEngine::set_runtime_logging_sample_rate(int sample_rate) {
  if (logger_) logger_->set_sample_rate(sample_rate);
}

}  // namespace lockstep
