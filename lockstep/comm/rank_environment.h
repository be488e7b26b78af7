// Who am I? Reads the variables that launchers set and says which rank this process is. Pure: no I/O beyond the
// Environment given.
//
// Families, first match wins: torchrun's and lockstep-run's variables (RANK, …), Open MPI's (OMPI_COMM_WORLD_RANK, …),
// Slurm's (SLURM_PROCID inside a step); none of them means alone. torchrun inside srun or mpirun is common, so families
// do not mix.
#pragma once

#include <string>

#include "lockstep/base/env.h"

namespace lockstep {

struct RankEnvironment {
  std::string launcher = "none";  // "lockstep-run", "torchrun", "environment", "mpirun", "slurm" or "none"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  /// False if nobody said which ranks share this host; local_rank and local_world_size are then guesses: rank and
  /// world_size.
  bool knows_hosts = true;
  int restart_count = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  // 0: nothing to meet at, because the world is one rank
  /// The launcher itself serves the store at master_addr:master_port, as torchrun does; then rank 0 must not.
  bool launcher_serves_store = false;
  /// Where lockstep-run tells how ranks of this host ended; empty if nobody does.
  std::string ended_dir = "";
};

/// Throws std::invalid_argument naming the variable if a family is half set or contradicts itself.
RankEnvironment detect_rank_environment(const Environment& environment = env);

namespace detail {

/// First host of a Slurm node list: "gpu[03-07,9],login1" gives "gpu03".
std::string first_slurm_host(const std::string& node_list);

/// Tasks on node `node` of Slurm's compressed form: "4(x2),3" is 4, 4, 3.
int slurm_tasks_on_node(const std::string& tasks_per_node, int node);

}  // namespace detail
}  // namespace lockstep
