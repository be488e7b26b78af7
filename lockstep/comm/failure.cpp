#include "lockstep/comm/failure.h"

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

// How long a rank waits before it asks whether others have given up, and between asking again.
constexpr auto kPollInterval = std::chrono::milliseconds(100);
// Survivors that wait look at the page every kPollInterval; they have signed well before this is over.
constexpr auto kGrace = std::chrono::milliseconds(800);
// Longer than a waiting rank takes to notice, shorter than anybody minds.
constexpr auto kServerLinger = std::chrono::milliseconds(200);
constexpr auto kSignPoll = std::chrono::milliseconds(20);
// Of the others' causes, in the error of a rank that saw none itself.
constexpr int kMostCauses = 3;
constexpr char kAnyFailure[] = "failure/any";
constexpr char kDeparture[] = "failure/departure";
constexpr char kStoreIsGone[] = "the store is gone, and with it the rank that served it (rank 0 under lockstep-run)";

std::string signature_key(int rank) {
  return str("failure/rank/", rank);
}

std::string wait_key(int rank) {
  return str("waiting/", rank);
}

/// Set once; waited for in slices.
class Completion {
 public:
  void notify() {
    {
      const std::lock_guard lock(mutex_);
      is_done_ = true;
    }
    changed_.notify_all();
  }
  /// False if the time was over first.
  bool wait_for(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return is_done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
};

void show_wait(const GroupState& state, const std::string& operation) {
  const auto& store = state.description.store;
  if (!store) return;
  const auto text = str(state.next_sequence.load(), " ", operation);
  store->set(wait_key(state.description.rank), std::vector<uint8_t>(text.begin(), text.end()));
}

std::string cause_key(int64_t number) {
  return str("failure/cause/", number);
}

/// `cause`: what this rank saw itself; empty if it only heard of the others.
void sign(c10d::Store& store, const GroupDescription& group, const std::string& cause) {
  // Numbered, so that a reader need not ask every rank.
  if (!cause.empty()) {
    const auto number = store.add("failure/causes", 1);
    store.set(cause_key(number), str("rank ", group.global_ranks[group.rank], ": ", cause));
  }
  store.set(signature_key(group.rank), std::string("here"));
  store.set(kAnyFailure, std::vector<uint8_t>{1});
}

/// Those who failed a moment later than the rank that serves the store are still reading.
void linger_if_server(const GroupDescription& group) {
  if (group.global_ranks[group.rank] == 0) std::this_thread::sleep_for(kServerLinger);
}

struct Signatures {
  std::vector<int> missing;  // global ranks that have not signed
  bool is_complete = true;   // false: the store was lost while we read
};

/// Who has not signed by the end of the grace period; ends early once all have.
Signatures read_signatures(c10d::Store& store, const GroupDescription& group) {
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  std::vector<int> open = first_ranks(group.size);
  std::erase(open, group.rank);
  Signatures result;
  while (true) {
    try {
      std::erase_if(open, [&](int rank) { return store.check({signature_key(rank)}); });
    } catch (const std::exception&) {
      // Whoever serves the store has drawn its conclusions and left; what was read until now must do.
      result.is_complete = false;
    }
    // Nobody waits for a signature of the dead.
    const bool may_sign = std::any_of(open.begin(), open.end(), [&](int rank) { return !group.has_ended(rank); });
    if (!result.is_complete || !may_sign || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(kSignPoll);
  }
  for (const int rank : open) result.missing.push_back(group.global_ranks[rank]);
  return result;
}

/// ": rank 0: …; rank 2: …", or nothing: what those who signed saw themselves.
std::string causes_of_others(c10d::Store& store) {
  std::vector<std::string> causes;
  try {
    for (int number = 1; number <= kMostCauses && store.check({cause_key(number)}); ++number) {
      causes.push_back(store.get_to_str(cause_key(number)));
    }
    // NOLINTNEXTLINE(bugprone-empty-catch): the store is gone, but who is missing is known
  } catch (const std::exception&) {
  }
  return str(causes.empty() ? "" : ": ", join(causes, "; "));
}

}  // namespace

bool has_failure(GroupState& state) {
  const auto& store = state.description.store;
  return store && store->check({kAnyFailure});
}

void wait_unless_others_give_up(c10::ivalue::Future& future, GroupState& state,
                                const std::function<std::string()>& operation) {
  const auto completion = std::make_shared<Completion>();
  future.addCallback([completion](c10::ivalue::Future&) { completion->notify(); });
  bool is_shown = false;
  while (!completion->wait_for(kPollInterval)) {
    if (!std::exchange(is_shown, true)) show_wait(state, operation());
    // The one who gave up may be late itself: this rank's own transport has the last word if it just finished.
    if (has_failure(state) && !future.completed()) report_failure(state, operation(), "");
  }
}

std::optional<ShownWait> shown_wait_of(GroupState& state, int rank) {
  const auto& store = state.description.store;
  if (!store || !store->check({wait_key(rank)})) return std::nullopt;
  const auto text = store->get_to_str(wait_key(rank));
  return ShownWait{.launched = std::stoull(text), .operation = text.substr(text.find(' ') + 1)};
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

std::string first_line(const std::exception& error) {
  const auto text = message_of(error);
  return text.substr(0, text.find('\n'));
}

void check_usable(GroupState& state) {
  if (!state.has_failed.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(state.mutex);
  TORCH_CHECK_WITH(DistBackendError, state.failure.empty(), "[lockstep/comm] ", state.who(), ": group '",
                   state.description.name, "' can no longer be used. It failed earlier: ", state.failure);
}

void sign_out(GroupState& state, const std::string& reason) {
  const auto& group = state.description;
  if (!group.store) return;
  // Before the page says that somebody gave up: who reads that shall find out why.
  group.store->compareSet(kDeparture, std::vector<uint8_t>{}, std::vector<uint8_t>(reason.begin(), reason.end()));
  sign(*group.store, group, "");
  linger_if_server(group);
}

void report_failure(GroupState& state, const std::string& operation, const std::string& cause) {
  const auto& group = state.description;
  std::string verdict = "the group has no store to ask who is missing";
  std::string seen = cause.empty() ? "another rank gave up" : cause;
  if (group.store) {
    try {
      sign(*group.store, group, cause);
      const auto departure = group.store->check({kDeparture}) ? group.store->get_to_str(kDeparture) : "";
      const auto [missing, is_complete] = read_signatures(*group.store, group);
      verdict = missing.empty()
                    ? "every rank is alive, but gave up as well"
                    : str("rank ", join(missing, ", "), missing.size() == 1 ? " is" : " are", " gone, hung or late");
      if (!is_complete) {
        // If rank 0 signed, it served the store until it had drawn its own conclusions.
        const bool has_server_signed = std::find(missing.begin(), missing.end(), 0) == missing.end();
        verdict = has_server_signed ? verdict + " (as far as the store could say before it was gone)" : kStoreIsGone;
      }
      if (!departure.empty()) verdict = departure;
      if (cause.empty() && is_complete) seen += causes_of_others(*group.store);
      linger_if_server(group);
    } catch (const std::exception&) {
      verdict = kStoreIsGone;
    }
  }
  const auto text = str("[lockstep/comm] ", state.who(), ": ", operation, " on group '", group.name,
                        "' failed: ", verdict, ". Look there for an earlier error. Cause seen here: ", seen);
  {
    const std::lock_guard lock(state.mutex);
    if (state.failure.empty()) state.failure = text;
    state.has_failed = true;
  }
  throw c10::DistBackendError(text);
}

}  // namespace lockstep::detail
