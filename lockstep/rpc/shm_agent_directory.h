// How the workers of a host find each other through a store: who is called what, and the memory they share. Internal to
// rpc. Both are collective; what one worker finds wrong, all others that still wait are told.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/shm/team.h"

namespace lockstep::rpc {

struct ShmWorker {
  std::string name;
  int id = 0;
  int world_size = 1;

  /// "[lockstep/rpc] worker 'a' (id 0 of 2)".
  std::string who() const;
};

/// The names of all workers, by id. Throws if a name, an id or the world size does not fit, if a worker is on another
/// host, or naming who did not come in time.
std::vector<std::string> exchange_names(c10d::Store& store, const ShmWorker& self, std::chrono::milliseconds timeout);

/// Shared memory with all of them.
std::shared_ptr<shm::Team> meet_workers(c10d::Store& store, const ShmWorker& self,
                                        const std::vector<std::string>& names, std::chrono::milliseconds timeout);

}  // namespace lockstep::rpc
