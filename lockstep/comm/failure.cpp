#include "lockstep/comm/failure.h"

#include <thread>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

// Survivors that wait look at the page every kPollInterval (pending.cpp); they have signed well before this is over.
constexpr auto kGrace = std::chrono::milliseconds(1500);
constexpr auto kSignPoll = std::chrono::milliseconds(20);
constexpr char kAnyFailure[] = "failure/any";

std::string signature_key(int rank) {
  return str("failure/rank/", rank);
}

/// The ranks that have not signed by the end of the grace period; ends early once all have.
std::vector<int> unsigned_ranks(c10d::Store& store, const GroupDescription& group) {
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  std::vector<int> open = first_ranks(group.size);
  while (true) {
    std::erase_if(open, [&](int rank) { return store.check({signature_key(rank)}); });
    if (open.empty() || std::chrono::steady_clock::now() > deadline) return open;
    std::this_thread::sleep_for(kSignPoll);
  }
}

}  // namespace

bool has_failure(GroupState& state) {
  const auto& store = state.description.store;
  return store && store->check({kAnyFailure});
}

std::string first_line(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

void check_usable(GroupState& state) {
  const std::lock_guard lock(state.mutex);
  TORCH_CHECK_WITH(DistBackendError, state.failure.empty(), "[lockstep/comm] ", state.who(), ": group '",
                   state.description.name, "' can no longer be used. It failed earlier: ", state.failure);
}

void report_failure(GroupState& state, const std::string& operation, const std::string& cause) {
  const auto& group = state.description;
  std::string verdict;
  try {
    if (group.store) {
      const auto note = str(operation, ": ", cause);
      group.store->set(signature_key(group.rank), std::vector<uint8_t>(note.begin(), note.end()));
      group.store->set(kAnyFailure, std::vector<uint8_t>{1});
      std::vector<int> missing;
      for (const int rank : unsigned_ranks(*group.store, group)) missing.push_back(group.global_ranks[rank]);
      verdict = missing.empty()
                    ? "every rank is alive, but gave up as well"
                    : str("rank ", join(missing, ", "), missing.size() == 1 ? " is" : " are", " gone, hung or late");
    } else {
      verdict = "the group has no store to ask who is missing";
    }
  } catch (const std::exception&) {
    verdict = "the store is gone, and with it the rank that served it (rank 0 under lockstep-run)";
  }
  const auto text = str("[lockstep/comm] ", state.who(), ": ", operation, " on group '", group.name,
                        "' failed: ", verdict, ". Look there for an earlier error. Cause seen here: ", cause);
  {
    const std::lock_guard lock(state.mutex);
    if (state.failure.empty()) state.failure = text;
  }
  throw c10::DistBackendError(text);
}

}  // namespace lockstep::detail
