// The environment a rank is started with. Same variables and meaning as torchrun's, so a C++ or Python program runs
// the same under either; one difference: rank 0 hosts the store, not the launcher. Pure functions.
#pragma once

#include <optional>
#include <string>

#include "lockstep/launch/child.h"

namespace lockstep {

struct LaunchLayout {
  int ranks_per_node = 1;
  int node_count = 1;
  int node_rank = 0;
  std::string master_host = "127.0.0.1";
  int master_port = 0;
  int restart_count = 0;
  int max_restarts = 0;
  std::string store_file = "";  // where ranks meet in place of a store that rank 0 serves; empty if they do not
  std::string run_id = "none";  // same on all nodes and for all restarts of a run

  int world_size() const { return ranks_per_node * node_count; }
  int rank(int local_rank) const { return node_rank * ranks_per_node + local_rank; }
};

/// What to change in the launcher's environment for one rank: sets RANK, WORLD_SIZE and their kin, and removes what
/// another launcher around this one may have left and a rank could mistake for its own.
/// Throws std::invalid_argument if `local_rank` or the layout is out of range.
EnvironmentChanges variables_for_rank(const LaunchLayout& layout, int local_rank);

/// How many OpenMP threads each rank should get, so that together they use each core once; nullopt to leave it alone,
/// as when the user has set OMP_NUM_THREADS or there is just one rank.
std::optional<int> omp_threads_per_rank(bool already_set, int ranks_per_node, int core_count);

/// Cores this process may run on (its affinity mask), at least 1.
int available_cores();

}  // namespace lockstep
