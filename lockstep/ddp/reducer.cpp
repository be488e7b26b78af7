#include "lockstep/ddp/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/nn/gradient_copy.h"

namespace lockstep {
namespace {

// Names of a few parameters tell as much as those of all.
constexpr std::size_t kMostNamesShown = 10;

void note(const char* kind, const std::string& unit, const char* state, std::size_t bytes = 0) {
  Event event;
  event.kind = kind;
  event.unit = unit;
  event.state = state;
  event.bytes = bytes;
  announce(std::move(event));
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._indices().nbytes() + tensor._values().nbytes() : tensor.nbytes();
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<ParameterInfo> infos, GroupPtr group,
                 const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      options_(options),
      group_(std::move(group)),
      is_static_graph_(options.static_graph),
      is_ready_(parameters_.size()),
      ready_times_ns_(parameters_.size(), -1),
      used_(parameters_.size(), parameters_.at(0).device()),
      firings_(parameters_.size()),
      is_in_rebuild_order_(parameters_.size()),
      times_(parameters_.at(0).device()) {
  TORCH_INTERNAL_ASSERT(infos.size() == parameters_.size(), infos.size(), " names for ", parameters_.size(),
                        " parameters");
  has_rebuilt_ = options_.plan.has_value();
  plan_ = options_.plan ? *options_.plan : first_plan(std::move(infos), options_.caps, !searches_unused());
  make_buckets();
  hooks_.add(parameters_, [this](std::size_t index) { autograd_hook(index); });
}

Reducer::~Reducer() = default;

void Reducer::make_buckets() {
  buckets_.clear();
  buckets_.reserve(plan_.buckets().size());
  for (std::size_t i = 0; i < plan_.buckets().size(); ++i) {
    buckets_.emplace_back(i, plan_, parameters_, scatter_ ? nullptr : group_, options_.gradient_dtype);
  }
  if (!options_.gradient_as_bucket_view) return;
  // Gradients that are there already move in.
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    if (bucket.is_sparse()) continue;
    for (std::size_t place = 0; place < bucket.size(); ++place) {
      const auto& view = bucket.view(place);
      access_.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
        if (!grad.defined() || grad.is_alias_of(view) || grad.scalar_type() != view.scalar_type()) return false;
        detail::copy_plain(view, grad);
        grad = view;
        return true;
      });
    }
  }
}

std::string Reducer::who() const {
  return str("[lockstep/ddp] rank ", group_->getRank(), " of ", group_->getSize());
}

std::string Reducer::names_of(const std::vector<std::size_t>& indices) const {
  std::vector<std::string> names;
  for (const auto index : indices) {
    if (names.size() == kMostNamesShown) {
      names.push_back(str("and ", indices.size() - kMostNamesShown, " more"));
      break;
    }
    names.push_back(str("'", name_of(index), "'"));
  }
  return join(names, ", ");
}

std::string Reducer::bucket_text(const detail::Bucket& bucket) const {
  return str("bucket ", bucket.index(), " (", names_of(plan_.buckets()[bucket.index()].parameters), ")");
}

void Reducer::fail(const std::string& message) {
  if (on_error_) on_error_(message);
  TORCH_CHECK(false, message);
}

// ---- a step ----

void Reducer::refresh_hooks() {
  const std::lock_guard lock(mutex_);
  hooks_.refresh();
}

void Reducer::prepare_for_forward() {
  const std::lock_guard lock(mutex_);
  times_.clear();
  times_.record(Mark::kForwardStart);
}

void Reducer::arm() {
  expects_hooks_ = true;
  is_local_backward_expected_ = false;
  has_marked_unused_ = false;
  next_bucket_ = 0;
  buckets_reduced_ = 0;
  is_ready_.assign(is_ready_.size(), false);
  firings_left_ = firings_;
  for (auto& bucket : buckets_) {
    bucket.gradients_missing = bucket.size();
    bucket.deferred.clear();
    bucket.is_skipped = false;
  }
  armed_at_ = std::chrono::steady_clock::now();
  times_.record(Mark::kBackwardComputeStart);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  ++iterations_;
  arm();
  if (!searches_unused()) return;
  unused_ = detail::find_unused(outputs, accumulators_->index_of_accumulator());
  if (iterations_ > 1 && unused_ != last_unused_) is_graph_static_ = false;
  last_unused_ = unused_;
  if (unused_.empty() && !has_warned_of_needless_search_) {
    has_warned_of_needless_search_ = true;
    TORCH_WARN(who(), ": find_unused_parameters is on, but the forward pass used every parameter. The search costs a ",
               "walk over the graph in every step; turn it off if no step leaves parameters out.");
  }
  if (c10d::debug_level() == c10d::DebugLevel::Detail && !unused_.empty()) {
    LOG(INFO) << who() << ": unused parameters in this step: " << names_of(unused_);
  }
}

void Reducer::expect_local_backward() {
  const std::lock_guard lock(mutex_);
  is_local_backward_expected_ = true;
  expects_hooks_ = false;
}

void Reducer::autograd_hook(std::size_t index) {
  const std::lock_guard lock(mutex_);
  access_ = detail::GradientAccess::of_current_backward();
  // Marks add up over local steps: a parameter used in one of them is used.
  if (searches_unused() || (is_counting() && expects_hooks_)) {
    access_.with_gradient(parameters_[index], [&](at::Tensor& grad) {
      // Without one it was reached, but did not count towards the loss.
      if (grad.defined()) used_.mark(index);
      return false;
    });
  }
  if (!expects_hooks_) {
    if (is_local_backward_expected_ || has_warned_of_local_backward_) return;
    has_warned_of_local_backward_ = true;
    TORCH_WARN(who(), ": gradient of parameter '", name_of(index), "' was computed without a forward pass of the ",
               "wrapper before it (a second backward?): it is added up on this rank and not averaged.");
    return;
  }
  if (c10::GradMode::is_enabled()) {
    TORCH_WARN_ONCE(who(), ": backward with create_graph: gradients are averaged, gradients of gradients are not.");
  }
  if (is_counting()) {
    ++firings_[index];
    return;
  }
  if (!has_begun_) ready_order_.clear();  // the last backward's
  if (!has_marked_unused_) {
    has_marked_unused_ = true;
    for (const auto unused : unused_) mark_ready(unused);
  }
  if (is_static_graph_) {
    if (firings_left_[index] == 0) {
      fail(str(who(), ": parameter '", name_of(index), "' got one gradient more than in the first step. The graph has ",
               "changed, which static_graph does not allow. Use find_unused_parameters instead."));
    }
    if (--firings_left_[index] > 0) return;
  }
  ready_order_.push_back(index);
  if (should_rebuild_buckets() && !is_in_rebuild_order_[index]) {
    is_in_rebuild_order_[index] = true;
    rebuild_order_.push_back(index);
  }
  mark_ready(index);
}

void Reducer::check_not_ready_twice(std::size_t index) {
  if (!is_ready_[index]) return;
  const bool was_unused = std::find(unused_.begin(), unused_.end(), index) != unused_.end();
  fail(str(who(), ": gradient of parameter ", index, " '", name_of(index), "' came a second time in one backward. ",
           was_unused ? "It was taken for unused, because the wrapper's outputs do not lead to it: return from "
                        "forward() everything the loss is made of. "
                      : "Causes: the parameter is used outside of the wrapper's forward(), or re-entrant backward "
                        "passes (activation checkpointing) share it. ",
           "If the graph is the same in every step, set static_graph."));
}

void Reducer::mark_ready(std::size_t index) {
  check_not_ready_twice(index);
  is_ready_[index] = true;
  ready_times_ns_[index] = (std::chrono::steady_clock::now() - armed_at_) / std::chrono::nanoseconds(1);
  if (is_observed()) note("gradient", name_of(index), "ready");
  has_begun_ = true;
  fix_divisor();
  const auto place = plan_.place_of(index);
  auto& bucket = buckets_[place.bucket];
  if (scatter_) lend_buffer(bucket);
  bucket.is_sparse() ? take_sparse_gradient(bucket) : take_dense_gradient(bucket, place.index);
  if (--bucket.gradients_missing > 0) return;
  launch_ready_buckets();
  if (next_bucket_ < buckets_.size()) return;
  if (searches_unused()) used_.launch(group_);
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    const auto reducer = self.lock();
    if (!reducer) return;
    const std::lock_guard lock(reducer->mutex_);
    reducer->times_.record(Mark::kBackwardComputeEnd);
    reducer->finalize_backward();
  });
}

void Reducer::launch_ready_buckets() {
  // In plan order, not in the order they fill: all ranks must issue the same sequence.
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].gradients_missing == 0) {
    launch(buckets_[next_bucket_++]);
  }
}

bool Reducer::is_all_unused(const detail::Bucket& bucket) const {
  for (std::size_t place = 0; place < bucket.size(); ++place) {
    if (!std::binary_search(unused_.begin(), unused_.end(), bucket.parameter_index(place))) return false;
  }
  return true;
}

void Reducer::note_bucket(const detail::Bucket& bucket, const char* state, std::size_t bytes) const {
  if (is_observed()) note("bucket", str("bucket ", bucket.index()), state, bytes);
}

void Reducer::launch(detail::Bucket& bucket) {
  copy_deferred(bucket);
  if (options_.skip_all_reduce_unused_params && is_all_unused(bucket)) {
    bucket.is_skipped = true;
    return;
  }
  if (!times_.stamp(Mark::kBackwardCommStart)) times_.record(Mark::kBackwardCommStart);
  note_bucket(bucket, "launch", bytes_of(bucket.buffer()));
  ++buckets_reduced_;
  if (scatter_) {
    scatter_->launch(bucket.index(), bucket.buffer());
    scattering_.push_back(bucket.index());
    return;
  }
  if (!hook_ && !bucket.is_sparse()) {
    bucket.reduction = launch_all_reduce(bucket.buffer(), group_);
    return;
  }
  bucket.given_to_hook = bucket.as_grad_bucket(buckets_.size(), bucket.buffer());
  try {
    bucket.future = run_comm_hook(*bucket.given_to_hook);
    TORCH_CHECK(bucket.future, "it returned no future");
  } catch (const std::exception& error) {
    forget_reduction();
    fail(str(who(), ": comm hook '", comm_hook_name(), "' failed on ", bucket_text(bucket), ": ", error.what()));
  }
}

FuturePtr Reducer::run_comm_hook(GradBucket& bucket) {
  return hook_ ? hook_->run(bucket) : run_allreduce_hook(bucket);
}

FuturePtr Reducer::run_allreduce_hook(GradBucket& bucket) {
  return all_reduce_future(bucket.buffer(), group_);
}

void Reducer::fix_divisor() {
  if (divisor_) return;
  divisor_ = divisor_source_ ? divisor_source_() : static_cast<double>(group_->getSize());
  divisor_source_ = nullptr;
}

double Reducer::scale() const {
  // Hooks divide by the number of ranks themselves.
  return (hook_ ? static_cast<double>(group_->getSize()) : 1.0) / *divisor_;
}

bool Reducer::is_identity() const {
  return group_->getSize() == 1 && !hook_ && !consumer_ && !scatter_ && !options_.gradient_as_bucket_view &&
         *divisor_ == 1;
}

// ---- the end of a backward ----

void Reducer::finalize_backward() {
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(next_bucket_ == buckets_.size());
  try {
    while (finish_oldest_scatter()) {
    }
    for (auto& bucket : buckets_) {
      if (bucket.is_skipped || scatter_) continue;
      const auto result = wait_for(bucket);
      bucket.is_sparse() ? write_sparse_gradient(bucket, result) : write_dense_gradients(bucket, result);
      note_bucket(bucket, "done");
    }
    for (const auto& future : std::exchange(installed_futures_, {})) {
      future->wait();
      if (future->hasError()) std::rethrow_exception(future->exception_ptr());
    }
    if (scatter_) end_scatter();
    used_.finish();
    if (on_finish_) on_finish_();
  } catch (const std::exception& error) {
    forget_reduction();
    if (on_error_) on_error_(error.what());
    throw;
  }
  if (searches_unused()) used_.clear();
  forget_reduction();
  times_.record(Mark::kBackwardCommEnd);
}

/// What is left of a step must not meet the next.
void Reducer::forget_reduction() {
  expects_hooks_ = false;
  has_begun_ = false;
  divisor_.reset();
  leaves_out_own_ = false;
  sparse_metadata_.clear();
  if (scatter_) forget_scatter();
  for (auto& bucket : buckets_) {
    bucket.reduction.reset();
    bucket.future.reset();
    bucket.given_to_hook.reset();
    bucket.deferred.clear();
  }
}

at::Tensor Reducer::wait_for(detail::Bucket& bucket) {
  if (bucket.reduction) {
    bucket.reduction->wait();
    return bucket.buffer();
  }
  try {
    const auto result = tensor_of(*bucket.future);
    if (bucket.is_sparse()) return result;
    const auto& buffer = bucket.buffer();
    TORCH_CHECK(result.numel() == buffer.numel() && result.device() == buffer.device(), "its result has ",
                result.numel(), " elements on ", result.device().str(), ", the bucket ", buffer.numel(), " on ",
                buffer.device().str());
    return result.is_same(buffer) ? buffer : result.reshape({-1});
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    const std::string reason = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
    fail(str(who(), ": comm hook '", comm_hook_name(), "' failed on ", bucket_text(bucket), ": ", reason));
  }
}

void Reducer::delay_all_reduce() {
  const std::lock_guard lock(mutex_);
  if (!expects_hooks_ || !is_counting()) return;
  const at::NoGradGuard no_grad;
  // If others counted while this rank had no inputs, they know already what is used.
  if (!has_reduced_static_map_) used_.launch(group_);
  has_reduced_static_map_ = true;
  unused_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (firings_[i] == 0) unused_.push_back(i);
  }
  if (c10d::debug_level() != c10d::DebugLevel::Off && !unused_.empty()) {
    LOG(INFO) << who() << ": static graph: parameters without gradients in the first step: " << names_of(unused_);
  }
  has_begun_ = true;
  fix_divisor();
  times_.record(Mark::kBackwardComputeEnd);
  for (auto& bucket : buckets_) {
    if (scatter_) lend_buffer(bucket);
    for (std::size_t place = 0; place < bucket.size(); ++place) {
      bucket.is_sparse() ? take_sparse_gradient(bucket) : take_dense_gradient(bucket, place);
    }
    bucket.gradients_missing = 0;
    launch_ready_buckets();
  }
  finalize_backward();
  has_counted_ = true;
}

// ---- taking part without inputs ----

void Reducer::take_zeros(detail::Bucket& bucket) {
  bucket.gradients_missing = 0;
  if (scatter_) lend_buffer(bucket);
  if (!bucket.is_sparse()) {
    bucket.buffer().zero_();
    if (!options_.gradient_as_bucket_view) return;
    // Local steps may have left gradients of their own.
    for (std::size_t place = 0; place < bucket.size(); ++place) {
      access_.with_gradient(bucket.parameter(place), [&](at::Tensor& grad) {
        grad = bucket.view(place);
        return true;
      });
    }
    return;
  }
  const auto& parameter = bucket.parameter(0);
  auto no_rows = parameter.sizes().vec();
  no_rows[0] = 0;
  bucket.set_sparse_gradient(at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong)),
                                                   at::empty(no_rows, parameter.options()), parameter.sizes()),
                             std::nullopt);
}

void Reducer::mirror_backward() {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  const at::NoGradGuard no_grad;
  access_ = detail::GradientAccess::of_current_backward();
  ++iterations_;
  arm();
  has_begun_ = true;
  fix_divisor();
  const bool is_first_of_static_graph = is_counting() && !has_reduced_static_map_;
  if (is_first_of_static_graph) {
    used_.launch(group_);
    has_reduced_static_map_ = true;
  }
  if (searches_unused()) used_.clear();
  for (auto& bucket : buckets_) {
    take_zeros(bucket);
    launch_ready_buckets();
  }
  if (searches_unused()) used_.launch(group_);
  finalize_backward();
  // Ranks with inputs have an order now, and rebuild; a static graph has one from the second step.
  if (is_first_of_static_graph || !should_rebuild_buckets() || !rebuild_order_.empty()) return;
  rebuild_order_.resize(parameters_.size());
  std::iota(rebuild_order_.begin(), rebuild_order_.end(), std::size_t{0});
}

// ---- what must be finished before the next step ----

void Reducer::check_finalized() {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
}

void Reducer::check_prior_reduction_finished() {
  if (!has_begun_) return;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < is_ready_.size(); ++i) {
    if (!is_ready_[i]) missing.push_back(i);
  }
  std::string remedy;
  if (is_static_graph_) {
    remedy =
        "static_graph promises that every step uses the parameters the first one used: this one did not. "
        "Turn it off and set find_unused_parameters.";
  } else if (!options_.find_unused_parameters) {
    remedy = "Use them in forward() and let them reach the loss, or set find_unused_parameters.";
  } else {
    remedy =
        "find_unused_parameters is on, but forward() returned something the search could not look into, or the "
        "loss left out what it returned in a way the search cannot see: return tensors, containers of tensors or "
        "a type with for_each_tensor().";
  }
  const auto what = missing.empty() ? std::string("backward did not reach its end")
                                    : str(missing.size() == 1 ? "parameter " : "parameters ", names_of(missing), " (",
                                          join(missing, ", "), ") got no gradient");
  fail(str(who(), ": the last step's reduction is unfinished: ", what, ". ", remedy));
}

void Reducer::reset_state() {
  const std::lock_guard lock(mutex_);
  forget_reduction();
  // Nobody will finish these; the group they were made on may be gone.
  is_ready_.assign(is_ready_.size(), false);
  ready_order_.clear();
  rebuild_order_.clear();
  is_in_rebuild_order_.assign(is_in_rebuild_order_.size(), false);
  installed_futures_.clear();
  used_ = detail::UsedMap(parameters_.size(), parameters_[0].device());
  unused_.clear();
  has_counted_ = false;
  has_reduced_static_map_ = false;
  firings_.assign(firings_.size(), 0);
}

void Reducer::update_process_group(GroupPtr group) {
  TORCH_CHECK(!scatter_, who(), ": the group cannot be replaced: ", hook_slot_taken_by_);
  reset_state();
  const std::lock_guard lock(mutex_);
  group_ = std::move(group);
  has_rebuilt_ = false;
  // In memory that the new group's ranks can reach.
  make_buckets();
}

// ---- buckets in the order gradients come ----

bool Reducer::should_rebuild_buckets() const {
  return !has_rebuilt_ && !searches_unused();
}

bool Reducer::rebuild_buckets() {
  const std::lock_guard lock(mutex_);
  check_prior_reduction_finished();
  if (!should_rebuild_buckets() || rebuild_order_.empty()) return false;
  // Those a static graph never uses come last.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_in_rebuild_order_[i] && rebuild_order_.size() < parameters_.size()) rebuild_order_.push_back(i);
  }
  const bool has_small_last = env("DDP_SET_LAST_BUCKET_CAP").value_or("0") == "1";
  const auto mine = rebuilt_plan(plan_.parameters(), options_.caps, rebuild_order_, has_small_last);
  // As rank 0 saw it: gradients may come in another order elsewhere.
  const auto agreed = BucketPlan::load(broadcast_object(mine.save(), 0, group_), plan_.parameters());
  plan_ = agreed;
  make_buckets();
  has_rebuilt_ = true;
  rebuild_order_.clear();
  if (c10d::debug_level() != c10d::DebugLevel::Off) {
    LOG(INFO) << who() << ": buckets were rebuilt:\n" << plan_.to_string();
  }
  return true;
}

// ---- hooks and settings ----

void Reducer::register_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(hook.run, who(), ": register_comm_hook was given no hook");
  TORCH_CHECK(hook_slot_taken_by_.empty(), who(), ": a comm hook cannot be registered: ", hook_slot_taken_by_);
  TORCH_CHECK(!hook_, who(), ": a comm hook is registered already: '", comm_hook_name(), "'. There can be one.");
  TORCH_CHECK(!has_begun_, who(), ": a comm hook cannot be registered while a backward is under way");
  if (hook.check) hook.check(group_, parameters_[0].device());
  hook_ = std::move(hook);
}

const std::string& Reducer::comm_hook_name() const {
  static const std::string none = "none";
  return hook_ ? hook_->name : none;
}

std::vector<GradBucket> Reducer::get_grad_buckets(bool return_zero_tensors) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!scatter_, who(), ": there are no buckets to look at: ", hook_slot_taken_by_);
  std::vector<GradBucket> result;
  for (const auto& bucket : buckets_) {
    auto buffer = bucket.buffer();
    if (return_zero_tensors) {
      buffer = bucket.is_sparse() ? at::zeros_like(bucket.parameter(0)).to_sparse(1) : at::zeros_like(buffer);
    }
    result.push_back(bucket.as_grad_bucket(buckets_.size(), buffer));
  }
  return result;
}

void Reducer::install_futures(const std::vector<FuturePtr>& futures) {
  const std::lock_guard lock(mutex_);
  installed_futures_.insert(installed_futures_.end(), futures.begin(), futures.end());
}

void Reducer::set_sparse_metadata(std::map<std::string, at::Tensor> rows) {
  const std::lock_guard lock(mutex_);
  sparse_metadata_ = std::move(rows);
}

void Reducer::set_divisor(double divisor) {
  set_divisor_source([divisor] { return divisor; });
}

void Reducer::set_divisor_source(std::function<double()> source) {
  const std::lock_guard lock(mutex_);
  divisor_source_ = std::move(source);
}

void Reducer::leave_out_own_gradients() {
  const std::lock_guard lock(mutex_);
  leaves_out_own_ = true;
}

void Reducer::set_consumer(Consumer consumer) {
  const std::lock_guard lock(mutex_);
  consumer_ = std::move(consumer);
}

void Reducer::set_finish_listener(std::function<void()> listener) {
  const std::lock_guard lock(mutex_);
  on_finish_ = std::move(listener);
}

bool Reducer::is_armed() const {
  const std::lock_guard lock(mutex_);
  return expects_hooks_;
}

void Reducer::set_static_graph() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(iterations_ == 0, who(), ": static_graph must be set before the first step; ", iterations_, " are over");
  is_static_graph_ = true;
  if (has_rebuilt_ || options_.plan) return;
  // Its first backward reduces everything at its end anyway.
  plan_ = first_plan(plan_.parameters(), options_.caps, true);
  make_buckets();
}

void Reducer::remove_autograd_hooks() {
  const std::lock_guard lock(mutex_);
  hooks_.remove();
}

std::vector<std::size_t> Reducer::unused_parameters() const {
  const std::lock_guard lock(mutex_);
  return unused_;
}

std::size_t Reducer::unused_parameter_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto index : unused_) bytes += plan_.parameters()[index].bytes();
  return bytes;
}

std::vector<std::size_t> Reducer::ready_order() const {
  const std::lock_guard lock(mutex_);
  return ready_order_;
}

std::vector<int64_t> Reducer::backward_stats() const {
  const std::lock_guard lock(mutex_);
  return ready_times_ns_;
}

}  // namespace lockstep
