#include "lockstep/rpc/shm_agent_directory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <map>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/group.h"
#include "lockstep/shm/errors.h"

namespace lockstep::rpc {
namespace {

constexpr auto kRefusalKey = "refusal";

/// Throws `problem`, after telling the workers that still wait.
[[noreturn]] void refuse_worker(c10d::Store& store, const ShmWorker& self, const std::string& problem) {
  store.set(kRefusalKey, problem);
  TORCH_CHECK(false, self.who(), ": ", problem);
}

/// Shows `value` under `prefix` and returns what all workers show, by id. `look` is told of each as it comes.
std::vector<std::string> collect_from_workers(c10d::Store& store, const ShmWorker& self, const std::string& prefix,
                                              const std::string& value, std::chrono::milliseconds timeout,
                                              const std::vector<std::string>& names,
                                              const std::function<void(int id, const std::string& value)>& look) {
  const auto key = [&](int id) { return str(prefix, "/", id); };
  store.set(key(self.id), value);
  std::vector<std::string> values(static_cast<std::size_t>(self.world_size));
  std::vector<int> missing;
  for (int id = 0; id < self.world_size; ++id) missing.push_back(id);
  const auto deadline = deadline_after(timeout);
  auto pause = std::chrono::milliseconds(1);
  // Asked again and again instead of waited for, so that a refusal is heard meanwhile.
  while (true) {
    std::erase_if(missing, [&](int id) {
      if (!store.check({key(id)})) return false;
      auto& shown = values[static_cast<std::size_t>(id)];
      shown = store.get_to_str(key(id));
      look(id, shown);
      return true;
    });
    if (missing.empty()) return values;
    if (store.check({kRefusalKey})) TORCH_CHECK(false, self.who(), ": ", store.get_to_str(kRefusalKey));
    if (std::chrono::steady_clock::now() > deadline) {
      std::vector<std::string> absent;
      for (const int id : missing) {
        absent.push_back(names.empty() ? str("id ", id)
                                       : str("'", names[static_cast<std::size_t>(id)], "' (id ", id, ")"));
      }
      TORCH_CHECK_WITH(DistBackendError, false, self.who(), ": starting RPC failed: worker ", join(absent, ", "),
                       " did not come within ", timeout.count(),
                       " ms. Look there for an earlier error, or raise the timeout.");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(50));
  }
}

}  // namespace

std::string ShmWorker::who() const {
  return str("[lockstep/rpc] worker '", name, "' (id ", id, " of ", world_size, ")");
}

std::vector<std::string> exchange_names(c10d::Store& store, const ShmWorker& self, std::chrono::milliseconds timeout) {
  if (store.add(str("came/", self.id), 1) > 1) {
    refuse_worker(store, self,
                  str("id ", self.id, " is used by two workers, one of them '", self.name,
                      "'. Give each worker an id of its own."));
  }
  // World size, host and name, which has no blanks.
  const auto mine = str(self.world_size, " ", host_id(), " ", self.name);
  std::map<std::string, int> ids;
  std::vector<std::string> names(static_cast<std::size_t>(self.world_size));
  collect_from_workers(store, self, "worker", mine, timeout, {}, [&](int id, const std::string& shown) {
    const auto first = shown.find(' ');
    const auto last = shown.rfind(' ');
    const auto size = shown.substr(0, first);
    const auto name = shown.substr(last + 1);
    if (size != std::to_string(self.world_size)) {
      refuse_worker(store, self,
                    str("worker '", name, "' (id ", id, ") has a world size of ", size, ", worker '", self.name,
                        "' (id ", self.id, ") one of ", self.world_size, ". Give all workers the same."));
    }
    const auto [found, is_new] = ids.emplace(name, id);
    if (!is_new) {
      refuse_worker(store, self,
                    str("the name '", name, "' is used by two workers, id ", std::min(found->second, id), " and id ",
                        std::max(found->second, id), ". Names must be unique."));
    }
    if (shown.substr(first + 1, last - first - 1) != host_id()) {
      refuse_worker(store, self,
                    str("worker '", name, "' (id ", id, ") is on another host than worker '", self.name, "' (id ",
                        self.id, "). Use the TensorPipe agent across hosts."));
    }
    names[static_cast<std::size_t>(id)] = name;
  });
  return names;
}

std::shared_ptr<shm::Team> meet_workers(c10d::Store& store, const ShmWorker& self,
                                        const std::vector<std::string>& names, std::chrono::milliseconds timeout) {
  int round = 0;
  const auto agree = [&](const std::string& word) {
    return collect_from_workers(
        store, self, str("agreed/", round++), word, timeout, names, [&](int id, const std::string& shown) {
          if (id == self.id || !shown.starts_with(shm::Team::kComplaint)) return;
          throw shm::PeerError(str(self.who(), ": starting RPC failed: worker '", names[static_cast<std::size_t>(id)],
                                   "' (id ", id, ") gave up: ", shown.substr(1)));
        })[0];
  };
  try {
    return shm::Team::of_processes({.rank = self.id, .size = self.world_size, .group = "rpc", .timeout = timeout},
                                   agree);
  } catch (const shm::PeerError& error) {
    throw c10::DistBackendError(error.what());
  } catch (const shm::MemoryError& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
}

}  // namespace lockstep::rpc
