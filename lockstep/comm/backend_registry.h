// Backends by name. Built in: "shm" (shared memory, and gloo between one rank per host), "gloo", "threads", and "nccl"
// where CMake found it. Others can be added before init().
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/backend_traits.h"

namespace lockstep {

/// What a backend is told about the group it serves.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // of this group and backend alone
  int rank = 0;
  int size = 1;
  std::string group_name;
  std::chrono::milliseconds timeout;
  /// Address of this host that the other ranks can reach; "127.0.0.1" if all ranks are on one host.
  std::string address;
  /// What the ranks are called in the world, for messages; empty if the group is the world.
  std::vector<int> global_ranks = {};
  /// Their processes, see process_home.h; empty if they are not known.
  std::vector<std::string> homes = {};
};

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
/// Makes this rank's end of a group. Collective over the group's ranks.
using BackendFactory = std::function<BackendPtr(const BackendRequest& request)>;

/// Adds a backend, or replaces the one of that name. `devices`: where its tensors may live. `traits`: what it can and
/// cannot do; without them, what the backend says of itself (traits_of()). Thread-safe.
void register_backend(const std::string& name, std::vector<c10::DeviceType> devices, BackendFactory factory,
                      std::optional<BackendTraits> traits = std::nullopt);

bool is_backend_registered(const std::string& name);

/// Makes a backend by name; refuses unknown names and lists the known ones.
BackendPtr make_backend(const std::string& name, const BackendRequest& request);

/// The traits stated when `name` was registered, if they were.
std::optional<BackendTraits> registered_traits(const std::string& name);

/// What one of our backends says of itself, or the traits registered under the name another goes by (getBackendName());
/// the defaults for an unknown one.
BackendTraits traits_of(const c10d::Backend& backend);

/// Parses Python's backend strings, "gloo" or "cpu:gloo,cuda:nccl", into device and backend names, in device order.
/// Refuses unknown backends, devices given twice, and devices a backend cannot serve.
std::vector<std::pair<c10::DeviceType, std::string>> parse_backend_spec(const std::string& spec);

}  // namespace lockstep
