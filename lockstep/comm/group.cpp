#include "lockstep/comm/group.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <thread>
#include <typeinfo>
#include <unordered_map>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/absent_ranks.h"
#include "lockstep/comm/builtin_backends.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/process_home.h"
#include "lockstep/comm/threads/thread_backend.h"

namespace lockstep {
namespace detail {
namespace {

/// A c10d group that carries our state, so that the two live and die together.
class StatefulGroup final : public c10d::ProcessGroup {
 public:
  explicit StatefulGroup(GroupDescription description)
      : ProcessGroup(description.store, description.rank, description.size), state(std::move(description)) {}

  GroupState state;
};

/// States of groups made by others. Entries of groups that are gone are dropped when a new one comes.
struct ForeignStates {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::unique_ptr<GroupState> state;
  };
  std::mutex mutex;
  std::unordered_map<c10d::ProcessGroup*, Entry> entries;
};

GroupState& foreign_state(const GroupPtr& group) {
  static ForeignStates& all = *new ForeignStates;
  const std::lock_guard lock(all.mutex);
  const auto found = all.entries.find(group.get());
  if (found != all.entries.end() && !found->second.group.expired()) return *found->second.state;
  std::erase_if(all.entries, [](const auto& item) { return item.second.group.expired(); });
  auto state = std::make_unique<GroupState>(GroupDescription{
      .store = group->getStore() ? c10::make_intrusive<c10d::PrefixStore>("lockstep", group->getStore()) : nullptr,
      .rank = group->getRank(),
      .size = group->getSize(),
      .name = group->getBackendName(),
      .global_ranks = first_ranks(group->getSize()),
      .timeout = kProcessGroupDefaultTimeout,
  });
  auto& entry =
      all.entries
          .insert_or_assign(group.get(),
                            ForeignStates::Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), std::move(state)})
          .first->second;
  return *entry.state;
}

c10d::ProcessGroup::BackendType backend_type(const c10d::Backend& backend) {
  return c10d::ProcessGroup::strToBackendType(backend.getBackendName());
}

}  // namespace

bool GroupDescription::has_ended(int of_rank) const {
  return !homes.empty() && is_gone(homes.at(static_cast<std::size_t>(of_rank)));
}

std::string GroupState::who() const {
  const int mine = description.global_ranks.at(description.rank);
  if (description.name == "world") return str("rank ", mine, " of ", description.size);
  return str("rank ", mine, " (", description.rank, " of ", description.size, " in group '", description.name, "')");
}

GroupState& state_of(const GroupPtr& group) {
  check_member(group);
  // The class is final, so this is dynamic_cast, only quicker.
  auto& any = *group;
  if (typeid(any) == typeid(StatefulGroup)) return static_cast<StatefulGroup&>(any).state;
  return foreign_state(group);
}

ServingBackend::ServingBackend(c10d::Backend& backend)
    : backend(&backend), ours(dynamic_cast<CallBackend*>(&backend)), traits(traits_of(backend)) {}

// Groups that others made are looked up each time: c10d may be given another backend for a device at any time.
ServingBackend backend_for(const GroupPtr& group, const GroupState& state, c10::DeviceType device, const Call& what) {
  if (const auto found = state.backends.find(device); found != state.backends.end()) return found->second;
  TORCH_CHECK(serves_device(group, device), "[lockstep/comm] ", state.who(), ": ", what.describe(), " on group '",
              state.description.name, "': the group has no backend for ", c10::DeviceTypeName(device, true), " tensors",
              device == at::kMeta
                  ? ", which have no memory. Call materialize_module() first if they were made inside of "
                    "deferred_init."
                  : "");
  return ServingBackend(*group->getBackend(device));
}

ServingBackend barrier_backend(const GroupPtr& group, const GroupState& state) {
  if (!state.backends.empty()) return state.backends.at(state.first_device);
  return ServingBackend(*group->getDefaultBackend());
}

std::vector<int> first_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

GroupPtr wrap_backends(const std::vector<std::pair<c10::DeviceType, BackendPtr>>& backends,
                       GroupDescription description) {
  const auto name = description.name;
  auto group = c10::make_intrusive<StatefulGroup>(std::move(description));
  auto& state = group->state;
  for (const auto& [device, backend] : backends) {
    state.owned_backends.push_back(backend);
    state.backends.try_emplace(device, *backend);
  }
  state.first_device = backends.at(0).first;
  state.is_alone =
      group->getSize() == 1 && std::all_of(state.backends.begin(), state.backends.end(),
                                           [](const auto& each) { return each.second.traits.is_idle_alone; });
  group->setDefaultBackend(backend_type(*backends.at(0).second));
  for (const auto& [device, backend] : backends) group->setBackend(device, backend_type(*backend), backend);
  group->setGroupName(name);
  return group;
}

std::vector<std::string> check_in(c10d::Store& store, const std::string& prefix, const std::string& what,
                                  const GroupDescription& group, const std::string& value) {
  const std::function<std::string(int)> key = [&](int rank) { return str(prefix, "/", rank); };
  store.set(key(group.rank), value);
  std::vector<std::string> keys;
  for (int rank = 0; rank < group.size; ++rank) keys.push_back(key(rank));
  const auto failed = str("[lockstep/comm] rank ", group.global_ranks[group.rank], ": ", what, " failed: ");
  const auto deadline = deadline_after(group.timeout);
  // Asked again and again instead of waited for: a rank thread must notice when another one failed, everybody when the
  // store did, and a wait that times out would be logged as an error by TCPStore.
  auto pause = std::chrono::milliseconds(1);
  AbsenceWatch watch(store, group, what, key);
  std::vector<int> absent;
  std::string ended;
  try {
    while (!store.check(keys)) {
      ThreadRun::current()->throw_if_aborted(failed);
      ended = watch.look();
      if (!ended.empty()) break;
      if (std::chrono::steady_clock::now() > deadline) {
        absent = watch.absent();
        break;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
  } catch (const PeerFailure&) {
    throw;
  } catch (const std::exception& error) {
    throw c10::DistBackendError(
        str(failed, "the store is gone, and with it the rank that served it (", first_line(error), ")"));
  }
  TORCH_CHECK_WITH(DistBackendError, ended.empty(), failed, ended, ". Look there for the reason.");
  TORCH_CHECK_WITH(DistBackendError, absent.empty(), failed, "rank ", join(absent, ", "), " did not come within ",
                   group.timeout.count(), " ms. Look there for an earlier error, or raise the timeout.");
  std::vector<std::string> values;
  for (const auto& each : keys) values.push_back(store.get_to_str(each));
  return values;
}

GroupPtr connect_group(GroupDescription description) {
  const auto specs = parse_backend_spec(description.backend_spec);
  const bool is_alone = description.size == 1 && env("LOCKSTEP_CONNECT_ALONE").value_or("0") != "1";
  if (description.size > 1) {
    description.homes = check_in(*description.store, "check_in", str("making group '", description.name, "'"),
                                 description, process_home());
  }
  std::vector<std::pair<c10::DeviceType, BackendPtr>> backends;
  std::map<std::string, BackendPtr> made;
  for (const auto& [device, name] : specs) {
    auto& backend = made[name];
    if (!backend) {
      // A lone rank talks to nobody, whatever the backend: no sockets, no communicator.
      backend = make_backend(is_alone ? "threads" : name,
                             {.store = c10::make_intrusive<c10d::PrefixStore>(name, description.store),
                              .rank = description.rank,
                              .size = description.size,
                              .group_name = description.name,
                              .timeout = description.timeout,
                              .address = description.address,
                              .global_ranks = description.global_ranks,
                              .homes = description.homes});
    }
    backends.emplace_back(device, backend);
  }
  auto group = wrap_backends(backends, std::move(description));
  if (is_alone) return group;
  for (const auto& [device, name] : specs) {
    if (const auto stated = registered_traits(name)) state_of(group).backends.at(device).traits = *stated;
  }
  return group;
}

BackendPtr make_thread_backend(const BackendRequest& request) {
  static std::atomic<uint64_t> next_hub = 0;
  const std::string mine = str("hub-", ::getpid(), "-", next_hub++);
  std::string key = mine;
  if (request.size > 1) {
    if (request.rank == 0) request.store->set("hub", std::vector<uint8_t>(mine.begin(), mine.end()));
    const auto shared = request.store->get("hub");
    key.assign(shared.begin(), shared.end());
    TORCH_CHECK(key.starts_with(str("hub-", ::getpid(), "-")),
                "[lockstep/comm] backend 'threads' joins ranks that are threads of one process; these are several "
                "processes. Use gloo.");
  }
  return c10::make_intrusive<ThreadBackend>(key, request.rank, request.size, request.group_name, request.timeout);
}

}  // namespace detail

void check_member(const GroupPtr& group) {
  TORCH_CHECK(group,
              "[lockstep/comm] the group is null: this rank is not part of it. Ask if (group) first, or leave the "
              "group out to use the default one.");
}

std::vector<int> global_ranks(const GroupPtr& group) {
  return detail::state_of(group).description.global_ranks;
}

std::string group_name(const GroupPtr& group) {
  return detail::state_of(group).description.name;
}

std::chrono::milliseconds group_timeout(const GroupPtr& group) {
  return detail::state_of(group).description.timeout;
}

bool serves_device(const GroupPtr& group, c10::DeviceType device) {
  if (detail::state_of(group).backends.contains(device)) return true;
  const auto served = group->getDeviceTypes();
  return std::any_of(served.begin(), served.end(), [&](const c10::Device& each) { return each.type() == device; });
}

std::string backend_spec(const GroupPtr& group) {
  return detail::state_of(group).description.backend_spec;
}

GroupPtr new_group(const GroupPtr& parent, const std::vector<int>& ranks, const GroupOptions& options) {
  return new_subgroups(parent, {ranks}, options);
}

GroupPtr new_group(const std::vector<int>& ranks, const GroupOptions& options) {
  return new_group(default_group(), ranks, options);
}

GroupPtr new_subgroups(const GroupPtr& parent, const std::vector<std::vector<int>>& ranks_per_group,
                       const GroupOptions& options) {
  auto& state = detail::state_of(parent);
  const auto& from = state.description;
  std::set<int> seen;
  for (const auto& ranks : ranks_per_group) {
    TORCH_CHECK(!ranks.empty(), "[lockstep/comm] ", state.who(), ": a new group needs at least one rank");
    for (const int rank : ranks) {
      TORCH_CHECK(rank >= 0 && rank < from.size, "[lockstep/comm] ", state.who(), ": new group: rank ", rank,
                  " is not in group '", from.name, "' of ", from.size);
      TORCH_CHECK(seen.insert(rank).second, "[lockstep/comm] ", state.who(), ": new group: rank ", rank,
                  " is named twice");
    }
  }
  // Also on ranks that will not be members: all refuse, or none.
  if (!options.backend.empty()) parse_backend_spec(options.backend);
  TORCH_CHECK(from.store, "[lockstep/comm] ", state.who(), ": group '", from.name,
              "' has no store, so no group can be made from it. Make it with lockstep::init().");
  // Same on all ranks of the parent, members or not, because all make the same calls.
  const auto number = state.next_subgroup++;
  GroupPtr mine;
  for (std::size_t i = 0; i < ranks_per_group.size(); ++i) {
    const auto& ranks = ranks_per_group[i];
    const auto found = std::find(ranks.begin(), ranks.end(), from.rank);
    if (found == ranks.end()) continue;
    const auto name = options.name.empty() ? str(from.name, "/", number, ".", i) : options.name;
    detail::GroupDescription description{
        .store = c10::make_intrusive<c10d::PrefixStore>(str("group/", number, "/", i), from.store),
        .rank = static_cast<int>(found - ranks.begin()),
        .size = static_cast<int>(ranks.size()),
        .name = name,
        .global_ranks = detail::picked(from.global_ranks, ranks),
        .timeout = options.timeout.count() > 0 ? options.timeout : from.timeout,
        .backend_spec = options.backend.empty() ? from.backend_spec : options.backend,
        .address = from.address,
        .ended_dir = from.ended_dir,
        .homes = detail::picked(from.homes, ranks),
    };
    mine = detail::connect_group(std::move(description));
  }
  return mine;
}

std::string host_id() {
  if (const auto given = env("LOCKSTEP_HOST_ID")) return *given;
  // Once: a process that has run out of descriptors later is still on the same machine.
  static const std::string boot = [] {
    std::string id;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
    return id;
  }();
  // Ranks in different network namespaces of one machine can meet only through the network, like ranks on two hosts.
  struct stat net_namespace = {};
  ::stat("/proc/self/ns/net", &net_namespace);
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return str(name, "/", boot, "/", net_namespace.st_ino);
}

std::vector<int> host_numbers(const GroupPtr& group) {
  const auto ids = all_gather_object(host_id(), group);
  std::vector<std::string> known;
  std::vector<int> numbers;
  for (const auto& id : ids) {
    const auto found = std::find(known.begin(), known.end(), id);
    numbers.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(id);
  }
  return numbers;
}

GroupPtr new_host_group(const GroupPtr& parent, const GroupOptions& options) {
  const auto numbers = host_numbers(parent);
  std::vector<std::vector<int>> hosts(*std::max_element(numbers.begin(), numbers.end()) + 1);
  for (int rank = 0; rank < static_cast<int>(numbers.size()); ++rank) hosts[numbers[rank]].push_back(rank);
  return new_subgroups(parent, hosts, options);
}

}  // namespace lockstep
