// Optimizer state as a plain value: Python's state_dict(). Any torch::optim::Optimizer can be read into one and loaded
// from one, whatever its type, because all libtorch optimizers can write their options and state into archives.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/state/named_values.h"

namespace lockstep {

/// Parameters are numbered over the groups, in their order.
struct OptimizerStateDict {
  struct Group {
    NamedValues options = {};
    std::vector<int64_t> params = {};
  };
  /// Parameters without state are absent. "step" is an integer, as libtorch has it.
  std::map<int64_t, NamedValues> state = {};
  std::vector<Group> param_groups = {};
};

/// Over the groups, in their order: numbered as in an OptimizerStateDict.
std::vector<at::Tensor> optimized_parameters(const torch::optim::Optimizer& optimizer);

/// What the optimizer holds now. Tensors are the optimizer's own, not copies.
OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer);

/// Replaces options and state; tensors are taken as they are, not copied. Options the dictionary does not name keep
/// their values, and those the optimizer does not know are ignored. Throws if groups do not fit, if an index is
/// unknown, if the optimizer cannot load, or if it would drop some of the state because that is another kind's; then
/// nothing has changed.
void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict);

/// Throws, naming what differs, unless the dictionary has groups of these sizes and no index beyond. `who` opens the
/// message.
void check_fits(const OptimizerStateDict& dict, const std::vector<std::size_t>& group_sizes, const std::string& who);

/// Throws, naming both, if a parameter's state has as many dims as the parameter but other sizes: it is another
/// model's.
void check_shapes(const OptimizerStateDict& dict, const std::vector<at::Tensor>& parameters, const std::string& who);

/// libtorch's archive format: torch::load() of an optimizer of the type reads what was written, and what torch::save()
/// of one wrote can be read.
void write_archive(torch::serialize::OutputArchive& archive, const OptimizerStateDict& dict);
OptimizerStateDict read_archive(torch::serialize::InputArchive& archive);

/// Options of one group as named values, and back. Names that `options` does not have are ignored.
NamedValues values_of(const torch::optim::OptimizerOptions& options);
void assign_values(torch::optim::OptimizerOptions& options, const NamedValues& values);

}  // namespace lockstep
