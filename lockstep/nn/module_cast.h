// Between what users hold of a module (a holder, a shared_ptr) and the module itself.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <type_traits>

namespace lockstep {

namespace detail {

template <class M>
inline constexpr bool kHoldsModule =
    std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>> || requires(const M& module) { module.ptr(); };

/// `M` is a holder such as torch::nn::Linear, or a shared_ptr to a module.
template <class M>
std::shared_ptr<torch::nn::Module> as_module(const M& module) {
  static_assert(kHoldsModule<M>,
                "lockstep takes what holds a module, not the module itself: a class made by TORCH_MODULE(Net), such as "
                "torch::nn::Linear, or std::make_shared<NetImpl>(...)");
  if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
    return module;
  } else if constexpr (kHoldsModule<M>) {
    return module.ptr();
  } else {
    return nullptr;  // one error is enough
  }
}

/// The other way; `module` is what as_module() gave, or a copy of it.
template <class M>
M module_cast(const std::shared_ptr<torch::nn::Module>& module) {
  if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
    return std::dynamic_pointer_cast<typename M::element_type>(module);
  } else {
    return M(std::dynamic_pointer_cast<typename M::ContainedType>(module));
  }
}

}  // namespace detail

}  // namespace lockstep
