// What Lockstep keeps for each group beside c10d's own: names, ranks, sequence numbers, and the store through which
// survivors of a failure find out who is missing. Internal to comm.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/group.h"

namespace lockstep::detail {

struct GroupDescription {
  c10::intrusive_ptr<c10d::Store> store;  // of this group alone
  int rank = 0;
  int size = 1;
  std::string name;
  std::vector<int> global_ranks;
  std::chrono::milliseconds timeout;
  std::string backend_spec = "";
  std::string address = "127.0.0.1";
};

struct GroupState {
  explicit GroupState(GroupDescription description) : description(std::move(description)) {}

  /// "rank 1 of 4": in the world's numbers where the group knows them.
  std::string who() const;

  // Fixed once the group is made.
  const GroupDescription description;
  std::map<c10::DeviceType, BackendPtr> backends = {};  // empty for groups that others made
  bool is_alone = false;                                // one rank, and no backend that wants to be asked

  std::atomic<uint64_t> next_sequence = 0;  // of collectives launched by this rank
  std::atomic<uint64_t> next_subgroup = 0;

  // Guarded by mutex.
  std::mutex mutex;
  std::string failure;  // why the group can no longer be used; empty while it can
};

/// The state of `group`, made on first use if c10d or somebody else made the group.
GroupState& state_of(const GroupPtr& group);

/// A group whose tensors on each device are served by the given backend. Local.
GroupPtr wrap_backends(const std::vector<std::pair<c10::DeviceType, BackendPtr>>& backends,
                       GroupDescription description);

/// Makes the backends named by description.backend_spec and wraps them. Collective over the group's ranks; ranks that
/// do not come within the timeout are named.
GroupPtr connect_group(GroupDescription description);

/// 0, 1, …, size-1.
std::vector<int> first_ranks(int size);

/// Shows `value` under `prefix`, waits until every rank has done so, and returns what they showed, by rank. Throws
/// c10::DistBackendError naming absent ranks.
std::vector<std::string> check_in(c10d::Store& store, const std::string& prefix, const std::string& what,
                                  const GroupDescription& group, const std::string& value = "here");

}  // namespace lockstep::detail
