// Parameters that two modules share. In C++ a module holds a parameter twice, in a member and in its register, and a
// tie must cover both; and parameters() lists a tied one once for each module, so an optimizer would step it twice.
//
//   lockstep::tie_parameter(*head, "weight", head->weight, embedding->weight);
//   torch::optim::AdamW optimizer(lockstep::unique_parameters(*model), 1e-3);
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Makes `member`, which `module` registers as `name`, the same parameter as `to`. Before wrapping and sharding.
/// Refuses a name the module has not, a member that is not what it registers, and other sizes. Local.
void tie_parameter(torch::nn::Module& module, const std::string& name, at::Tensor& member, const at::Tensor& to);

/// The parameters of `module`, each once, in registration order. Local.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);

}  // namespace lockstep
