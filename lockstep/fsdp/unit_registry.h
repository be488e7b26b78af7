// Which modules are units. Modules know nothing of it, so it is a table by address, with what tells a dead one from a
// new one at its place. Internal to fsdp. Thread-safe: ranks may be threads.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "lockstep/fsdp/unit.h"

namespace lockstep::detail {

void register_unit(const std::shared_ptr<torch::nn::Module>& module, const UnitPtr& unit);
/// Null if it is none.
UnitPtr find_unit(const torch::nn::Module& module);

/// Whether it has a forward: lists and dicts of modules have none.
bool can_be_called(const torch::nn::Module& module);

/// The registered parameters, which the module's members are handles to as well until one of them is replaced.
struct ModuleAccess : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& parameters_of(torch::nn::Module& module) {
    constexpr auto kMember = &ModuleAccess::parameters_;
    return module.*kMember;
  }
};

}  // namespace lockstep::detail
