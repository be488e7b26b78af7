// The distributed autograd context a thread works for. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/autograd/context/container.h>

#include <cstdint>

namespace lockstep::rpc::detail {

inline std::int64_t current_context_id() {
  return torch::distributed::autograd::DistAutogradContainer::currentContextId();
}

/// A context that ended on another thread is none: lets this one work for none then.
inline void drop_ended_context() {
  using torch::distributed::autograd::DistAutogradContainer;
  const auto id = current_context_id();
  if (id == -1) return;
  try {
    DistAutogradContainer::getInstance().retrieveContext(id);
  } catch (const c10::Error&) {
    DistAutogradContainer::forceCurrentContextId(-1);
  }
}

/// Lets this thread work for another context, or for none, until the end of the scope.
class ContextScope {
 public:
  explicit ContextScope(std::int64_t id) : before_(current_context_id()) {
    torch::distributed::autograd::DistAutogradContainer::forceCurrentContextId(id);
  }
  ~ContextScope() { torch::distributed::autograd::DistAutogradContainer::forceCurrentContextId(before_); }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ContextScope(ContextScope&&) = delete;
  ContextScope& operator=(ContextScope&&) = delete;

 private:
  std::int64_t before_;
};

}  // namespace lockstep::rpc::detail
