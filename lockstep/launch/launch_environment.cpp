#include "lockstep/launch/launch_environment.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <thread>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

// Agent store: torchrun hosts the store itself and says so; here that would make every rank a client of nobody.
// Error file: belongs to the agent around us. Ended ranks: those of a job around this one. The rest: ranks as mpirun
// and srun number them.
constexpr const char* kForeign[] = {
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "LOCKSTEP_ENDED_DIR",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_NODE_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NODEID",
};

}  // namespace

EnvironmentChanges variables_for_rank(const LaunchLayout& layout, int local_rank) {
  if (layout.ranks_per_node < 1 || layout.node_count < 1 || layout.node_rank < 0 ||
      layout.node_rank >= layout.node_count || local_rank < 0 || local_rank >= layout.ranks_per_node) {
    throw std::invalid_argument(str("no local rank ", local_rank, " of ", layout.ranks_per_node, " on node ",
                                    layout.node_rank, " of ", layout.node_count));
  }
  EnvironmentChanges changes;
  for (const char* name : kForeign) changes[name] = std::nullopt;
  const auto set = [&](const char* name, const auto& value) { changes[name] = str(value); };
  set("RANK", layout.rank(local_rank));
  set("WORLD_SIZE", layout.world_size());
  set("LOCAL_RANK", local_rank);
  set("LOCAL_WORLD_SIZE", layout.ranks_per_node);
  set("GROUP_RANK", layout.node_rank);
  set("GROUP_WORLD_SIZE", layout.node_count);
  set("ROLE_NAME", "default");
  set("ROLE_RANK", layout.rank(local_rank));
  set("ROLE_WORLD_SIZE", layout.world_size());
  set("MASTER_ADDR", layout.master_host);
  set("MASTER_PORT", layout.master_port);
  set("TORCHELASTIC_RESTART_COUNT", layout.restart_count);
  set("TORCHELASTIC_MAX_RESTARTS", layout.max_restarts);
  set("TORCHELASTIC_RUN_ID", layout.run_id);
  set("LOCKSTEP_LAUNCHER", "lockstep-run");
  changes["LOCKSTEP_STORE_FILE"] = layout.store_file.empty() ? std::nullopt : std::optional(layout.store_file);
  set("LOCKSTEP_RESTART_COUNT", layout.restart_count);
  return changes;
}

std::optional<int> omp_threads_per_rank(bool already_set, int ranks_per_node, int core_count) {
  if (already_set || ranks_per_node <= 1) return std::nullopt;
  return std::max(1, core_count / ranks_per_node);
}

int available_cores() {
  // The mask of a big machine does not fit a cpu_set_t; the kernel then says EINVAL.
  for (int capacity = CPU_SETSIZE; capacity <= 1 << 16; capacity *= 2) {
    cpu_set_t* cores = CPU_ALLOC(capacity);
    if (cores == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(capacity);
    const int error = ::sched_getaffinity(0, bytes, cores) == 0 ? 0 : errno;
    const int count = error == 0 ? CPU_COUNT_S(bytes, cores) : 0;
    CPU_FREE(cores);
    if (count > 0) return count;
    if (error != EINVAL) break;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace lockstep
