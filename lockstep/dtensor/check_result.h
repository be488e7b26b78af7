// Where a LayoutChecker looks at what was made. Internal to dtensor and tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>

#include "lockstep/intercept/operator_call.h"

namespace lockstep::detail {

// Of all ranks of the process: with none nobody looks further.
extern std::atomic<int> checker_count;

void compare_result(const std::string& what, const at::Tensor& result);
void compare_results(OperatorCall& call);

/// Compares a DTensor that `what` has made, if this rank has a LayoutChecker. Then collective over its mesh.
inline void check_result(const char* what, const at::Tensor& result) {
  if (checker_count.load(std::memory_order_relaxed) != 0) compare_result(what, result);
}

/// The same for all DTensors among the results of a call that was answered.
inline void check_results(OperatorCall& call) {
  if (checker_count.load(std::memory_order_relaxed) != 0) compare_results(call);
}

}  // namespace lockstep::detail
