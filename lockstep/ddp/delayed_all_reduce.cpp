#include "lockstep/ddp/delayed_all_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {

DelayedAllReduce::DelayedAllReduce(NamedTensors parameters, GroupPtr group)
    : parameters_(std::move(parameters)), group_(std::move(group)), views_(parameters_.size()) {
  // Aliases that autograd does not track as views: Optimizer::zero_grad() detaches gradients in place, which it refuses
  // for views.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<bool> has_view(parameters_.size());
  for (std::size_t first = 0; first < parameters_.size(); ++first) {
    if (has_view[first]) continue;
    const auto options = parameters_[first].second.options().requires_grad(false);
    const auto is_alike = [&](std::size_t i) {
      const auto& tensor = parameters_[i].second;
      return tensor.scalar_type() == c10::typeMetaToScalarType(options.dtype()) && tensor.device() == options.device();
    };
    int64_t total = 0;
    for (std::size_t i = first; i < parameters_.size(); ++i) total += is_alike(i) ? parameters_[i].second.numel() : 0;
    const auto buffer = at::zeros({total}, options);
    int64_t at = 0;
    for (std::size_t i = first; i < parameters_.size(); ++i) {
      if (!is_alike(i)) continue;
      const auto& tensor = parameters_[i].second;
      views_[i] = buffer.narrow(0, at, tensor.numel()).view(tensor.sizes());
      has_view[i] = true;
      at += tensor.numel();
    }
    buffers_.push_back(buffer);
  }
}

void DelayedAllReduce::attach(const at::Tensor& trigger, std::function<std::optional<bool>()> is_backward_synced) {
  trigger_ = trigger;
  is_backward_synced_ = std::move(is_backward_synced);
  const auto on_gradient = [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    if (is_context_backward()) self->refuse_context();
    const auto known = self->is_backward_synced_ ? self->is_backward_synced_() : std::nullopt;
    if (known.value_or(self->is_due_ || self->is_last_synced_)) self->launch();
  };
  const bool is_delayed = std::any_of(parameters_.begin(), parameters_.end(),
                                      [&](const auto& parameter) { return parameter.second.is_same(trigger); });
  if (is_delayed) {
    accumulation_.add({trigger_}, [on_gradient](std::size_t) { on_gradient(); });
  } else {
    hook_ = trigger_.register_hook([on_gradient](const at::Tensor&) { on_gradient(); });
  }
}

void DelayedAllReduce::refuse_context() const {
  TORCH_CHECK(false, "[lockstep/ddp] rank ", group_->getRank(), " of ", group_->getSize(), ": parameter '",
              parameters_[0].first, "' is one of delay_all_reduce_named_params, which are reduced in .grad; in a ",
              "context of distributed autograd gradients are not there but in the context. Run this forward and its ",
              "backward outside of the context, or wrap the module without delay_all_reduce_named_params.");
}

void DelayedAllReduce::detach() {
  if (hook_) trigger_.remove_hook(*hook_);
  hook_.reset();
  accumulation_.remove();
}

void DelayedAllReduce::launch() {
  const at::NoGradGuard no_grad;
  is_due_ = false;
  for (const auto& buffer : buffers_) {
    buffer.div_(group_->getSize());
    pending_.push_back(launch_all_reduce(buffer, group_));
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->wait();
  });
}

void DelayedAllReduce::wait() {
  for (auto& pending : std::exchange(pending_, {})) pending.wait();
}

void DelayedAllReduce::prepare_for_backward(bool is_synced) {
  is_due_ = is_due_ || is_synced;
  is_last_synced_ = is_synced;
}

void DelayedAllReduce::reset_gradients() {
  const at::NoGradGuard no_grad;
  if (!pending_.empty()) {
    // A backward has thrown behind the trigger. What it sent would arrive on top of gradients that were zeroed since.
    wait();
    for (const auto& buffer : buffers_) buffer.zero_();
  }
  const auto is_undefined = [](const auto& parameter) { return !parameter.second.grad().defined(); };
  const bool are_all_undefined = std::all_of(parameters_.begin(), parameters_.end(), is_undefined);
  if (are_all_undefined) {
    for (const auto& buffer : buffers_) buffer.zero_();
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // A frozen one has no gradient: optimizers would decay it, or go on with its momentum.
    if (!is_undefined(parameters_[i]) || !parameters_[i].second.requires_grad()) continue;
    if (!are_all_undefined) views_[i].zero_();
    parameters_[i].second.mutable_grad() = views_[i];
  }
}

}  // namespace lockstep::detail
