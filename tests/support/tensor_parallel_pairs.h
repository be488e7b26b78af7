// A parallelized module beside the same module on one device: what tests of tensor parallelism share.
#pragma once

#include "lockstep/shard/layout_of.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::tensor_parallel_pairs {

using fsdp_models::built_from_seed;

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t width, int64_t hidden)
      : in(register_module("in", torch::nn::Linear(width, hidden))),
        out(register_module("out", torch::nn::Linear(hidden, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + out(at::tanh(in(x))); }
  torch::nn::Linear in;
  torch::nn::Linear out;
};
TORCH_MODULE(Mlp);

inline void expect_close(const std::string& what, const at::Tensor& actual, const at::Tensor& expected) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-4, 1e-5)) << what << "\n" << actual << "\nis not\n" << expected;
}

/// Parameters and gradients of `model` are the parts of those of `whole`.
inline void expect_parts(torch::nn::Module& model, torch::nn::Module& whole) {
  const auto expected = whole.named_parameters();
  for (const auto& parameter : model.named_parameters()) {
    const auto& other = expected[parameter.key()];
    const auto layout = layout_of(parameter.value());
    const auto cut = [&](const at::Tensor& tensor) { return layout ? layout->cut(tensor) : tensor; };
    expect_close(parameter.key(), parameter.value().detach(), cut(other.detach()));
    EXPECT_EQ(parameter.value().grad().defined(), other.grad().defined()) << parameter.key();
    if (other.grad().defined()) expect_close(parameter.key() + ".grad", parameter.value().grad(), cut(other.grad()));
  }
}

template <class Build>
auto pair_of(const Build& build) {
  return std::pair{built_from_seed(build, 1), built_from_seed(build, 1)};
}

}  // namespace lockstep::tensor_parallel_pairs
