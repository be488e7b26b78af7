#include "lockstep/comm/failure_notice.h"

#include <chrono>
#include <thread>

#include "lockstep/base/str.h"
#include "lockstep/comm/call_backend.h"
#include "lockstep/comm/failure.h"

namespace lockstep {
namespace {

constexpr auto kRefusalGrace = std::chrono::milliseconds(800);
constexpr auto kRefusalPoll = std::chrono::milliseconds(10);

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

/// Whether all ranks refuse as often as this one does now.
bool do_all_refuse(detail::GroupState& state) {
  const auto& store = state.description.store;
  if (!store) return false;
  const auto number = ++state.refusals;
  const auto key_of = [&](int each) { return str("refusal/", number, "/", each); };
  store->set(key_of(state.description.rank), std::vector<uint8_t>{1});
  std::vector<std::string> keys;
  for (int each = 0; each < state.description.size; ++each) keys.push_back(key_of(each));
  const auto deadline = std::chrono::steady_clock::now() + kRefusalGrace;
  while (!store->check(keys)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kRefusalPoll);
  }
  return true;
}

}  // namespace

void announce_refusal(const GroupPtr& group, const std::exception_ptr& cause) noexcept {
  try {
    auto& state = detail::state_of(group);
    if (state.description.size == 1 || do_all_refuse(state)) return;
    // NOLINTNEXTLINE(bugprone-empty-catch): without a store nobody can be asked
  } catch (...) {
  }
  announce_failure(group, cause);
}

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
