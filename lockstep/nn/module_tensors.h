// The parameters and buffers of a module, as ddp/ sees them: by dotted name, in registration order, each tensor once.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/nn/parameter_info.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Leaves these parameters and buffers of `module` alone when it is wrapped later: no sync, no reduction, no cast. By
/// dotted name. Warns of names the module has not.
void set_params_and_buffers_to_ignore_for_model(const std::shared_ptr<torch::nn::Module>& module,
                                                const std::vector<std::string>& names);

namespace detail {

/// What was set for `module` by the function above.
std::set<std::string> ignored_names(const torch::nn::Module& module);

/// All parameters, frozen ones too, but not those in `ignored`. A shared tensor counts once, under its first name.
NamedTensors parameters_of(const torch::nn::Module& module, const std::set<std::string>& ignored);
/// All buffers that are defined.
NamedTensors buffers_of(const torch::nn::Module& module, const std::set<std::string>& ignored);

/// What the reducer manages: parameters that require gradients.
struct ManagedParameters {
  std::vector<at::Tensor> tensors;
  std::vector<ParameterInfo> infos;
};
ManagedParameters managed_parameters(const torch::nn::Module& module, const std::set<std::string>& ignored);

/// Calls visit(name, module) for the module itself, by an empty name, and all below it; each once.
void for_each_module(const torch::nn::Module& root,
                     const std::function<void(const std::string& name, const torch::nn::Module& module)>& visit);

/// "encoder" and "weight" make "encoder.weight"; nothing and "weight" make "weight".
std::string joined_name(const std::string& prefix, const std::string& name);

}  // namespace detail
}  // namespace lockstep
