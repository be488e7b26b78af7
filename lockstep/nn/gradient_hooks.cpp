#include "lockstep/nn/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

namespace lockstep::detail {
namespace {

using torch::autograd::variable_list;

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(std::function<void(std::size_t)> on_ready, std::size_t index)
      : on_ready_(std::move(on_ready)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    on_ready_(index_);
    return outputs;
  }

 private:
  const std::function<void(std::size_t)> on_ready_;
  const std::size_t index_;
};

}  // namespace

void GradientHooks::add(const std::vector<at::Tensor>& parameters,
                        const std::function<void(std::size_t index)>& on_ready) {
  parameters_ = parameters;
  on_ready_ = on_ready;
  hooks_.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) add_one(i);
}

void GradientHooks::add_one(std::size_t index) {
  // One that was frozen meanwhile has no accumulator.
  if (!parameters_[index].requires_grad()) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
  const auto key = accumulator->add_post_hook(std::make_unique<ReadyHook>(on_ready_, index));
  index_of_[accumulator.get()] = index;
  hooks_[index] = {std::move(accumulator), key};
}

void GradientHooks::refresh() {
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    auto& [accumulator, key] = hooks_[i];
    const auto now = torch::autograd::impl::try_get_grad_accumulator(parameters_[i]);
    if (now.get() == accumulator.get() || !parameters_[i].requires_grad()) continue;
    if (accumulator) {
      accumulator->del_post_hook(key);
      index_of_.erase(accumulator.get());
    }
    add_one(i);
  }
}

void GradientHooks::remove() {
  for (const auto& [accumulator, key] : hooks_) {
    if (accumulator) accumulator->del_post_hook(key);
  }
  hooks_.clear();
  index_of_.clear();
  parameters_.clear();
}

}  // namespace lockstep::detail
