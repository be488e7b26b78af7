// One case of the reference, trained again: what a rank is given, and what it holds after each step.
#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/options.h"
#include "lockstep/nn/module_tensors.h"
#include "tests/oracle/ddp/models.h"
#include "tests/oracle/ddp/reference.h"

namespace lockstep::ddp_oracle {

/// The case's options of DistributedDataParallel, which have the same names in Python.
DdpOptions options_of(const Case& file_case);

/// The case's environment variables, while it lives.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const Case& file_case);
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  const std::vector<std::string> names_;
};

/// A model with what rank `rank` began with.
std::shared_ptr<Model> initial_model(const Case& file_case, int rank, c10::Device device = c10::kCPU);

/// Each parameter once, under its first name.
inline NamedTensors parameters_of(const torch::nn::Module& model) {
  return detail::parameters_of(model, {});
}

/// torch::nn::Module::parameters() lists shared ones twice, and an optimizer would step them twice.
torch::optim::SGD make_optimizer(const torch::nn::Module& model, const Case& file_case);

/// What a rank is given in one step.
struct RankStep {
  struct Batch {
    at::Tensor input;
    at::Tensor target;
  };
  std::vector<Batch> batches;
  std::vector<int64_t> uses;
};
RankStep rank_step(const Case& file_case, int rank, std::size_t step, c10::Device device = c10::kCPU);

/// `model` is a Model, or a wrapper around one.
template <class M>
at::Tensor loss_of(M& model, const RankStep& step) {
  at::Tensor loss;
  for (const auto& [input, target] : step.batches) {
    const auto part = (model.forward(input, step.uses) - target).pow(2).mean();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

/// Before a step: "none", "zeros" or "keep".
void zero_gradients(const torch::nn::Module& model, const std::string& how);

/// All values of parameters and, if asked for, buffers, exactly, in one tensor.
at::Tensor flat_state(const torch::nn::Module& model, bool has_buffers = true);

/// No tolerance: every bit.
using Tolerance = std::optional<double>;

/// EXPECTs, wherever the tensors are, equal dtypes and sizes, and equal values: bits, or up to a relative and absolute
/// tolerance.
void expect_same(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance, const std::string& what);

/// The gradients of `model` are those of the reference, which has none where there is none and tells indices and values
/// of sparse ones. Layouts too: a reduced gradient lies in memory as Python's does.
void expect_gradients(const torch::nn::Module& model, const Node& expected, Tolerance tolerance);

}  // namespace lockstep::ddp_oracle
