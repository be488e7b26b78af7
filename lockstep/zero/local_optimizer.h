// What ZeroOptimizer must know of the type of its local optimizers, without being a template of it. Filled in by
// ZeroRedundancyOptimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

struct LocalOptimizerType {
  using Optimizer = torch::optim::Optimizer;
  using Options = torch::optim::OptimizerOptions;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// With namespaces, also its key among functional forms: "torch::optim::AdamW".
  std::string name = "";
  /// Every element is updated from its own gradient and state alone, so that slices can be stepped.
  bool is_elementwise = false;
  /// Its result depends on all parameters at once, so that shards cannot be stepped.
  bool needs_all_parameters = false;
  /// Without a load() of its own or of the libtorch optimizer it derives from, it can have no state that lasts.
  bool has_load = true;
  std::shared_ptr<const Options> defaults = nullptr;
  std::function<std::unique_ptr<Optimizer>(const Groups& groups)> make = nullptr;
  /// The type's own add_param_group(), which is not virtual.
  std::function<void(Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group)> add_group = nullptr;
  /// Gives options their values in place. False if one of them is not of the type's options.
  std::function<bool(const Options& from, Options& to)> assign = nullptr;
};

}  // namespace lockstep
