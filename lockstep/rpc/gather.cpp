// all_gather() and barrier() over workers: everybody calls the leader, which answers all when the last has called.
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <thread>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/session.h"

namespace lockstep::rpc {
namespace {

using Texts = std::map<std::string, std::string>;
constexpr std::chrono::milliseconds kWatchEvery(500);

/// One gathering, on the leader.
struct Gathering {
  Texts texts;
  Promise<Texts> all;
};

struct Gatherings {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Gathering>> by_key;  // until complete
  std::map<std::string, std::int64_t> rounds;                // how often this worker has gathered, by group
};

Gatherings& gatherings() {
  static auto* const all = new Gatherings;
  return *all;
}

/// The leader's part: the future completes with the last text.
Future<Texts> bring(const std::string& key, const std::string& worker, const std::string& text, std::int64_t count) {
  auto& all = gatherings();
  std::shared_ptr<Gathering> gathering;
  bool is_complete = false;
  {
    const std::lock_guard lock(all.mutex);
    auto& entry = all.by_key[key];
    if (!entry) entry = std::make_shared<Gathering>();
    gathering = entry;
    TORCH_CHECK(gathering->texts.emplace(worker, text).second, "worker '", worker, "' came twice");
    is_complete = static_cast<std::int64_t>(gathering->texts.size()) == count;
    if (is_complete) all.by_key.erase(key);
  }
  if (is_complete) gathering->all.set_value(gathering->texts);
  return gathering->all.future();
}

/// Who has come to an unfinished gathering. It stays: whoever is late finds those who have given up since.
std::vector<std::string> who_came(const std::string& key) {
  auto& all = gatherings();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  const auto found = all.by_key.find(key);
  if (found == all.by_key.end()) return names;
  for (const auto& [name, text] : found->second->texts) names.push_back(name);
  return names;
}

const auto bring_text = function("lockstep.gather", &bring);
const auto ask_who_came = function("lockstep.who_came", &who_came);

/// `watch` is called now and then while the others are waited for, and may throw.
Texts gather(const std::string& text, std::vector<std::string> workers, std::chrono::duration<float> timeout,
             const std::function<void(const std::vector<std::string>&)>& watch) {
  const auto agent = detail::current_agent("all_gather()");
  if (workers.empty()) {
    for (const auto& info : agent->getWorkerInfos()) workers.push_back(info.name_);
  }
  std::sort(workers.begin(), workers.end());
  workers.erase(std::unique(workers.begin(), workers.end()), workers.end());
  const auto own = worker_info().name_;
  TORCH_CHECK(std::find(workers.begin(), workers.end(), own) != workers.end(), "[lockstep/rpc] worker '", own,
              "' gathers among ", join(workers, ", "), " and is none of them.");
  const auto group = join(workers, ",");
  std::int64_t round = 0;
  {
    auto& all = gatherings();
    const std::lock_guard lock(all.mutex);
    round = all.rounds[group]++;
  }
  const auto key = str(group, "#", round);
  const Callee leader(workers.front());
  const auto count = static_cast<std::int64_t>(workers.size());
  try {
    if (!watch) return rpc_sync(leader.within(timeout), bring_text, key, own, text, count);
    const auto answer = rpc_async(leader.within(timeout), bring_text, key, own, text, count);
    auto pause = std::chrono::milliseconds(1);
    for (auto waited = pause; !answer.done(); waited += pause) {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(20));
      if (waited < kWatchEvery) continue;
      waited = {};
      watch(workers);
    }
    return answer.wait();
  } catch (const RemoteError& error) {
    if (error.kind() != RemoteError::Kind::kTimeout) throw;
    std::vector<std::string> missing;
    try {
      const auto came = rpc_sync(leader.within(std::chrono::seconds(5)), ask_who_came, key);
      std::set_difference(workers.begin(), workers.end(), came.begin(), came.end(), std::back_inserter(missing));
    } catch (const std::exception&) {
      missing = {str(workers.front(), " (which leads, and does not answer)")};
    }
    TORCH_CHECK(false, "[lockstep/rpc] worker '", own, "' waited ", timeout.count(), " s for ", join(missing, ", "),
                ", which did not come to all_gather() or barrier() ", round, " of ", join(workers, ", "), ".");
  }
}

/// Throws if one of the workers has gone.
void check_all_are_there(const std::vector<std::string>& workers) {
  std::vector<std::pair<std::string, Future<std::vector<std::string>>>> answers;
  for (const auto& worker : workers) {
    answers.emplace_back(worker, rpc_async(Callee(worker).within(std::chrono::seconds(10)), ask_who_came, "nothing"));
  }
  for (const auto& [worker, answer] : answers) {
    try {
      answer.wait();
    } catch (const RemoteError& error) {
      // One whose threads are all held says nothing, and is there.
      TORCH_CHECK(error.kind() != RemoteError::Kind::kConnection, "[lockstep/rpc] shutdown: worker '", worker,
                  "' has ended without shutdown(): ", error.what());
    }
  }
}

}  // namespace

Texts all_gather(const std::string& text, std::vector<std::string> workers, std::chrono::duration<float> timeout) {
  detail::current_agent("all_gather()");
  return gather(text, std::move(workers), timeout.count() > 0 ? timeout : rpc_timeout(), nullptr);
}

void barrier(std::vector<std::string> workers, std::chrono::duration<float> timeout) {
  all_gather("", std::move(workers), timeout);
}

namespace detail {

void meet_at_the_end(std::chrono::duration<float> timeout) {
  gather("", {}, std::max(timeout, std::chrono::duration<float>(0)), &check_all_are_there);
}

void forget_gatherings() {
  auto& all = gatherings();
  const std::lock_guard lock(all.mutex);
  all.rounds.clear();
  all.by_key.clear();
}

}  // namespace detail
}  // namespace lockstep::rpc
