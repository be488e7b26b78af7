// Selective checkpointing: which operators of a checkpointed function are not run again, because their results are
// kept.
//
//   const lockstep::CheckpointOptions options{.policy = lockstep::save_operators({"aten::mm", "aten::addmm"})};
//   auto y = lockstep::checkpoint(options, block, x);
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/intercept/operator_call.h"

namespace lockstep {

/// Python's. kMust and kPrefer are the same here: nobody overrides them.
enum class CheckpointPolicy {
  kMustSave,
  kPreferSave,
  kMustRecompute,
  kPreferRecompute,
  kMustCpuOffload,  // kept on the host; in pinned memory if it comes from an accelerator
  kPreferCpuOffload
};

/// Asked for every operator of the forward that computes something new, below autograd: call.name() is "aten::addmm",
/// never "aten::linear", and its arguments are there. Not asked for views, which cost nothing, and for operators that
/// write in place, which always run again. Must not change the call.
using CheckpointPolicyFn = std::function<CheckpointPolicy(const OperatorCall& call)>;

/// Keeps the results of these operators, and no others. Names are as libtorch has them, with the overload if there is
/// one: "aten::mm", "aten::add.Tensor". Refuses names it does not know.
CheckpointPolicyFn save_operators(const std::vector<std::string>& names);

}  // namespace lockstep
