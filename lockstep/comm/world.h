// init(): the first call of a program that runs on many ranks, and on one.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/comm/rank_environment.h"
#include "lockstep/comm/rendezvous.h"

namespace lockstep {

struct InitOptions {
  /// "gloo", "nccl", "cpu:shm,cuda:nccl", … Empty: shm for CPU tensors, which is shared memory inside a host and gloo
  /// between hosts; for CUDA tensors NCCL if every rank of this host has a GPU of its own and NCCL is built in, else
  /// gloo.
  std::string backend = "";
  /// Of rendezvous and of every operation of the group.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// "env://", "tcp://host:port", "file:///path" or "hash://name". All but the first need rank and world_size.
  std::string init_method = "env://";
  /// Override what the launcher said; give both or none.
  int rank = -1;
  int world_size = -1;
  /// A store to meet at instead of init_method; needs rank and world_size.
  StorePtr store = nullptr;
  /// Where this rank computes. Empty: the GPU numbered local rank modulo GPUs, the CPU if there is none.
  std::optional<c10::Device> device = std::nullopt;
};

/// This rank's place in the job. Copies share the groups; they end with the last copy. Keep one alive while you
/// communicate.
class World {
 public:
  int rank() const;
  int world_size() const;
  int local_rank() const;
  int local_world_size() const;
  /// How often the launcher has restarted the job.
  int restart_count() const;
  c10::Device device() const;
  /// True if InitOptions::device chose it, false if init() did.
  bool is_device_given() const;
  const GroupPtr& group() const;
  /// For this program's own use: its keys do not meet the library's.
  const StorePtr& store() const;
  /// "lockstep-run", "torchrun", "mpirun", "slurm", "environment", "options" or "none".
  const std::string& launcher() const;

  struct State;  // internal

 private:
  friend World init(const InitOptions& options);
  friend std::optional<World> current_world();
  explicit World(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

/// Joins the job: reads the launcher's variables, meets the other ranks, makes the default group. Collective over all
/// ranks of the job; alone it contacts nobody. A rendezvous over TCP and gloo ignore SIGPIPE from then on, unless the
/// program handles it itself. Under lockstep-run a stdout that is a pipe is flushed line by line, and SIGUSR2 makes the
/// process write its threads' stacks to stderr, unless the program has taken the signal. Throws std::invalid_argument
/// for a broken environment, c10::Error for bad options or if this rank already has a world, c10::DistBackendError
/// naming ranks that do not come in time.
[[nodiscard]] World init(const InitOptions& options = {});

/// CUDA devices this process can see.
int gpu_count();

/// The world init() made, while a copy of it lives.
std::optional<World> current_world();

}  // namespace lockstep
