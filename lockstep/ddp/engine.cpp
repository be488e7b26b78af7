#include "lockstep/ddp/engine.h"

#include <ATen/ops/full.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/nn/module.h>

#include <cmath>
#include <unordered_set>

#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/ddp/delayed_all_reduce.h"
#include "lockstep/ddp/logger.h"
#include "lockstep/ddp/low_precision.h"
#include "lockstep/ddp/state_sync.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/nn/output_sink.h"

namespace lockstep {
namespace {

thread_local DdpEngine* active_engine = nullptr;

void note(const char* what) {
  if (!is_observed()) return;
  Event event;
  event.kind = "ddp_forward";
  event.state = what;
  announce(std::move(event));
}

std::set<std::string> devices_of(const NamedTensors& tensors) {
  std::set<std::string> devices;
  for (const auto& [name, tensor] : tensors) devices.insert(tensor.device().str());
  return devices;
}

std::string device_ids_text(const DdpOptions& options) {
  std::vector<int> ids;  // device indices print as characters
  if (options.device_ids) ids.assign(options.device_ids->begin(), options.device_ids->end());
  return join(ids, ", ");
}

/// What all ranks throw, in the same words.
std::string common_problem(const std::vector<std::string>& problems) {
  std::string text;
  for (std::size_t rank = 0; rank < problems.size(); ++rank) {
    if (problems[rank].empty() || problems[rank] == problems[0]) continue;
    text += str(text.empty() ? "" : "\n", "on rank ", rank, ": ", problems[rank]);
  }
  if (text.empty()) return problems[0];
  return str("[lockstep/ddp] the ranks cannot wrap their modules",
             problems[0].empty() ? "" : "; on rank 0: ", problems[0], problems[0].empty() ? "; " : "\n", text);
}

/// What decides which collectives a step makes: the ranks must agree.
Facts shared_facts(const DdpOptions& options, bool has_forward_buffers) {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  return {{"find_unused_parameters", text(options.find_unused_parameters)},
          {"static_graph", text(options.static_graph)},
          {"skip_all_reduce_unused_params", text(options.skip_all_reduce_unused_params)},
          {"per_parameter", text(options.per_parameter)},
          {"mixed_precision", detail::describe(options.mixed_precision.value_or(MixedPrecision{}))},
          {"number of delayed parameters", std::to_string(options.delay_all_reduce_named_params.size())},
          {"buffers synced before forward", text(has_forward_buffers)}};
}

}  // namespace

DdpEngine* active_ddp() {
  return active_engine;
}

detail::ActiveDdpScope::ActiveDdpScope(DdpEngine& engine) : outer_(active_engine) {
  active_engine = &engine;
}

detail::ActiveDdpScope::~ActiveDdpScope() {
  active_engine = outer_;
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
  has_forward_buffers_ = options_.forward_sync_buffers.value_or(options_.broadcast_buffers.value_or(true));
  has_initial_buffers_ = options_.forward_sync_buffers || options_.broadcast_buffers.value_or(true);

  // One rank's bad module must not leave the others waiting: all tell each other before anything else.
  std::string problem;
  try {
    detail::check_options(options_);
    check_module(all_parameters);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  }
  if (options_.init_sync && group_->getSize() > 1) {
    problem = common_problem(all_gather_object(problem, group_));
    if (problem.empty()) {
      check_same_on_all_ranks("DistributedDataParallel's options", shared_facts(options_, has_forward_buffers_),
                              group_);
    }
  }
  TORCH_CHECK(problem.empty(), problem);

  buffers_ = std::make_unique<detail::BufferSync>(*module_, ignored_, has_forward_buffers_);
  if (options_.init_sync) sync_states(managed_.infos);
  if (!options_.delay_all_reduce_named_params.empty()) {
    delayed_ = std::make_shared<detail::DelayedAllReduce>(options_.delay_all_reduce_named_params, group_);
    delayed_->attach(options_.param_to_hook_all_reduce, [this] { return is_sync_enabled_; });
  }
  if (managed_.tensors.empty()) {
    LOG(INFO) << "[lockstep/ddp] the reduction of all parameters is delayed";
  } else if (options_.per_parameter) {
    per_parameter_ =
        std::make_unique<detail::PerParameterReduction>(managed_.tensors, group_, [this] { return is_sync_enabled_; });
  } else {
    make_reducer();
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
  const auto param_dtype = options_.mixed_precision ? options_.mixed_precision->param_dtype : std::nullopt;
  ReducerOptions settings;
  settings.caps = detail::caps_of(options_);
  settings.find_unused_parameters = options_.find_unused_parameters;
  settings.static_graph = options_.static_graph;
  // Gradients in full precision are no part of a bucket.
  settings.gradient_as_bucket_view = options_.gradient_as_bucket_view && !param_dtype;
  settings.skip_all_reduce_unused_params = options_.skip_all_reduce_unused_params;
  settings.batched_grad_copy = options_.batched_grad_copy;
  settings.gradient_dtype = param_dtype;
  settings.plan = plan;
  reducer_ = std::make_shared<Reducer>(managed_.tensors, managed_.infos, group_, settings);
  if (options_.static_graph && options_.find_unused_parameters) {
    TORCH_WARN("[lockstep/ddp] static_graph makes find_unused_parameters redundant: the first step shows what is used");
  }
  logger_ = std::make_unique<detail::DdpLogger>(
      reducer_, options_,
      detail::DdpLogger::Facts{
          .module_name = module_->name(),
          .device_ids = device_ids_text(options_),
          .output_device =
              options_.output_device
                  ? *options_.output_device
                  : (options_.device_ids && !options_.device_ids->empty() ? (*options_.device_ids)[0] : -1),
          .broadcast_buffers = has_forward_buffers_,
          .has_sync_bn = !sync_bn_.empty(),
          .is_multi_device = is_multi_device_,
          .is_static_graph = options_.static_graph});
  if (options_.mixed_precision) {
    low_ = std::make_unique<detail::LowPrecision>(*options_.mixed_precision, parameters_,
                                                  detail::buffers_of(*module_, ignored_));
    low_->attach(reducer_);
    reducer_->reserve_hook_slot("mixed_precision reduces the gradients its own way");
    logger_->set_mixed_precision(detail::describe(*options_.mixed_precision));
  }
  reducer_->set_error_listener([this](const std::string& error) { logger_->set_error_and_log(error); });
  if (c10d::debug_level() != c10d::DebugLevel::Off) {
    LOG(INFO) << who() << " wraps " << module_->name() << "\n"
              << reducer_->plan().to_string() << detail::relevant_environment();
  }
}

DdpEngine::~DdpEngine() {
  if (delayed_) delayed_->detach();
  if (!reducer_) return;
  // Whoever keeps the reducer keeps no way back here.
  reducer_->set_error_listener(nullptr);
  reducer_->set_finish_listener(nullptr);
  reducer_->set_consumer(nullptr);
  reducer_->remove_autograd_hooks();
}

void DdpEngine::fail(const std::string& message) const {
  if (logger_) logger_->set_error_and_log(message);
  TORCH_CHECK(false, message);
}

void DdpEngine::check_module(const NamedTensors& all_parameters) {
  const auto& trigger = options_.param_to_hook_all_reduce;
  TORCH_CHECK(!trigger.defined() || std::any_of(all_parameters.begin(), all_parameters.end(),
                                                [&](const auto& each) { return each.second.is_same(trigger); }),
              "[lockstep/ddp] param_to_hook_all_reduce is no parameter of the module");
  TORCH_CHECK(!managed_.tensors.empty() || !options_.delay_all_reduce_named_params.empty(),
              "[lockstep/ddp] the module has no parameter that requires a gradient: DistributedDataParallel is not "
              "needed. (Ignored and frozen parameters do not count.)");
  for (const auto& [name, tensor] : parameters_) {
    TORCH_CHECK(!tensor.requires_grad() || tensor.sizes() != at::IntArrayRef({0}), "[lockstep/ddp] parameter '", name,
                "' has no shape yet. Run a forward pass that gives it one before you wrap the module.");
  }
  std::set<std::string> types;
  for (const auto& [name, tensor] : all_parameters) types.insert(c10::DeviceTypeName(tensor.device().type(), true));
  TORCH_CHECK(types.size() == 1, "[lockstep/ddp] the module's parameters must be on one type of device, but are on ",
              join(types, ", "));
  const auto devices = devices_of(all_parameters);
  is_multi_device_ = devices.size() > 1;
  device_ = all_parameters[0].second.device();
  const bool takes_device_ids = !device_.is_cpu() && !is_multi_device_;
  const bool has_device_ids = options_.device_ids && !options_.device_ids->empty();
  TORCH_CHECK(!has_device_ids || options_.device_ids->size() == 1, "[lockstep/ddp] device_ids can only be unset or ",
              "hold the module's one device, but is [", device_ids_text(options_), "] and the parameters are on ",
              join(devices, ", "));
  TORCH_CHECK(takes_device_ids || (!has_device_ids && !options_.output_device),
              "[lockstep/ddp] device_ids and output_device are for modules on one accelerator, but got device_ids [",
              has_device_ids ? device_ids_text(options_) : "", "], output_device ",
              options_.output_device ? std::to_string(*options_.output_device) : "none", " and parameters on ",
              join(devices, ", "));
  detail::for_each_module(*module_, [&](const std::string& name, const torch::nn::Module& part) {
    if (dynamic_cast<const SyncBatchNormImpl*>(&part) == nullptr) return;
    TORCH_CHECK(!device_.is_cpu(), "[lockstep/ddp] layer '", name,
                "' is a SyncBatchNorm, which works in modules on an accelerator only");
    if (sync_bn_.empty()) sync_bn_ = name;
  });
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
  if (low_ && low_->is_low()) return;  // a forward without backward left them so
  const auto now = detail::managed_parameters(*module_, ignored_);
  const auto describe = [](const ParameterInfo& info, const at::Tensor& tensor) {
    return str(info.describe(), " on ", tensor.device().str());
  };
  std::vector<std::string> problems;
  std::map<std::string, std::size_t> before;
  for (std::size_t i = 0; i < managed_.infos.size(); ++i) before[managed_.infos[i].name] = i;
  for (std::size_t i = 0; i < now.infos.size(); ++i) {
    const auto& name = now.infos[i].name;
    const auto found = before.find(name);
    if (found == before.end()) {
      problems.push_back(str("'", name, "' was added or has begun to require gradients"));
      continue;
    }
    const auto& was = managed_.infos[found->second];
    if (!now.tensors[i].is_same(managed_.tensors[found->second])) {
      problems.push_back(str("'", name, "' was replaced by another tensor"));
    } else if (was.device != now.infos[i].device || was.dtype != now.infos[i].dtype ||
               was.sizes != now.infos[i].sizes) {
      problems.push_back(str(describe(was, managed_.tensors[found->second]), " was changed or moved"));
    }
    before.erase(found);
  }
  for (const auto& [name, index] : before) {
    problems.push_back(str("'", name, "' was removed, or does not require gradients any more"));
  }
  if (problems.empty()) return;
  fail(str(who(), ": the module's parameters changed after it was wrapped: ", join(problems, "; "),
           ". Wrap it again after such changes."));
}

void DdpEngine::set_up_once() {
  if (has_set_up_) return;
  note("set_up");
  set_up_optimizers_in_backward();
  has_set_up_ = true;
}

void DdpEngine::pre_forward() {
  if (per_parameter_) per_parameter_->refresh_hooks();
  if (!reducer_) return;
  reducer_->refresh_hooks();
  set_up_once();
  if (c10d::debug_level() != c10d::DebugLevel::Off) check_parameters_unchanged();
  const bool is_synced = c10::GradMode::is_enabled() && is_sync_enabled_;
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
  if (buffers_->will_sync_before_forward()) {
    note("sync_buffers");
    const int source = tally.is_open() ? tally.live_ranks().back() : 0;
    reducer_->install_futures(buffers_->before_forward(group_, source));
  }
  if (low_) low_->lower();
}

bool DdpEngine::moves_inputs() const {
  return options_.device_ids && !options_.device_ids->empty();
}

at::Tensor DdpEngine::prepare_input(const at::Tensor& input) const {
  if (!input.defined()) return input;
  const auto moved = moves_inputs() ? move_input(input) : input;
  return low_ ? low_->cast_input(moved) : moved;
}

at::Tensor DdpEngine::move_input(const at::Tensor& input) const {
  if (input.device() == device_) return input;
  if (!input.device().is_cpu() || env("PYTORCH_DDP_USE_SIDE_STREAM").value_or("1") != "1") {
    return input.to(device_, /*non_blocking=*/true);
  }
  // On a stream of its own, so that it need not wait for what the device still computes.
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const auto current = guard.getStream(device_);
  const auto side = guard.getStreamFromGlobalPool(device_);
  at::Tensor moved;
  c10::Event copied(device_.type());
  {
    const c10::StreamGuard on_side(side);
    moved = input.to(device_, /*non_blocking=*/true);
    copied.record(side);
  }
  copied.block(current);
  guard.recordDataPtrOnStream(moved.storage().data_ptr(), current);
  return moved;
}

void DdpEngine::post_forward(const std::vector<at::Tensor*>& outputs) {
  // Without a backward nobody else would.
  if (low_ && !c10::GradMode::is_enabled()) low_->restore();
  if (reducer_) arm_reducer(outputs);
  if (delayed_) delayed_->reset_gradients();
}

void DdpEngine::arm_reducer(const std::vector<at::Tensor*>& outputs) {
  const auto futures = buffers_->after_forward();
  if (!futures.empty()) {
    note("buffer_hook");
    reducer_->install_futures(futures);
  }
  const bool is_synced = c10::GradMode::is_enabled() && is_sync_enabled_;
  buffers_->set_required(is_synced);
  if (is_synced) {
    note("arm");
    std::vector<at::Tensor> tensors;
    if (options_.find_unused_parameters && !reducer_->is_static_graph()) {
      for (const auto* output : outputs) tensors.push_back(*output);
    }
    reducer_->prepare_for_backward(tensors);
  } else if (c10::GradMode::is_enabled()) {
    reducer_->expect_local_backward();
  }
  pass_through_sink(outputs);
}

void DdpEngine::pass_through_sink(const std::vector<at::Tensor*>& outputs) {
  const bool searches = options_.find_unused_parameters && !reducer_->is_static_graph();
  const bool counts = reducer_->is_static_graph() && !reducer_->has_counted_static_graph();
  if (!searches && !counts) return;
  std::vector<at::Tensor> tensors;
  for (const auto* output : outputs) tensors.push_back(*output);
  const auto on_backward = [weak = weak_from_this(), counts] {
    const auto engine = weak.lock();
    TORCH_CHECK(engine, "[lockstep/ddp] backward through the outputs of a DistributedDataParallel that is destroyed. ",
                "Keep the wrapper until backward has run.");
    if (!counts || engine->has_queued_static_reduction_) return;
    engine->has_queued_static_reduction_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([weak] {
      const auto still = weak.lock();
      if (!still) return;
      // If it was a local backward, the next one shall try again.
      still->has_queued_static_reduction_ = false;
      still->reducer_->delay_all_reduce();
    });
  };
  const auto passed = detail::pass_through_sink(tensors, sink_clones_, on_backward);
  for (std::size_t i = 0; i < outputs.size(); ++i) *outputs[i] = passed[i];
}

double DdpEngine::reduced_weight(double weight) {
  // As a double: token counts of large batches do not fit a float.
  const auto total = at::full({1}, weight, at::TensorOptions(at::kDouble).device(device_));
  all_reduce(total, group_);
  const auto sum = total.item<double>();
  if (sum <= 0) {
    fail(str(who(), ": the weights of all ranks are zero: there is nothing to average"));
  }
  return sum;
}

void DdpEngine::backward(const at::Tensor& loss, double weight) {
  reducer_for("a weighted backward");
  TORCH_CHECK(weight >= 0 && std::isfinite(weight), "[lockstep/ddp] a weight of ", weight,
              " was given: it cannot be negative and must be finite");
  TORCH_CHECK(!is_joining() || join_options_.weighted, "[lockstep/ddp] backward(loss, weight) in a Join scope needs ",
              "JoinOptions::weighted, so that ranks without inputs take part in adding up the weights: ",
              "ddp.join({.options = {.weighted = true}})");
  const bool is_first = weight_so_far_ == 0;
  weight_so_far_ += weight;
  const bool has_nothing_to_count = weight_so_far_ == 0;
  if (is_sync_enabled_) {
    const auto sum = reduced_weight(weight_so_far_);
    weight_so_far_ = 0;
    reducer_->set_divisor(sum);
    // Gradients of an earlier reduced step are averages already: what the divisor takes away is given back.
    if (is_first) scale_gradients(sum / group_->getSize());
    // The mean over nothing is NaN, and so is zero times it.
    if (has_nothing_to_count) reducer_->leave_out_own_gradients();
  } else {
    reducer_->set_divisor_source([this]() -> double {
      fail(str(who(),
               ": gradients of backward(loss, weight) under no_sync() wait to be averaged: end with backward(loss, ",
               "weight) as well, not with loss.backward()."));
    });
  }
  (loss * weight).backward();
}

void DdpEngine::scale_gradients(double factor) {
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : managed_.tensors) {
    auto& grad = parameter.mutable_grad();
    if (grad.defined()) grad.mul_(factor);
  }
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

void DdpEngine::set_up_optimizers_in_backward() {
  std::vector<std::vector<OptimizerPtr>> optimizers;
  bool has_any = false;
  for (const auto& parameter : managed_.tensors) {
    optimizers.push_back(detail::optimizers_in_backward_of(parameter));
    has_any = has_any || !optimizers.back().empty();
  }
  if (!has_any) return;
  step_in_backward(std::move(optimizers), "an optimizer attached by apply_optimizer_in_backward");
  for (const auto& parameter : managed_.tensors) detail::release_backward_hooks(parameter);
}

void DdpEngine::register_fused_optim(const OptimizerFactory& factory, const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(reducer_, "[lockstep/ddp] register_fused_optim needs buckets");
  TORCH_CHECK(factory, "[lockstep/ddp] register_fused_optim was given no factory");
  std::vector<std::vector<OptimizerPtr>> optimizers(managed_.tensors.size());
  for (std::size_t i = 0; i < managed_.tensors.size(); ++i) {
    const auto& parameter = managed_.tensors[i];
    const auto is_it = [&](const at::Tensor& each) { return each.is_same(parameter); };
    if (!parameters.empty() && std::none_of(parameters.begin(), parameters.end(), is_it)) continue;
    auto optimizer = factory({parameter});
    TORCH_CHECK(optimizer, "[lockstep/ddp] register_fused_optim: the factory made no optimizer for parameter '",
                managed_.infos[i].name, "'");
    optimizers[i].push_back(std::move(optimizer));
  }
  step_in_backward(std::move(optimizers), "an optimizer given to register_fused_optim");
}

void DdpEngine::step_in_backward(std::vector<std::vector<OptimizerPtr>> optimizers, const std::string& reason) {
  TORCH_CHECK(steps_in_backward_by_.empty(), "[lockstep/ddp] optimizers step in backward already, by ",
              steps_in_backward_by_);
  TORCH_CHECK(!low_, "[lockstep/ddp] ", reason, " cannot step in backward together with mixed_precision");
  TORCH_CHECK(!reducer_->has_comm_hook(), "[lockstep/ddp] ", reason,
              " cannot step in backward together with comm hook '", reducer_->comm_hook_name(), "'");
  TORCH_CHECK(is_sync_enabled_, "[lockstep/ddp] ", reason, " cannot step in backward under no_sync");
  steps_in_backward_by_ = reason;
  reducer_->reserve_hook_slot(reason + " steps in backward");
  reducer_->set_consumer([this, optimizers = std::move(optimizers)](std::size_t index, const at::Tensor& gradient) {
    if (optimizers[index].empty()) return false;
    detail::step_with_gradient(optimizers[index], managed_.tensors[index], gradient);
    return true;
  });
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
  group_ = group;
  has_queued_static_reduction_ = false;
  reducer_->update_process_group(group);
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

bool DdpEngine::save_in_full(const torch::nn::Module& wrapper, torch::serialize::OutputArchive& archive) const {
  if (low_) low_->save(wrapper, archive);
  return low_ != nullptr;
}

void DdpEngine::restore(const DdpSnapshot& snapshot) {
  set_sync_enabled(snapshot.require_backward_grad_sync);
  buffers_->set_required(snapshot.require_forward_param_sync);
}

DdpSnapshot DdpEngine::snapshot() const {
  auto options = options_;
  options.process_group = nullptr;
  options.device_mesh.reset();
  options.delay_all_reduce_named_params.clear();
  options.param_to_hook_all_reduce.reset();
  // Delayed parameters are ignored by the buckets only; without the delay they are ordinary ones.
  options.params_and_buffers_to_ignore = ignored_;
  for (const auto& [name, tensor] : options_.delay_all_reduce_named_params) {
    options.params_and_buffers_to_ignore.erase(name);
  }
  options.static_graph = reducer_ && reducer_->is_static_graph();
  // Before the rebuild there is nothing to keep, and a plan that is given is never rebuilt.
  const bool has_plan = reducer_ && reducer_->has_rebuilt_buckets() && !delayed_;
  options.bucket_plan = has_plan ? reducer_->plan().save() : "";
  return {.options = std::move(options),
          .require_backward_grad_sync = is_sync_enabled_,
          .require_forward_param_sync = buffers_->is_required()};
}

}  // namespace lockstep
