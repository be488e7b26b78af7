// What a context's calls left behind for its backward. libtorch's engine waits for the gradient of everything that was
// sent and of every result, whether it contributes to a root or not; what would be waited for in vain is found here
// before it begins. Internal to rpc.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/gradient_hooks.h"

namespace lockstep::rpc::detail {

using lockstep::detail::NodePtr;

/// One call, made by this worker in a context of its own.
struct CallLink {
  std::string worker;
  std::string function;
  bool has_sent = false;  // tensors that need gradients
  enum class State { kUnderWay, kAnswered, kKept, kFailed } state = State::kUnderWay;
  std::vector<NodePtr> results;  // where gradients of its result leave this worker
};

/// Notes a call that is about to be made; null outside of this worker's own contexts.
std::shared_ptr<CallLink> note_call(const std::string& worker, const std::string& function, bool has_sent);
void note_answer(const std::shared_ptr<CallLink>& link, const c10::IValue& value);
void note_failure(const std::shared_ptr<CallLink>& link);

/// Throws if a backward from `roots` would wait for ever: naming the call whose result does not contribute to a root,
/// or that failed.
void check_links(std::int64_t context_id, const std::vector<at::Tensor>& roots);
void forget_links(std::int64_t context_id);

}  // namespace lockstep::rpc::detail
