// A collective that was launched and may still run. Every collective the library makes comes into being through
// launch().
#pragma once

#include <functional>
#include <memory>

#include "lockstep/comm/call.h"
#include "lockstep/comm/group.h"

namespace lockstep {

/// Result of a launch, on any device. Copies share the same collective. Dropping it neither waits nor cancels; the
/// tensors stay alive until the backend is done with them.
class Pending {
 public:
  /// One that has finished.
  Pending() = default;

  /// Blocks until the outputs may be read. Of tensors on an accelerator over NCCL: lets the current stream wait, and
  /// returns. Throws
  /// c10::DistBackendError that names the operation and the ranks that did not take part. May be called again; a
  /// failure is thrown each time.
  void wait();

  /// True if wait() would not block.
  bool is_completed() const;

  /// Completes with the output tensors when the outputs may be read. Throws if the backend has none to give, as gloo
  /// has for reduce-scatter.
  c10::intrusive_ptr<c10::ivalue::Future> future();

 private:
  friend Pending run_on_backend(Call call, const GroupPtr& group);
  struct State;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  std::shared_ptr<State> state_;
};

/// Starts `call` on the backend of its tensors' device. A group of one rank copies what has to be copied and is
/// finished. Throws at once if the call is malformed, before anything is communicated, or the group failed earlier.
[[nodiscard]] Pending launch(Call call, const GroupPtr& group = default_group());

}  // namespace lockstep
