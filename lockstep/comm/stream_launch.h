// A collective of accelerator tensors on a stream of the group's own, so that computing goes on meanwhile. Internal to
// comm; docs/comm.md, "Streams", has the whole story.
//
// Only events order the streams: the host waits for nothing. The tensors must stay alive until the stream that made
// them has waited for the collective; whoever gives them up before that calls protect().
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <vector>

#include "lockstep/comm/call.h"

namespace lockstep::detail {

struct GroupState;

class StreamLaunch {
 public:
  /// Calls `start` with the group's stream for `device` current, which has waited for what was current before.
  StreamLaunch(GroupState& group, c10::Device device, const std::function<void()>& start);

  /// Lets the current stream wait. The host does not. True if it is the one the collective was launched from: memory
  /// that came from there may then be given up.
  bool wait() const;
  /// The device has finished.
  bool is_completed() const { return done_.query(); }
  /// Complete at once, as NCCL's are: who waits for it, or runs behind it, has their stream wait.
  c10::intrusive_ptr<c10::ivalue::Future> future(const std::vector<at::Tensor>& results) const;
  /// Keeps the tensors' memory from being used for something else before the collective is over, whoever gives it up.
  void protect(const std::vector<at::Tensor>& tensors) const;

 private:
  const c10::Device device_;
  const c10::Stream origin_;
  const c10::Stream stream_;
  c10::Event done_;
};

}  // namespace lockstep::detail
