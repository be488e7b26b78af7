// Internal to the wrappers. The protected members of torch::nn::Module they need.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace lockstep::detail {

struct ModuleAccess : torch::nn::Module {
  /// The registered parameters, which the module's members are handles to as well until one of them is replaced.
  static torch::OrderedDict<std::string, at::Tensor>& parameters_of(torch::nn::Module& module) {
    constexpr auto kMember = &ModuleAccess::parameters_;
    return module.*kMember;
  }
};

}  // namespace lockstep::detail
