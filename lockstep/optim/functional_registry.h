// Which functional optimizer stands in for an ordinary one, by the ordinary one's type or by a name of the program's.
// All of torch::optim and lockstep::optim that have one are known from the start.
#pragma once

#include <c10/util/Type.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/functional.h"

namespace lockstep::optim {

using FunctionalFactory = std::function<std::unique_ptr<FunctionalOptimizer>(
    std::vector<at::Tensor> parameters, const torch::optim::OptimizerOptions& options)>;

/// The key of a type: its full name.
template <class Optimizer>
std::string functional_key() {
  return c10::demangle_type<Optimizer>();
}

/// Python's register_functional_optim(). Does nothing if the key is known: the first one stays. Any thread.
void register_functional(const std::string& key, FunctionalFactory factory);

/// For an optimizer class.
template <class Optimizer>
void register_functional(FunctionalFactory factory) {
  register_functional(functional_key<Optimizer>(), std::move(factory));
}

bool has_functional_form(const std::string& key);

/// Python's as_functional_optim(): the functional form of the optimizer with that key, with its options (libtorch's,
/// for libtorch's types). Throws if there is none, naming the key. Logs which one it made.
std::unique_ptr<FunctionalOptimizer> functional_form_of(const std::string& key, std::vector<at::Tensor> parameters,
                                                        const torch::optim::OptimizerOptions& options);

template <class Optimizer>
std::unique_ptr<FunctionalOptimizer> functional_form_of(std::vector<at::Tensor> parameters,
                                                        const torch::optim::OptimizerOptions& options) {
  return functional_form_of(functional_key<Optimizer>(), std::move(parameters), options);
}

}  // namespace lockstep::optim
