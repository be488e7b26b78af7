#include "lockstep/comm/barrier.h"

#include "lockstep/comm/group_state.h"
#include "lockstep/comm/pending.h"

namespace lockstep {

void barrier(const GroupPtr& group, std::chrono::milliseconds timeout) {
  auto& state = detail::state_of(group);
  if (state.description.size == 1) return;
  Call call{.kind = CallKind::kBarrier};
  call.is_async = false;
  if (timeout.count() > 0) call.timeout = timeout;
  launch(call, group).wait();
}

}  // namespace lockstep
