#include "lockstep/comm/futures.h"

#include <algorithm>
#include <string>

#include "lockstep/comm/failure.h"

namespace lockstep::detail {

FuturePtr all_of(const std::vector<FuturePtr>& futures) {
  // Not c10::collectAll(): its future knows no devices, so nobody who waits for it would wait for their streams.
  auto all = futures.at(0);
  for (std::size_t i = 1; i < futures.size(); ++i) {
    all = all->thenAsync(
        [next = futures[i]](c10::ivalue::Future& before) {
          before.value();  // throws what it holds
          return next;
        },
        futures[i]->elementType());
  }
  return all;
}

void wait_for(c10::ivalue::Future& future, const GroupPtr& group, const char* what) {
  auto& state = state_of(group);
  const bool is_diagnosed = std::any_of(state.backends.begin(), state.backends.end(),
                                        [](const auto& each) { return !each.second.traits.names_missing_ranks; });
  if (!is_diagnosed) return future.wait();
  wait_unless_others_give_up(future, state, [&] { return std::string(what); });
  if (!future.hasError()) return;
  try {
    std::rethrow_exception(future.exception_ptr());
  } catch (const c10::DistBackendError& error) {
    if (message_of(error).starts_with("[lockstep/comm]")) throw;
    report_failure(state, what, first_line(error));
    // NOLINTNEXTLINE(bugprone-empty-catch): the future keeps it
  } catch (...) {
  }
}

void wait_on_stream(const std::vector<FuturePtr>& futures) {
  for (const auto& future : futures) future->wait();
}

}  // namespace lockstep::detail
