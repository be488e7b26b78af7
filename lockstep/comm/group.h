// Process groups: how they are made from ranks, hosts and backends. A group is a c10d::ProcessGroup, so anything
// written for libtorch takes it; groups made here also know their name, their ranks in the world and how to report a
// failure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lockstep {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The default group, init()'s; refuses if init() was not called. What functions use that are given no group.
GroupPtr default_group();

struct GroupOptions {
  std::string backend = "";              // empty: the parent's
  std::chrono::milliseconds timeout{0};  // zero: the parent's
  std::string name = "";                 // empty: chosen; must be the same on all ranks
};

/// Makes a group of some ranks of `parent`. Collective: every rank of `parent` calls it, in the same order, with the
/// same ranks. `ranks` are ranks of `parent`, and rank i of the new group is ranks[i]. Returns null on ranks that are
/// not in it. Refuses an empty list, repeated ranks and ranks outside `parent`.
GroupPtr new_group(const GroupPtr& parent, const std::vector<int>& ranks, const GroupOptions& options = {});
/// Of ranks of the default group.
GroupPtr new_group(const std::vector<int>& ranks, const GroupOptions& options = {});

/// Divides `parent` into groups and returns the one this rank is in, null if in none. Collective over `parent`;
/// the lists must be disjoint and the same on all ranks.
GroupPtr new_subgroups(const GroupPtr& parent, const std::vector<std::vector<int>>& ranks_per_group,
                       const GroupOptions& options = {});

/// The group of the ranks on this host. Collective over `parent`. Hosts are told apart by host_id().
GroupPtr new_host_group(const GroupPtr& parent = default_group(), const GroupOptions& options = {});

/// For every rank of `group`, in rank order, the number of its host; hosts are numbered by their first rank.
/// Collective.
std::vector<int> host_numbers(const GroupPtr& group = default_group());

/// Identifies this machine to others: boot and network namespace, or LOCKSTEP_HOST_ID if set.
std::string host_id();

/// Ranks in the world of the group's members, in group order. Local. For a foreign c10d group: 0 to size-1.
std::vector<int> global_ranks(const GroupPtr& group = default_group());

/// The group's name, "world" for the default one. Local.
std::string group_name(const GroupPtr& group = default_group());

/// The timeout of the group's operations. Local.
std::chrono::milliseconds group_timeout(const GroupPtr& group = default_group());

/// Throws if the group is null, which new_group() returns on ranks that are not in it. Local.
void check_member(const GroupPtr& group);

/// Whether the group can move tensors that live on `device`. Local.
bool serves_device(const GroupPtr& group, c10::DeviceType device);

/// "gloo" or "cpu:gloo,cuda:nccl": a string new_group() takes. Local.
std::string backend_spec(const GroupPtr& group = default_group());

}  // namespace lockstep
