// What models hold, across ranks and units: compared, zeroed, gathered, sent. All but check_units() are collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/state_dict.h"

namespace lockstep::testing {

/// Calls `check(name, value of rank 0, value of another rank)` for every parameter, buffer and rank of `group`, on all
/// ranks, with values in host memory. Throws CheckFailure that names the rank and what differs.
void assert_module_states(
    const torch::nn::Module& model, const GroupPtr& group,
    const std::function<void(const std::string& name, const at::Tensor& first, const at::Tensor& other)>& check);

struct ZeroModelOptions {
  bool zero_buffers = false;
  /// Through whole parameters, in a summon_full_params() scope; else each rank zeroes its shards.
  bool summon = true;
};
/// Sets all parameters to zero.
void zero_model(torch::nn::Module& model, const ZeroModelOptions& options = {});

/// Shows `visit` all parameters by name, whole, each once; what it writes is kept. Without `recurse` only those of the
/// unit that `model` is are whole, the others shards.
void visit_full_params(const torch::nn::Module& model,
                       const std::function<void(const std::string& name, const at::Tensor& whole)>& visit,
                       bool recurse = true);

/// Copies of them, where the rank computes.
ModuleState get_full_params(const torch::nn::Module& model, bool recurse = true);

/// Whole state; floating tensors in half precision if asked for.
struct TestStateOptions {
  bool cpu_offload = false;
  bool half = false;
};
ModuleState state_dict(const torch::nn::Module& model, const TestStateOptions& options = {});

/// Rank 0's state on all ranks, where they compute; it travels through host memory. What others pass is ignored.
ModuleState broadcast_state_dict(const ModuleState& state, const GroupPtr& group = default_group());

/// All units below `model`, itself included, inner ones first.
std::vector<FsdpUnit> units_of(const torch::nn::Module& model);

/// Throws CheckFailure that names the units whose options are not as `is_right` wants them. `what` says what that is.
/// If there is no unit at all, it throws too.
void check_units(const torch::nn::Module& model, const std::string& what,
                 const std::function<bool(const FullyShardOptions& options)>& is_right);

/// Throws CheckFailure that names what is still whole, or still has a gradient that was not reduced: between steps
/// nothing is, unless a unit was told to stay whole.
void check_units_are_idle(const torch::nn::Module& model);

}  // namespace lockstep::testing
