// Optimizers in libtorch's archive format, so that files are interchangeable with torch::optim's. Internal to
// optim.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>

namespace lockstep::optim::detail {

/// Keys are positions where libtorch's are addresses: the same state gives the same file.
void save_optimizer(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer);

/// What load_optimizer() reads into.
struct LoadTargets {
  /// Options of a group, with the values they have now.
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>(const torch::optim::OptimizerOptions& now)> options;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> state;
};

/// Replaces options and state by the archive's. Changes nothing if the archive does not fit.
void load_optimizer(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer,
                    const LoadTargets& targets);

}  // namespace lockstep::optim::detail
