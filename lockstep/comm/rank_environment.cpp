#include "lockstep/comm/rank_environment.h"

#include <cstdint>
#include <stdexcept>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw std::invalid_argument(
      str("[lockstep/comm] cannot tell this process's rank: ", problem,
          ". Start it with lockstep-run, torchrun, mpirun or srun, or unset these variables to run alone."));
}

/// Reads integers of one family; remembers which variable gave each, so that errors can name it.
class Family {
 public:
  explicit Family(const Environment& environment) : environment_(environment) {}

  bool has(const std::string& name) const { return environment_(name).has_value(); }

  int require(const std::string& name, const std::string& because_of) const {
    const auto value = read(name);
    if (!value) refuse(str(because_of, " is set, but ", name, " is not"));
    return *value;
  }

  int get(const std::string& name, int otherwise) const { return read(name).value_or(otherwise); }

  std::optional<int> read(const std::string& name) const {
    try {
      const auto value = env_integer(environment_, name);
      if (!value) return std::nullopt;
      if (*value < 0 || *value > INT32_MAX) refuse(str(name, "=", *value, " is out of range"));
      return static_cast<int>(*value);
    } catch (const std::invalid_argument& error) {
      if (std::string(error.what()).starts_with("[lockstep")) throw;
      refuse(error.what());
    }
  }

 private:
  const Environment& environment_;
};

void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (limit < 1) refuse(str(limit_name, "=", limit, " must be at least 1"));
  if (value >= limit) refuse(str(name, "=", value, " is not below ", limit_name, "=", limit));
}

/// A port below the ephemeral range that every rank of a job derives alike from the job's identity.
int port_from(const std::string& identity) {
  std::uint32_t hash = 2166136261U;
  for (const char c : identity) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return 20000 + static_cast<int>(hash % 12000);
}

RankEnvironment from_torch_variables(const Environment& environment) {
  const Family family(environment);
  RankEnvironment result;
  result.rank = family.require("RANK", "WORLD_SIZE");
  result.world_size = family.require("WORLD_SIZE", "RANK");
  check_below("RANK", result.rank, "WORLD_SIZE", result.world_size);

  const auto local_rank = family.read("LOCAL_RANK");
  const auto local_world_size = family.read("LOCAL_WORLD_SIZE");
  if (local_world_size && !local_rank && *local_world_size > 1) {
    refuse("LOCAL_WORLD_SIZE is set, but LOCAL_RANK is not");
  }
  result.knows_hosts = local_world_size.has_value() || result.world_size == 1;
  result.local_rank = local_rank.value_or(local_world_size ? 0 : result.rank);
  result.local_world_size = local_world_size.value_or(result.world_size);
  check_below("LOCAL_RANK", result.local_rank, "LOCAL_WORLD_SIZE", result.local_world_size);
  check_below("LOCAL_WORLD_SIZE", result.local_world_size - 1, "WORLD_SIZE", result.world_size);

  if (environment("LOCKSTEP_LAUNCHER")) {
    result.launcher = "lockstep-run";
    result.ended_dir = environment("LOCKSTEP_ENDED_DIR").value_or("");
  } else if (environment("TORCHELASTIC_RUN_ID")) {
    result.launcher = "torchrun";
  } else {
    result.launcher = "environment";
  }
  result.restart_count = family.get("TORCHELASTIC_RESTART_COUNT", 0);
  result.launcher_serves_store = environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  const auto address = environment("MASTER_ADDR");
  const auto port = family.read("MASTER_PORT");
  if (address && !port) refuse("MASTER_ADDR is set, but MASTER_PORT is not");
  if (port && !address) refuse("MASTER_PORT is set, but MASTER_ADDR is not");
  if (result.world_size > 1 && !address) refuse(str("WORLD_SIZE=", result.world_size, ", but MASTER_ADDR is not set"));
  if (port && (*port < 1 || *port > 65535)) refuse(str("MASTER_PORT=", *port, " is not a port"));
  if (address) result.master_addr = *address;
  result.master_port = port.value_or(0);
  return result;
}

/// Open MPI and Slurm place ranks but provide no meeting point; MASTER_ADDR and MASTER_PORT override what is derived.
void choose_meeting_point(const Environment& environment, const std::string& job_identity,
                          const std::string& first_host, RankEnvironment& result) {
  if (result.world_size == 1) return;
  const Family family(environment);
  if (const auto address = environment("MASTER_ADDR")) {
    result.master_addr = *address;
  } else if (!first_host.empty()) {
    result.master_addr = first_host;
  } else if (result.local_world_size != result.world_size) {
    refuse("the ranks are on several hosts, but MASTER_ADDR is not set");
  }
  result.master_port = family.get("MASTER_PORT", port_from(job_identity));
  if (result.master_port < 1 || result.master_port > 65535)
    refuse(str("MASTER_PORT=", result.master_port, " is not a port"));
}

RankEnvironment from_open_mpi(const Environment& environment) {
  const Family family(environment);
  RankEnvironment result;
  result.launcher = "mpirun";
  result.rank = family.require("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  result.world_size = family.require("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
  result.local_rank = family.require("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
  result.local_world_size = family.require("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK");
  check_below("OMPI_COMM_WORLD_RANK", result.rank, "OMPI_COMM_WORLD_SIZE", result.world_size);
  check_below("OMPI_COMM_WORLD_LOCAL_RANK", result.local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", result.local_world_size);
  check_below("OMPI_COMM_WORLD_LOCAL_SIZE", result.local_world_size - 1, "OMPI_COMM_WORLD_SIZE", result.world_size);
  const auto job = str(environment("PMIX_NAMESPACE").value_or(""), environment("OMPI_MCA_ess_base_jobid").value_or(""));
  choose_meeting_point(environment, "mpirun " + job, "", result);
  return result;
}

RankEnvironment from_slurm(const Environment& environment) {
  const Family family(environment);
  RankEnvironment result;
  result.launcher = "slurm";
  result.rank = family.require("SLURM_PROCID", "SLURM_STEP_ID");
  const char* size_name = family.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  result.world_size = family.require(size_name, "SLURM_PROCID");
  result.local_rank = family.require("SLURM_LOCALID", "SLURM_PROCID");
  check_below("SLURM_PROCID", result.rank, size_name, result.world_size);
  const char* tasks_name =
      family.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  const auto tasks = environment(tasks_name);
  if (!tasks) refuse(str("SLURM_PROCID is set, but ", tasks_name, " is not"));
  try {
    result.local_world_size = detail::slurm_tasks_on_node(*tasks, family.get("SLURM_NODEID", 0));
  } catch (const std::invalid_argument& error) {
    refuse(str(tasks_name, "='", *tasks, "' is not understood: ", error.what()));
  }
  check_below("SLURM_LOCALID", result.local_rank, tasks_name, result.local_world_size);
  const char* nodes_name = family.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  const auto nodes = environment(nodes_name);
  if (result.world_size > 1 && !nodes && !environment("MASTER_ADDR")) {
    refuse(str("SLURM_PROCID is set, but neither ", nodes_name, " nor MASTER_ADDR is"));
  }
  const auto job = str(environment("SLURM_JOB_ID").value_or(""), ".", environment("SLURM_STEP_ID").value_or(""));
  choose_meeting_point(environment, "slurm " + job, nodes ? detail::first_slurm_host(*nodes) : "", result);
  return result;
}

}  // namespace

RankEnvironment detect_rank_environment(const Environment& environment) {
  const Family family(environment);
  if (family.has("RANK") || family.has("WORLD_SIZE")) return from_torch_variables(environment);
  for (const char* name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    if (family.has(name)) refuse(str(name, " is set, but RANK is not"));
  }
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}) {
    if (family.has(name)) return from_open_mpi(environment);
  }
  // A batch script sees the allocation's variables but is no rank; only srun's steps are.
  if (family.has("SLURM_STEP_ID") && family.has("SLURM_PROCID")) return from_slurm(environment);
  // A rank that trains alone because half its variables got lost is worse than an error.
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (family.has(name)) refuse(str(name, " is set, but RANK is not"));
  }
  return {};
}

namespace detail {

std::string first_slurm_host(const std::string& node_list) {
  const auto bracket = node_list.find_first_of("[,");
  if (bracket == std::string::npos || node_list[bracket] == ',') return node_list.substr(0, bracket);
  const auto end = node_list.find_first_of("-,]", bracket);
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, end - bracket - 1);
}

int slurm_tasks_on_node(const std::string& tasks_per_node, int node) {
  int seen = 0;
  std::size_t at = 0;
  while (at < tasks_per_node.size()) {
    const auto comma = std::min(tasks_per_node.find(',', at), tasks_per_node.size());
    const std::string part = tasks_per_node.substr(at, comma - at);
    const auto repeat = part.find("(x");
    const int tasks = static_cast<int>(parse_integer("tasks", part.substr(0, repeat)));
    int nodes = 1;
    if (repeat != std::string::npos) {
      nodes = static_cast<int>(parse_integer("nodes", part.substr(repeat + 2, part.find(')') - repeat - 2)));
    }
    seen += nodes;
    if (node < seen) return tasks;
    at = comma + 1;
  }
  throw std::invalid_argument(str("it has no node ", node));
}

}  // namespace detail
}  // namespace lockstep
