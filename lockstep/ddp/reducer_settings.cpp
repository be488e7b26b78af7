// The part of the Reducer that is not a step: what it is told between steps, and what it tells.
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "lockstep/ddp/reducer.h"

namespace lockstep {

// ---- asked of the next reduction ----

void Reducer::install_futures(const std::vector<FuturePtr>& futures) {
  const std::lock_guard lock(mutex_);
  step_.installed_futures.insert(step_.installed_futures.end(), futures.begin(), futures.end());
}

void Reducer::set_sparse_metadata(std::map<std::string, at::Tensor> rows) {
  const std::lock_guard lock(mutex_);
  step_.terms.sparse_metadata = std::move(rows);
}

void Reducer::set_divisor_source(std::function<double()> source) {
  const std::lock_guard lock(mutex_);
  step_.divisor_source = std::move(source);
}

void Reducer::forget_divisor() {
  const std::lock_guard lock(mutex_);
  if (!step_.has_begun) step_.divisor_source = nullptr;
}

// ---- settings ----

void Reducer::set_static_graph() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(iterations_ == 0, setup_.who(), ": static_graph must be set before the first step; ", iterations_,
              " are over");
  static_graph_.turn_on();
  if (plan_origin_ != PlanOrigin::kGuessed) return;
  // Its first backward reduces everything at its end anyway.
  setup_.plan = first_plan(setup_.plan.parameters(), setup_.options.caps, true);
  make_buckets();
}

BucketPlan Reducer::checked_plan(const BucketPlan& plan) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(iterations_ == 0, setup_.who(), ": use_plan() must come before the first step; ", iterations_,
              " are over");
  TORCH_CHECK(!scatter_, setup_.who(), ": use_plan() comes too late: ", hook_slot_taken_by_,
              " by the buckets there are. Call it before the optimizer is made.");
  return BucketPlan::load(plan.save(), setup_.plan.parameters());
}

void Reducer::use_plan(BucketPlan plan) {
  const std::lock_guard lock(mutex_);
  setup_.plan = std::move(plan);
  plan_origin_ = PlanOrigin::kGiven;
  make_buckets();
}

void Reducer::register_comm_hook(CommHook hook) {
  const auto on_registered = hook.on_registered;
  set_comm_hook(std::move(hook));
  // Without the lock: it may have more to set.
  if (on_registered) on_registered();
}

void Reducer::set_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(hook.run, setup_.who(), ": register_comm_hook was given no hook");
  TORCH_CHECK(hook_slot_taken_by_.empty(), setup_.who(), ": a comm hook cannot be registered: ", hook_slot_taken_by_);
  TORCH_CHECK(!has_comm_hook(), setup_.who(), ": a comm hook is registered already: '", comm_hook_name(),
              "'. There can be one.");
  TORCH_CHECK(!step_.has_begun, setup_.who(), ": a comm hook cannot be registered while a backward is under way");
  if (hook.check) hook.check(setup_.group, setup_.parameters[0].device());
  averages_.set_hook(std::move(hook));
}

void Reducer::set_consumer(GradientConsumer consumer) {
  const std::lock_guard lock(mutex_);
  averages_.set_consumer(std::move(consumer));
}

void Reducer::set_begin_listener(std::function<void()> listener) {
  const std::lock_guard lock(mutex_);
  on_begin_ = std::move(listener);
}

void Reducer::set_warns_of_added_gradients(bool warns) {
  const std::lock_guard lock(mutex_);
  warns_of_added_gradients_ = warns && !has_warned_of_added_gradients_;
  if (!warns) averages_left_.clear();
}

void Reducer::set_finish_listener(std::function<void()> listener) {
  const std::lock_guard lock(mutex_);
  on_finish_ = std::move(listener);
}

void Reducer::set_error_listener(std::function<void(const std::string&)> listener) {
  const std::lock_guard lock(mutex_);
  setup_.on_error = std::move(listener);
}

void Reducer::set_scatter(const ScatterFactory& make, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const auto& options = setup_.options;
  const auto refuse_if = [&](bool is_wrong, const char* what) {
    TORCH_CHECK(!is_wrong, setup_.who(), ": ", reason, ", which cannot be together with ", what);
  };
  TORCH_CHECK(!scatter_, setup_.who(), ": ", reason, ", but another optimizer has them already");
  refuse_if(!hook_slot_taken_by_.empty(), hook_slot_taken_by_.c_str());
  refuse_if(has_comm_hook(), "a comm hook");
  refuse_if(averages_.has_consumer(), "optimizers that step in backward");
  refuse_if(options.gradient_as_bucket_view, "gradient_as_bucket_view: there are no gradients to be views");
  refuse_if(options.skip_all_reduce_unused_params, "skip_all_reduce_unused_params");
  for (const auto& bucket : buckets_) {
    refuse_if(bucket.is_sparse(), "sparse gradients");
    refuse_if(bucket.parameter(0).is_complex(), "complex parameters");
  }
  TORCH_CHECK(!step_.has_begun, setup_.who(), ": ", reason, ", which cannot begin while a backward is under way");
  auto plan = setup_.plan;
  if (should_rebuild_buckets()) {
    std::vector<std::size_t> reversed(setup_.parameters.size());
    std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
    plan = rebuilt_plan(setup_.plan.parameters(), options.caps, reversed, /*has_small_bucket_last=*/false);
  }
  auto scatter = make(plan);
  setup_.plan = std::move(plan);
  scatter_ = std::make_unique<detail::ScatterSink>(setup_, std::move(scatter));
  sink_ = scatter_.get();
  hook_slot_taken_by_ = reason;
  if (plan_origin_ == PlanOrigin::kGuessed) plan_origin_ = PlanOrigin::kRebuilt;
  make_buckets();
}

void Reducer::clear_scatter() {
  const std::lock_guard lock(mutex_);
  if (!scatter_) return;
  give_up();
  sink_ = &averages_;
  scatter_.reset();
  hook_slot_taken_by_.clear();
  make_buckets();
}

void Reducer::detach() {
  const std::lock_guard lock(mutex_);
  hooks_.remove();
  averages_.set_consumer({});
  step_.divisor_source = nullptr;
  on_begin_ = nullptr;
  on_finish_ = nullptr;
  setup_.on_error = nullptr;
}

// ---- for those who ask ----

bool Reducer::is_armed() const {
  const std::lock_guard lock(mutex_);
  return step_.is_armed;
}

StepRecord Reducer::last_step() const {
  const std::lock_guard lock(mutex_);
  auto record = record_;
  record.unused_parameters = unused_.of_step;
  record.is_graph_static = unused_.is_same_in_all_steps;
  return record;
}

int64_t Reducer::pool_bytes() const {
  const std::lock_guard lock(mutex_);
  return scatter_ ? scatter_->pool_bytes() : 0;
}

std::vector<GradBucket> Reducer::get_grad_buckets(bool return_zero_tensors) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!scatter_, setup_.who(), ": there are no buckets to look at: ", hook_slot_taken_by_);
  std::vector<GradBucket> result;
  for (auto& bucket : buckets_) {
    averages_.attach_buffer(bucket);
    auto buffer = bucket.buffer();
    if (return_zero_tensors) {
      buffer = bucket.is_sparse() ? at::zeros_like(bucket.parameter(0)).to_sparse(1) : at::zeros_like(buffer);
    }
    result.push_back(bucket.as_grad_bucket(buckets_.size(), buffer, setup_.group));
  }
  return result;
}

}  // namespace lockstep
