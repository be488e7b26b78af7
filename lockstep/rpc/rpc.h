// Life of RPC in a process: init_rpc() before any call, shutdown() at the end; who the workers are.
//
// A worker is a process with a name and a rank. All workers of a job call init_rpc(), in any order; calls, references
// and distributed autograd (call.h, rref.h, dist_autograd.h) work until shutdown().
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/comm/rendezvous.h"
#include "lockstep/rpc/callee.h"

namespace lockstep::rpc {

using DeviceMap = std::unordered_map<c10::Device, c10::Device>;

/// What carries messages.
enum class Agent {
  kAuto,        // what LOCKSTEP_RPC_AGENT says (shm, tensorpipe); else shared memory if all workers are on one host and
                // none has device maps, else TensorPipe
  kShm,         // shared memory; refuses workers of other hosts
  kTensorPipe,  // libtorch's; between hosts, and for tensors on accelerators
};

struct RpcOptions {
  /// That serve requests. A function that waits for another call holds one.
  int num_worker_threads = 16;
  /// Of calls that have no limit of their own; zero is none.
  std::chrono::duration<float> rpc_timeout = std::chrono::seconds(60);
  /// For init_rpc() itself: how long others may take to come.
  std::chrono::milliseconds init_timeout = std::chrono::minutes(5);
  /// As of init(); with "env://" the store of the job's world is used where there is one.
  std::string init_method = "env://";
  /// A store to meet at instead.
  StorePtr store = nullptr;
  Agent agent = Agent::kAuto;
  /// Of TensorPipe, by name; none: those it finds best.
  std::optional<std::vector<std::string>> transports = std::nullopt;
  std::optional<std::vector<std::string>> channels = std::nullopt;
  /// By callee: on which of its devices a tensor of one of mine arrives. Answers come back the other way.
  std::unordered_map<std::string, DeviceMap> device_maps = {};
  /// That callees' tensors may be on; more than device_maps names, if others map to them.
  std::vector<c10::Device> devices = {};
  /// Bytes of arguments that may be on their way to one worker; calls beyond it wait until others are answered. Zero:
  /// any number.
  std::size_t max_bytes_in_flight = 0;
  /// Tells, by a warning or on_silent_worker, of workers that give no sign of life within this time: frozen ones, and
  /// those whose threads are all held. Zero: does not ask.
  std::chrono::milliseconds heartbeat{0};
  /// Called from a thread of RPC's, once per worker that falls silent.
  std::function<void(const std::string& worker)> on_silent_worker = nullptr;
  /// Shutdown fails, naming them, if references to objects of this worker are left.
  bool fail_on_rref_leak = false;

  /// Adds to a callee's map.
  RpcOptions& set_device_map(const std::string& worker, const DeviceMap& map);
};

/// Joins the job's workers. Without rank and world_size they come from the launcher's variables. Throws, on every
/// worker, for a name used twice or functions registered differently under one name.
///
/// With a rank but without a size (std::nullopt, on all workers) the group is dynamic: workers come and go as they
/// like, by a store that they share, over TensorPipe. Nobody waits for others, at the beginning or the end. A rank is
/// used once.
void init_rpc(const std::string& name, int rank, std::optional<int> world_size, const RpcOptions& options = {});
void init_rpc(const std::string& name, const RpcOptions& options = {});

/// Graceful: waits until all workers are here and no call is under way, for as long as that takes unless there is a
/// timeout, deletes this worker's references to others' objects, and ends together. Throws at once if a worker has gone
/// without it. Else ends at once, alone. If a step fails the rest is still torn down, then it throws.
void shutdown(bool graceful = true, std::chrono::duration<float> timeout = std::chrono::seconds(0));

bool is_initialised();

/// This worker, one by name or rank, all by rank. Throw if there is none.
WorkerInfo worker_info();
WorkerInfo worker_info(const Callee& worker);
std::vector<WorkerInfo> worker_infos();

/// Of later calls.
std::chrono::duration<float> rpc_timeout();
void set_rpc_timeout(std::chrono::duration<float> timeout);

/// Those who give no sign of life now; none without RpcOptions::heartbeat.
std::vector<std::string> silent_workers();

/// Every worker's text, by name, when all of `workers` (empty: all there are) have called it. The smallest name leads.
/// Throws, listing who is missing, after `timeout` (zero: the default one of calls).
std::map<std::string, std::string> all_gather(const std::string& text, std::vector<std::string> workers = {},
                                              std::chrono::duration<float> timeout = std::chrono::seconds(0));
void barrier(std::vector<std::string> workers = {}, std::chrono::duration<float> timeout = std::chrono::seconds(0));

/// What is under way, by name: references, calls, contexts, backwards. All zero after the work.
std::map<std::string, std::string> debug_info();

}  // namespace lockstep::rpc
