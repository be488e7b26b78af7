#include "lockstep/ddp/weighted_backward.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

double WeightedBackward::reduced(double weight) const {
  const auto& group = reducer_->group();
  // As a double: token counts of large batches do not fit a float.
  const auto device = reducer_->parameters()[0].device();
  const auto total = at::full({1}, weight, at::TensorOptions(at::kDouble).device(device));
  const LabelScope label({"DDP's weights"});
  all_reduce(total, group);
  const auto sum = total.item<double>();
  if (sum <= 0) {
    fail_(str("[lockstep/ddp] rank ", group->getRank(), " of ", group->getSize(),
              ": the weights of all ranks are zero: there is nothing to average"));
  }
  return sum;
}

void WeightedBackward::scale_gradients(double factor) const {
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : reducer_->parameters()) {
    auto& grad = parameter.mutable_grad();
    if (grad.defined()) grad.mul_(factor);
  }
}

void WeightedBackward::run(const at::Tensor& loss, double weight, bool is_reduced) {
  TORCH_CHECK(weight >= 0 && std::isfinite(weight), "[lockstep/ddp] a weight of ", weight,
              " was given: it cannot be negative and must be finite");
  const bool is_first = so_far_ == 0;
  so_far_ += weight;
  const bool has_nothing_to_count = so_far_ == 0;
  if (is_reduced) {
    const auto sum = reduced_weight_with(0);
    reducer_->set_divisor_source([sum] { return sum; });
    // Gradients of an earlier reduced step are averages already: what the divisor takes away is given back.
    if (is_first) scale_gradients(sum / reducer_->group()->getSize());
    // The mean over nothing is NaN, and so is zero times it.
    if (has_nothing_to_count) reducer_->exclude_own_gradients();
  } else {
    reducer_->set_divisor_source([fail = fail_, group = reducer_->group()]() -> double {
      fail(str("[lockstep/ddp] rank ", group->getRank(), " of ", group->getSize(),
               ": gradients of backward(loss, weight) under no_sync() wait to be averaged: end with backward(loss, ",
               "weight) as well, not with loss.backward()."));
      return 1;
    });
  }
  try {
    (loss * weight).backward();
  } catch (...) {
    // The next backward may be a plain one.
    if (is_reduced) reducer_->forget_terms();
    throw;
  }
}

}  // namespace lockstep::detail
