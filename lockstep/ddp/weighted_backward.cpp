#include "lockstep/ddp/weighted_backward.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {
namespace {

std::vector<at::Tensor> both_of(std::vector<at::Tensor> some, const std::vector<at::Tensor>& others) {
  some.insert(some.end(), others.begin(), others.end());
  return some;
}

void multiply_gradients(const std::vector<at::Tensor>& parameters, double factor) {
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    auto& grad = parameter.mutable_grad();
    // Slices of earlier averages are added to, not averaged again.
    if (grad.defined() && !is_stand_in(grad)) grad.mul_(factor);
  }
}

}  // namespace

WeightedBackward::WeightedBackward(std::shared_ptr<Reducer> reducer, std::vector<at::Tensor> delayed,
                                   std::function<void(const std::string&)> fail)
    : reducer_(std::move(reducer)),
      delayed_(std::move(delayed)),
      all_(both_of(reducer_->parameters(), delayed_)),
      fail_(std::move(fail)) {}

WeightedBackward::~WeightedBackward() {
  for (const auto& [parameter, hook] : zeroing_hooks_) parameter.remove_hook(hook);
}

std::string WeightedBackward::who() const {
  const auto& group = reducer_->group();
  return str("[lockstep/ddp] rank ", group->getRank(), " of ", group->getSize());
}

double WeightedBackward::reduced(double weight) const {
  // As a double: token counts of large batches do not fit a float.
  const auto device = reducer_->parameters()[0].device();
  const auto total = at::full({1}, weight, at::TensorOptions(at::kDouble).device(device));
  const LabelScope label({"DDP's weights"});
  all_reduce(total, reducer_->group());
  const auto sum = total.item<double>();
  if (sum <= 0) fail_(str(who(), ": the weights of all ranks are zero: there is nothing to average"));
  return sum;
}

void WeightedBackward::set_zeroes_gradients(bool zeroes) {
  *zeroes_ = zeroes;
  if (!zeroes || !zeroing_hooks_.empty()) return;
  for (const auto& parameter : all_) {
    if (!parameter.requires_grad()) continue;
    const auto hook = parameter.register_hook([zeroes_now = zeroes_](const at::Tensor& gradient) {
      return *zeroes_now ? at::zeros_like(gradient) : gradient;
    });
    zeroing_hooks_.emplace_back(parameter, hook);
  }
}

void WeightedBackward::forget_zeroed() {
  if (so_far_ != 0 && !waiting_.has_gradients(all_)) so_far_ = 0;
}

void WeightedBackward::undo(double before, bool is_reduced, double factor) {
  so_far_ = before;
  if (is_reduced && before == 0) multiply_gradients(all_, factor);
  // The next backward may be a plain one.
  if (is_reduced) reducer_->forget_divisor();
}

void WeightedBackward::run(const at::Tensor& loss, double weight, bool is_reduced) {
  TORCH_CHECK(weight >= 0 && std::isfinite(weight), "[lockstep/ddp] a weight of ", weight,
              " was given: it cannot be negative and must be finite");
  forget_zeroed();
  const double before = so_far_;
  const auto ranks = static_cast<double>(reducer_->group()->getSize());
  double divisor = ranks;
  if (is_reduced) {
    divisor = reduced(before + weight);
    reducer_->set_recovery_weight(before + weight);
    reducer_->set_divisor_source([divisor] { return divisor; });
    // Gradients of an earlier reduced step are averages already: what the divisor takes away is given back.
    if (before == 0) multiply_gradients(all_, divisor / ranks);
  }
  so_far_ = is_reduced ? 0 : before + weight;
  // The mean over nothing is NaN, and so is zero times it.
  set_zeroes_gradients(weight == 0);
  try {
    (loss * weight).backward();
  } catch (const c10::DistBackendError&) {
    set_zeroes_gradients(false);
    // The survivors may begin the reduction again, with gradients as they are.
    if (!reducer_->is_recoverable()) undo(before, is_reduced, ranks / divisor);
    throw;
  } catch (...) {
    set_zeroes_gradients(false);
    undo(before, is_reduced, ranks / divisor);
    throw;
  }
  set_zeroes_gradients(false);
  if (is_reduced) {
    multiply_gradients(delayed_, ranks / divisor);
    return;
  }
  waiting_.note(all_);
  reducer_->set_divisor_source([this]() -> double {
    if (so_far_ > 0) {
      fail_(str(who(), ": gradients of backward(loss, weight) under no_sync() wait to be averaged: end with ",
                "backward(loss, weight) as well, not with loss.backward()."));
    }
    return reducer_->group()->getSize();
  });
}

}  // namespace lockstep::detail
