// The distributed autograd context a thread works for. Internal to rpc.
#pragma once

#include <torch/csrc/distributed/autograd/context/container.h>

#include <cstdint>

namespace lockstep::rpc::detail {

inline std::int64_t current_context_id() {
  return torch::distributed::autograd::DistAutogradContainer::currentContextId();
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
