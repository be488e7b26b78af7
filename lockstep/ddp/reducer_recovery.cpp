// The part of the Reducer that survivors of a failure finish a step with. See step_recovery.h.
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "lockstep/comm/call_label.h"
#include "lockstep/ddp/reducer.h"
#include "lockstep/nn/gradient_copy.h"

namespace lockstep {

using Left = detail::FailedReduction::Left;

Left Reducer::left_if_it_fails() const {
  // Which parameters the others used is lost with the step, and so is what a static graph has counted.
  return searches_unused() || static_graph_.is_on() ? Left::kNothing : Left::kLocal;
}

void Reducer::vote_to_end() {
  std::vector<detail::StepRecovery::Sum> sums;
  for (const auto& bucket : buckets_) {
    const auto reduced = averages_.reduced_gradients(bucket);
    for (std::size_t place = 0; place < bucket.size(); ++place) {
      const auto index = bucket.parameter_index(place);
      if (used_map() == nullptr || used_map()->is_used(index)) sums.push_back({index, reduced[place]});
    }
  }
  recovery_->vote(setup_.group, setup_.parameters[0].device(), std::move(sums));
}

void Reducer::begin_recoverable_forward() {
  const std::lock_guard lock(mutex_);
  if (recovery_) recovery_->begin_forward();
}

void Reducer::set_recovery_weight(double weight) {
  const std::lock_guard lock(mutex_);
  if (recovery_) recovery_->set_weight(weight);
}

detail::FailedReduction Reducer::failed_reduction() const {
  const std::lock_guard lock(mutex_);
  return recovery_->failed();
}

void Reducer::move_to_survivors(GroupPtr group) {
  reset_state();
  const std::lock_guard lock(mutex_);
  setup_.group = std::move(group);
  order_.want_again();
  // Some may have rebuilt theirs just before the failure, and others not.
  const LabelScope label({"DDP's buckets after a failure"});
  take_plan_of_first_rank(setup_.plan);
}

void Reducer::write_arrived_sums() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  for (const auto& [index, gradient] : recovery_->sums()) {
    averages_.write_gradient(index, gradient, step_.terms.access, detail::copy_plain);
  }
  local_.forget();
  recovery_->end();
}

void Reducer::reduce_again(double divisor) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  arm();
  step_.is_mirrored = step_.gives_zeros = recovery_->gives_zeros();
  step_.divisor_source = [divisor] { return divisor; };
  step_.terms.access.settle();
  begin_reduction();
  launch_all_buckets();
  finish_backward();
}

void Reducer::drop_failed_step() {
  const std::lock_guard lock(mutex_);
  for (const auto& parameter : setup_.parameters) parameter.mutable_grad() = at::Tensor();
  local_.forget();
  recovery_->forget();
}

}  // namespace lockstep
