// The part of the Reducer that is not a step: what it is told between steps, and what it tells.
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <numeric>

#include "lockstep/base/str.h"
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
  TORCH_CHECK(iterations() == 0, setup_.who(), ": static_graph must be set before the first step; ", iterations(),
              " are over");
  static_graph_.turn_on();
  if (!order_.is_wanted()) return;
  // Its first backward reduces everything at its end anyway.
  setup_.plan = first_plan(setup_.plan.parameters(), setup_.options.caps, true);
  make_buckets();
}

BucketPlan Reducer::checked_plan(const BucketPlan& plan) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(iterations() == 0, setup_.who(), ": use_plan() must come before the first step; ", iterations(),
              " are over");
  TORCH_CHECK(!scatter_, setup_.who(), ": use_plan() comes too late: ", hook_slot_taken_by(),
              " by the buckets there are. Call it before the optimizer is made.");
  return BucketPlan::load(plan.save(), setup_.plan.parameters());
}

void Reducer::use_plan(BucketPlan plan) {
  const std::lock_guard lock(mutex_);
  setup_.plan = std::move(plan);
  order_.set_unwanted();
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
  TORCH_CHECK(!step_.has_begun, setup_.who(), ": a comm hook cannot be registered while a backward is under way");
  averages_.set_hook(std::move(hook));
}

void Reducer::set_consumer(GradientConsumer consumer) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!recovery_ || !consumer.take, setup_.who(),
              ": optimizers that step in backward do not go with recoverable: a step that failed cannot be taken back");
  averages_.set_consumer(std::move(consumer));
}

void Reducer::set_begin_listener(std::function<void()> listener) {
  const std::lock_guard lock(mutex_);
  setup_.listeners.begin = std::move(listener);
}

void Reducer::set_finish_listener(std::function<void()> listener) {
  const std::lock_guard lock(mutex_);
  setup_.listeners.finish = std::move(listener);
}

void Reducer::set_error_listener(std::function<void(const std::string&)> listener,
                                 std::function<std::string()> advice) {
  const std::lock_guard lock(mutex_);
  setup_.listeners.error = std::move(listener);
  setup_.listeners.advice = std::move(advice);
}

void Reducer::watch_added_gradients(bool is_watched) {
  const std::lock_guard lock(mutex_);
  added_.watch(is_watched);
}

void Reducer::set_scatter(const ScatterFactory& make, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  const auto& options = setup_.options;
  const auto refuse_if = [&](bool is_wrong, const std::string& what) {
    TORCH_CHECK(!is_wrong, setup_.who(), ": ", reason, ", which cannot be together with ", what);
  };
  TORCH_CHECK(!scatter_, setup_.who(), ": ", reason, ", but another optimizer has them already");
  refuse_if(!hook_slot_taken_by().empty(), str("what DDP does already: ", hook_slot_taken_by()));
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
  reserve_hook_slot(reason);
  if (order_.is_wanted()) order_.set_used();
  make_buckets();
}

void Reducer::check_context() const {
  if (!scatter_ && !averages_.has_consumer() && !recovery_) return;
  const auto& slot = hook_slot_taken_by();
  setup_.fail(str(setup_.who(), ": ", slot.empty() ? str("comm hook '", comm_hook_name(), "' steps in backward") : slot,
                  ", which works on .grad; in a context of distributed autograd gradients are not there but in the ",
                  "context. Run this forward and its backward outside of the context, or let an optimizer step after ",
                  "backward, with the context's gradients."));
}

void Reducer::clear_scatter() {
  const std::lock_guard lock(mutex_);
  if (!scatter_) return;
  give_up();
  scatter_.reset();
  reserve_hook_slot("");
  make_buckets();
}

void Reducer::detach() {
  const std::lock_guard lock(mutex_);
  hooks_.remove();
  averages_.set_consumer({});
  step_.divisor_source = nullptr;
  setup_.listeners = {};
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
  TORCH_CHECK(!scatter_, setup_.who(), ": there are no buckets to look at: ", hook_slot_taken_by());
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
