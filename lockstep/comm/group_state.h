// What Lockstep keeps for each group beside c10d's own: names, ranks, sequence numbers, and the store through which
// survivors of a failure find out who is missing. Internal to comm.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/call_backend.h"
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
  std::string ended_dir = "";           // see RankEnvironment
  std::vector<std::string> homes = {};  // by rank, see process_home.h; empty until they are known
  /// Where survivors of this group, and of those made after its failures, meet: null for a first one, whose own store
  /// it is.
  c10::intrusive_ptr<c10d::Store> survivors_meet_at = nullptr;
  int generation = 0;  // failures before it

  /// Whether the process of this rank is known to have ended; see process_home.h.
  bool has_ended(int of_rank) const;
};

/// Of these ranks, what `by_rank` has; nothing if it has nothing at all.
template <class Value>
std::vector<Value> picked(const std::vector<Value>& by_rank, const std::vector<int>& ranks) {
  std::vector<Value> values;
  for (const int rank : ranks) {
    if (!by_rank.empty()) values.push_back(by_rank.at(static_cast<std::size_t>(rank)));
  }
  return values;
}

/// A backend of a group, which keeps it alive, with what launch() asks of it.
struct ServingBackend {
  explicit ServingBackend(c10d::Backend& backend);

  c10d::Backend* backend;
  CallBackend* ours;  // the same, if it is one of ours
  BackendTraits traits;
};

struct GroupState {
  explicit GroupState(GroupDescription description) : description(std::move(description)) {}

  /// "rank 1 of 4": in the world's numbers where the group knows them.
  std::string who() const;

  // Fixed once the group is made.
  const GroupDescription description;
  std::vector<BackendPtr> owned_backends = {};              // c10d keeps one of a kind it does not know, we several
  std::map<c10::DeviceType, ServingBackend> backends = {};  // looked up once; empty for groups that others made
  c10::DeviceType first_device = c10::kCPU;                 // of those, the one whose backend does barriers
  bool is_alone = false;                                    // one rank, and no backend that wants to be asked

  std::atomic<uint64_t> next_sequence = 0;  // of collectives launched by this rank
  std::atomic<uint64_t> next_subgroup = 0;
  std::atomic<uint64_t> refusals = 0;  // see announce_refusal()

  std::atomic<bool> has_failed = false;  // failure is set

  // Guarded by mutex.
  std::mutex mutex;
  std::string failure;                                        // why the group can no longer be used; empty while it can
  std::unordered_map<c10::Device, c10::Stream> streams = {};  // the group's own, see stream_launch.h
};

/// The state of `group`, made on first use if c10d or somebody else made the group.
GroupState& state_of(const GroupPtr& group);

/// Who serves tensors of `device` in `group`; refuses if nobody does, with `what` in the message.
ServingBackend backend_for(const GroupPtr& group, const GroupState& state, c10::DeviceType device, const Call& what);
/// Who does the group's barriers.
ServingBackend barrier_backend(const GroupPtr& group, const GroupState& state);

/// A group whose tensors on each device are served by the given backend. Local.
GroupPtr wrap_backends(const std::vector<std::pair<c10::DeviceType, BackendPtr>>& backends,
                       GroupDescription description);

/// Makes the backends named by description.backend_spec and wraps them. Collective over the group's ranks; ranks that
/// do not come within the timeout are named.
GroupPtr connect_group(GroupDescription description);

/// 0, 1, …, size-1.
std::vector<int> first_ranks(int size);

/// Shows `value` under `prefix`, waits until every rank has done so, and returns what they showed, by rank. Throws
/// c10::DistBackendError naming absent ranks, at once if they are known to have ended.
std::vector<std::string> check_in(c10d::Store& store, const std::string& prefix, const std::string& what,
                                  const GroupDescription& group, const std::string& value = "here");

}  // namespace lockstep::detail
