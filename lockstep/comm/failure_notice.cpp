#include "lockstep/comm/failure_notice.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/call_backend.h"
#include "lockstep/comm/failure.h"

namespace lockstep {
namespace {

void fail_backends(const GroupPtr& group, const detail::GroupState& state, const std::string& reason) {
  for (const auto& [device, serving] : state.backends) {
    if (serving.ours != nullptr) serving.ours->fail(reason);
  }
  if (!state.backends.empty()) return;
  for (const auto& device : group->getDeviceTypes()) {
    if (auto* ours = dynamic_cast<CallBackend*>(group->getBackend(device.type()).get())) ours->fail(reason);
  }
}

/// ": " and the first line of its message, or nothing.
std::string text_of(const std::exception_ptr& cause) {
  if (!cause) return "";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    return ": " + detail::first_line(error);
  } catch (...) {
    return ": one that is no std::exception";
  }
}

}  // namespace

void announce_failure(const GroupPtr& group, const std::exception_ptr& cause) noexcept {
  try {
    auto& state = detail::state_of(group);
    const auto& description = state.description;
    if (description.size == 1) return;
    const auto reason =
        str("rank ", description.global_ranks.at(description.rank), " left by an exception", text_of(cause));
    {
      const std::lock_guard lock(state.mutex);
      // Whoever caused that failure has been named; this rank only follows.
      if (!state.failure.empty()) return;
      state.failure = reason;
      state.has_failed = true;
    }
    fail_backends(group, state, reason);
    detail::sign_out(state, reason);
    // NOLINTNEXTLINE(bugprone-empty-catch): if the store is gone the others have their timeout
  } catch (...) {
  }
}

}  // namespace lockstep
