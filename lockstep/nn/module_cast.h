// Between what users hold of a module (a holder, a shared_ptr) and the module itself.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <type_traits>

namespace lockstep {

namespace detail {

/// `M` is a holder such as torch::nn::Linear, or a shared_ptr to a module.
template <class M>
std::shared_ptr<torch::nn::Module> as_module(const M& module) {
  if constexpr (std::is_convertible_v<M, std::shared_ptr<torch::nn::Module>>) {
    return module;
  } else {
    return module.ptr();
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
