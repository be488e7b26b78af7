#include "lockstep/ddp/per_parameter_reduction.h"

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {
namespace {

/// Equal on two ranks if their lists are, as good as certainly.
int64_t hash_of(const std::vector<std::size_t>& indices) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const auto index : indices) hash = (hash ^ index) * 0x100000001b3;
  return static_cast<int64_t>(hash >> 1);  // its negative is a number too
}

}  // namespace

PerParameterReduction::PerParameterReduction(std::vector<at::Tensor> parameters, GroupPtr group,
                                             std::function<bool()> is_enabled)
    : parameters_(std::move(parameters)), group_(std::move(group)), is_enabled_(std::move(is_enabled)) {
  hooks_.add(parameters_, [this](std::size_t index) { on_gradient(index); });
}

void PerParameterReduction::on_gradient(std::size_t index) {
  const auto& parameter = parameters_[index];
  if (!is_enabled_() || !parameter.grad().defined()) return;
  const at::NoGradGuard no_grad;
  auto& gradient = parameter.mutable_grad();
  for (const auto& hook : user_hooks_) hook(gradient, parameter);
  if (!user_hooks_.empty()) return;
  note(index);
  const LabelScope label({"DDP parameter", static_cast<int>(index)});
  const auto sum = gradient.div(group_->getSize());
  all_reduce(sum, group_);
  gradient.copy_(sum);
}

void PerParameterReduction::note(std::size_t index) {
  if (group_->getSize() == 1) return;
  if (!backward_) {
    backward_ = std::make_shared<Indices>();
    // If backward throws, the callback is dropped, and with it the order so far.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [this, order = std::weak_ptr<Indices>(backward_)] { if (order.lock()) compare_orders(); });
  }
  backward_->push_back(index);
}

void PerParameterReduction::compare_orders() {
  const auto order = std::exchange(backward_, nullptr);
  const LabelScope label({"DDP's order of gradients"});
  const auto hash = hash_of(*order);
  const auto extremes = at::tensor({hash, -hash}, at::kLong).to(parameters_[0].device());
  all_reduce(extremes, group_, ReduceOp::MAX);
  const auto both = extremes.cpu();
  if (both[0].item<int64_t>() == -both[1].item<int64_t>()) return;
  check_same_on_all_ranks("DistributedDataParallel with per_parameter: which gradients came, in which order",
                          Facts{{"parameters by index", join(*order, ", ")}}, group_);
}

}  // namespace lockstep::detail
