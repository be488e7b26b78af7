#include "lockstep/nn/tied_parameters.h"

#include <unordered_set>

#include "lockstep/nn/module_access.h"

namespace lockstep {

void tie_parameter(torch::nn::Module& module, const std::string& name, at::Tensor& member, const at::Tensor& to) {
  auto* registered = detail::ModuleAccess::parameters_of(module).find(name);
  TORCH_CHECK(registered != nullptr, "[lockstep/nn] tie_parameter: ", module.name(), " has no parameter '", name, "'.");
  TORCH_CHECK(registered->is_same(member), "[lockstep/nn] tie_parameter: the member given is not what ", module.name(),
              " registers as '", name, "'.");
  TORCH_CHECK(to.defined() && to.sizes() == member.sizes(), "[lockstep/nn] tie_parameter: '", name, "' of ",
              module.name(), " has sizes ", member.sizes(), ", and is to be one of sizes ",
              to.defined() ? to.sizes() : at::IntArrayRef(), ".");
  *registered = to;
  member = to;
}

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const void*> seen;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  }
  return parameters;
}

}  // namespace lockstep
