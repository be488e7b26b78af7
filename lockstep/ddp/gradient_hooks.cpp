#include "lockstep/ddp/gradient_hooks.h"

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
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    const auto key = accumulator->add_post_hook(std::make_unique<ReadyHook>(on_ready, i));
    index_of_[accumulator.get()] = i;
    hooks_.emplace_back(std::move(accumulator), key);
  }
}

void GradientHooks::remove() {
  for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
  hooks_.clear();
  index_of_.clear();
}

}  // namespace lockstep::detail
