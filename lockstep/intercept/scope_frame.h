// Internal to intercept. The scopes of a thread as a list, innermost first.
#pragma once

#include <atomic>
#include <memory>

#include "lockstep/intercept/operator_scope.h"

namespace lockstep::detail {

// Threads of autograd may hold it longer than the scope lives.
struct ScopeFrame : c10::DebugInfoBase, std::enable_shared_from_this<ScopeFrame> {
  std::shared_ptr<OperatorScope> scope;
  std::shared_ptr<ScopeFrame> outer;
  std::atomic<bool> is_open = true;
};

/// The calling thread's innermost scope; null if it has none.
std::shared_ptr<ScopeFrame> innermost_scope();

}  // namespace lockstep::detail
