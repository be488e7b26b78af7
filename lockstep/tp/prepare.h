// Styles that cut nothing: they bring what a module takes, or returns, to other layouts. Names and defaults are those
// of Python's torch.distributed.tensor.parallel.
//
// C++ modules have no hooks, so a module that is to be prepared says so in its type, Prepared<M> (prepared.h), and the
// plan names it. Of a layer that ColwiseParallel and the others know, PrepareModuleInput works without: it acts at the
// operator that uses the layer's parameters, which become replicas.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/tp/style.h"

namespace lockstep {

/// One for each argument, or for each tensor that is returned; none for what is to be left as it is.
using OptionalLayouts = std::vector<std::optional<Placement>>;

struct PrepareInputOptions {
  OptionalLayouts input_layouts = {};          // what plain tensors are pieces of
  OptionalLayouts desired_input_layouts = {};  // what the module is to get
  bool use_local_output = false;               // local tensors instead of DTensors
};

/// Brings arguments to other layouts before the module's forward.
class PrepareModuleInput : public ParallelStyle {
 public:
  /// Refuses numbers of layouts that differ.
  explicit PrepareModuleInput(PrepareInputOptions options);
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  PrepareInputOptions options_;
};

struct PrepareOutputOptions {
  OptionalLayouts output_layouts = {};          // what plain tensors are pieces of
  OptionalLayouts desired_output_layouts = {};  // what leaves
  bool use_local_output = true;
};

/// Brings results to other layouts after the module's forward.
class PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareOutputOptions options);
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  PrepareOutputOptions options_;
};

struct PrepareInputOutputOptions {
  OptionalLayouts input_layouts = {};
  OptionalLayouts desired_input_layouts = {};
  bool use_local_input = false;
  OptionalLayouts output_layouts = {};
  OptionalLayouts desired_output_layouts = {};
  bool use_local_output = true;
};

/// Both.
class PrepareModuleInputOutput : public ParallelStyle {
 public:
  explicit PrepareModuleInputOutput(PrepareInputOutputOptions options);
  void apply(torch::nn::Module& module, const std::string& path, const StyleContext& context) const override;
  std::string to_string() const override;

 private:
  PrepareInputOutputOptions options_;
};

}  // namespace lockstep
