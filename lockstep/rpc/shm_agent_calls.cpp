// Calls under way and who watches over them, and what all workers do together.
#include <poll.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/rpc/shm_agent_envelope.h"

namespace lockstep::rpc {
namespace {

std::chrono::steady_clock::time_point end_of(std::chrono::milliseconds limit) {
  return limit.count() > 0 ? deadline_after(limit) : kNever;
}

}  // namespace

void ShmAgent::add_call(uint64_t call, const FuturePtr& future, int peer, std::chrono::milliseconds limit) {
  bool is_soon = false;
  {
    const std::lock_guard lock(calls_mutex_);
    TORCH_CHECK(!are_calls_closed_, who(), ": RPC has been shut down");
    begun_calls_.fetch_add(1);
    auto& added = calls_[call];
    added.future = future;
    added.peer = peer;
    added.limit = limit;
    if (limit.count() > 0) {
      const auto end = deadline_after(limit);
      added.deadline = deadlines_.emplace_hint(deadlines_.end(), end, call);
      added.has_deadline = true;
      is_soon = end < watched_until_;
      if (is_soon) watched_until_ = end;
    }
  }
  if (is_soon) wake_watcher();
}

/// Null if it is over, or another peer's.
ShmAgent::FuturePtr ShmAgent::remove_call(uint64_t call, int peer) {
  const std::lock_guard lock(calls_mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end() || found->second.peer != peer) return {};
  auto future = std::move(found->second.future);
  if (found->second.has_deadline) deadlines_.erase(found->second.deadline);
  calls_.erase(found);
  return future;
}

void ShmAgent::fail_calls(int peer, const std::string& why) {
  std::vector<Task> failed;
  {
    const std::lock_guard lock(calls_mutex_);
    if (peer < 0) are_calls_closed_ = true;
    for (auto each = calls_.begin(); each != calls_.end();) {
      auto& call = each->second;
      if (peer >= 0 && call.peer != peer) {
        ++each;
        continue;
      }
      if (call.has_deadline) deadlines_.erase(call.deadline);
      failed.push_back({.peer = call.peer,
                        .call = each->first,
                        .message = {},
                        .block = {},
                        .future = std::move(call.future),
                        .error = why});
      each = calls_.erase(each);
    }
  }
  for (auto& task : failed) add_task(std::move(task));
}

/// A call of mine is over, and so is what its callbacks did.
void ShmAgent::count_end() {
  if (ended_calls_.fetch_add(1) + 1 != begun_calls_.load()) return;
  const std::lock_guard lock(rounds_mutex_);
  rounds_changed_.notify_all();
}

void ShmAgent::wake_watcher() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(watcher_bell_.get(), &one, sizeof(one));
}

void ShmAgent::watch() {
  std::vector<pollfd> watched = {{.fd = watcher_bell_.get(), .events = POLLIN, .revents = 0}};
  std::vector<Peer*> peers = {nullptr};
  for (const auto& peer : peers_) {
    const int lifeline = team_->lifeline(peer->info.id_);
    if (lifeline < 0) continue;
    watched.push_back({.fd = lifeline, .events = 0, .revents = 0});
    peers.push_back(peer.get());
  }
  while (!is_over_.load()) {
    std::vector<Task> expired;
    int pause = -1;
    {
      const std::lock_guard lock(calls_mutex_);
      const auto now = Clock::now();
      while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
        const auto call = deadlines_.begin()->second;
        deadlines_.erase(deadlines_.begin());
        const auto found = calls_.find(call);
        const auto limit = found->second.limit.count();
        const auto text = str("[lockstep/rpc] worker '", workerInfo_.name_, "' (id ", workerInfo_.id_,
                              "): the call to ", name_of(*peers_[peer_place(found->second.peer)]),
                              " had no answer within ", limit, " ms. RPC ran for more than set timeout (", limit,
                              " ms) and will now be marked with an error. Give it more time if it needs it.");
        expired.push_back(
            {.peer = found->second.peer,
             .call = call,
             .message = {},
             .block = {},
             .future = std::move(found->second.future),
             .error = torch::distributed::rpc::makeRPCError(text, torch::distributed::rpc::RPCErrorType::TIMEOUT)});
        calls_.erase(found);
      }
      watched_until_ = deadlines_.empty() ? kNever : deadlines_.begin()->first;
      if (watched_until_ != kNever) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(watched_until_ - now).count();
        pause = static_cast<int>(std::min<int64_t>(left, std::numeric_limits<int>::max()));
      }
    }
    for (auto& task : expired) add_task(std::move(task));
    if (::poll(watched.data(), watched.size(), pause) <= 0) continue;
    if (watched[0].revents != 0) {
      uint64_t rings = 0;
      [[maybe_unused]] const auto got = ::read(watcher_bell_.get(), &rings, sizeof(rings));
    }
    for (std::size_t i = watched.size() - 1; i > 0; --i) {
      if ((watched[i].revents & (POLLHUP | POLLERR)) == 0) continue;
      peers[i]->has_ended.store(true);
      mailbox_.ring(workerInfo_.id_);
      watched.erase(watched.begin() + static_cast<std::ptrdiff_t>(i));
      peers.erase(peers.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

/// The sum over all workers. Throws naming who is over or late.
int64_t ShmAgent::exchange(int64_t count, Clock::time_point deadline, const char* what) {
  const auto round = next_round_++;
  for (const auto& peer : peers_) {
    if (peer->info.id_ == workerInfo_.id_) continue;
    try {
      post(*peer, {.kind = EnvelopeKind::kRound, .number = round, .count = count}, nullptr);
    } catch (const PeerIsOver& error) {
      TORCH_CHECK_WITH(DistBackendError, false, error.what(), ", so ", what, " of all workers is not possible");
    }
  }
  std::unique_lock lock(rounds_mutex_);
  auto& counts = rounds_[round];
  const auto missing = [&] {
    std::vector<int> ids;
    for (const auto& peer : peers_) {
      const int id = peer->info.id_;
      if (id != workerInfo_.id_ && !counts.contains(id)) ids.push_back(id);
    }
    return ids;
  };
  const auto is_hopeless = [&] {
    const auto ids = missing();
    return std::any_of(ids.begin(), ids.end(), [&](int id) { return over_.contains(id); });
  };
  const auto is_done = [&] { return missing().empty() || is_hopeless() || is_over_.load(); };
  // Of the condition variable's clock, whose end is nearer.
  if (deadline == kNever) {
    rounds_changed_.wait(lock, is_done);
  } else {
    rounds_changed_.wait_until(lock, deadline, is_done);
  }
  for (const int id : missing()) {
    if (!over_.contains(id)) continue;
    TORCH_CHECK_WITH(DistBackendError, false, over_.at(id), ", so ", what, " of all workers is not possible");
  }
  std::vector<std::string> late;
  for (const int id : missing()) late.push_back(name_of(*peers_[peer_place(id)]));
  TORCH_CHECK_WITH(DistBackendError, late.empty(), who(), ": ", what, " timed out: ", lockstep::join(late, ", "),
                   " did not come. They have calls under way, or do not call it.");
  int64_t sum = count;
  for (const auto& [id, each] : counts) sum += each;
  rounds_.erase(round);
  return sum;
}

void ShmAgent::sync() {
  exchange(0, end_of(getRpcTimeout()), "sync()");
}

void ShmAgent::join(bool, float timeout_seconds) {
  const auto deadline = end_of(limit_of(timeout_seconds));
  while (true) {
    {
      std::unique_lock lock(rounds_mutex_);
      const auto is_idle = [&] { return active_calls() == 0; };
      if (deadline == kNever) {
        rounds_changed_.wait(lock, is_idle);
      } else {
        rounds_changed_.wait_until(lock, deadline, is_idle);
      }
      TORCH_CHECK_WITH(DistBackendError, is_idle(), who(), ": join() timed out: ", active_calls(),
                       " of this worker's calls are under way. Wait for their futures first, or give it more time.");
    }
    const auto first = next_round_;
    try {
      // Between the rounds at least as many calls have ended as were counted before, and at most as many have begun as
      // are counted after: if these are the same number, none was under way then, and none is there to begin another.
      const auto ended = exchange(ended_calls_.load(), deadline, "join()");
      if (exchange(begun_calls_.load(), deadline, "join()") == ended) return;
    } catch (...) {
      next_round_ = first;  // whoever tries again means the same rounds
      throw;
    }
  }
}

}  // namespace lockstep::rpc
