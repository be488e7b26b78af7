// What is timed: one way to do one operation, with the tensors it works on. Called at the level of c10d::Backend, where
// ours and gloo are alike, and blocking, as Python's functions are by default.
#pragma once

#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "benchmarks/collectives/plan.h"

namespace lockstep::bench {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct Contender {
  std::string name;
  int64_t bytes = 0;
  std::function<void()> call;  // collective
};

enum class Tensors { kOrdinary, kFromBackend };

/// Makes tensors, does the operation once and throws if the result is wrong. Collective. The tensors are zeros
/// afterwards, so that sums over sums stay finite.
Contender make_contender(const std::string& name, const BackendPtr& backend, Operation operation, int64_t bytes,
                         Tensors tensors);

}  // namespace lockstep::bench
