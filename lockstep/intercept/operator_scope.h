// Scopes of a thread: while an EnterScope lives, its OperatorScope sees every operator the thread calls, whatever the
// tensors. Backward passes started inside are seen in all of autograd's threads; other threads are not, unless they are
// given the thread's at::ThreadLocalState. So on_operator() may be called by several threads at once.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace lockstep {

class OperatorCall;
namespace detail {
struct ScopeFrame;
}

class OperatorScope {
 public:
  /// What a scope is shown.
  enum class Sees {
    kProgram,  // what the program calls: aten::linear, and not what it consists of
    kLeaves,   // what runs: the parts of composite operators, and what rules of tensors call
    kKernels   // the same below autograd, which records whatever the scope answers; not what owners call
  };

  explicit OperatorScope(Sees sees) : sees_(sees) {}
  virtual ~OperatorScope() = default;
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

  /// Calls call.proceed() or call.replace(), once. What it calls itself is not intercepted. May throw: the operator
  /// then throws, and all guards are restored.
  virtual void on_operator(OperatorCall& call) = 0;

  Sees sees() const { return sees_; }

 private:
  const Sees sees_;
};

/// Shows the thread's operators to `scope` until it is destroyed: by the same thread, the innermost first.
class EnterScope {
 public:
  explicit EnterScope(std::shared_ptr<OperatorScope> scope);
  ~EnterScope();
  EnterScope(const EnterScope&) = delete;
  EnterScope& operator=(const EnterScope&) = delete;

 private:
  std::shared_ptr<detail::ScopeFrame> frame_;
  c10::DebugInfoGuard carried_;  // by libtorch, wherever it carries the thread's dispatch keys
  c10::impl::IncludeDispatchKeyGuard included_;
};

/// Keeps the thread's operators from scopes, rules and owners while it lives.
class NotIntercepted {
 public:
  NotIntercepted();

 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_;
};

}  // namespace lockstep
