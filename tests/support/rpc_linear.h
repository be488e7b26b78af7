// The one remote Linear of RPC's tests: a class has one name in a program. Without bias.
#pragma once

#include <torch/nn/modules/linear.h>

#include "lockstep/rpc/module_class.h"

namespace lockstep::rpc {

inline torch::nn::Linear make_linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

inline const auto linear_class = module_class<torch::nn::LinearImpl>("tests.Linear").made_by(&make_linear);

}  // namespace lockstep::rpc
