#include "lockstep/ddp/per_parameter_reduction.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "lockstep/comm/call_label.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

PerParameterReduction::PerParameterReduction(std::vector<at::Tensor> parameters, GroupPtr group,
                                             std::function<bool()> is_synced)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      is_synced_(std::move(is_synced)),
      is_ready_(parameters_.size()) {
  hooks_.add(parameters_, [this](std::size_t index) { on_gradient(index); });
}

void PerParameterReduction::on_gradient(std::size_t index) {
  // Without hooks it is asked at the end: the backward may still come to a synced forward.
  if (!user_hooks_.empty() && !is_synced_()) return;
  const auto& parameter = parameters_[index];
  const at::NoGradGuard no_grad;
  const auto access = GradientAccess::of_current_backward();
  bool is_there = false;
  access.with_gradient(parameter, [&](at::Tensor& gradient) {
    is_there = gradient.defined();
    for (const auto& hook : user_hooks_) {
      if (is_there) hook(gradient, parameter);
    }
    return is_there && !user_hooks_.empty();
  });
  if (!is_there || !user_hooks_.empty()) return;
  const std::lock_guard lock(mutex_);
  if (is_queued_.expired()) {
    access_ = access;
    is_ready_.assign(parameters_.size(), false);
    const auto queued = std::make_shared<const bool>(true);
    is_queued_ = queued;
    torch::autograd::Engine::get_default_engine().queue_callback([this, queued, life = std::weak_ptr(life_)] {
      if (life.lock()) end_backward();
    });
  }
  is_ready_[index] = true;
}

void PerParameterReduction::end_backward() {
  const bool is_reduced = is_synced_();
  const std::lock_guard lock(mutex_);
  is_queued_.reset();
  if (is_reduced) reduce_all();
  access_ = {};
}

void PerParameterReduction::reduce_all() {
  const at::NoGradGuard no_grad;
  auto is_used = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kInt);
  for (std::size_t i = 0; i < is_ready_.size(); ++i) is_used.mutable_data_ptr<int32_t>()[i] = is_ready_[i] ? 1 : 0;
  auto access = std::exchange(access_, {});
  access.settle();
  const auto on_device = is_used.to(parameters_[0].device());
  {
    const LabelScope label({"DDP's used parameters"});
    all_reduce(on_device, group_, ReduceOp::MAX);
  }
  is_used = on_device.cpu();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (is_used.const_data_ptr<int32_t>()[i] == 0) continue;
    access.with_gradient(parameters_[i], [&](at::Tensor& gradient) {
      const LabelScope label({"DDP parameter", static_cast<int>(i)});
      const auto sum = gradient.defined() ? gradient.div(group_->getSize()) : at::zeros_like(parameters_[i]);
      all_reduce(sum, group_);
      if (gradient.defined()) {
        gradient.copy_(sum);
      } else {
        gradient = sum;
      }
      return true;
    });
  }
}

}  // namespace lockstep::detail
