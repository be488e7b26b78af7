#include "lockstep/rpc/rpc.h"

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/jit/mobile/type_parser.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/box.h"
#include "lockstep/rpc/dynamic_group.h"
#include "lockstep/rpc/functions.h"
#include "lockstep/rpc/heartbeat.h"
#include "lockstep/rpc/meeting.h"
#include "lockstep/rpc/request_callback.h"
#include "lockstep/rpc/session.h"
#include "lockstep/rpc/shm_agent.h"
#include "lockstep/rpc/switched_agent.h"
#include "lockstep/rpc/tensorpipe.h"

namespace lockstep::rpc {

namespace trpc = torch::distributed::rpc;
namespace tautograd = torch::distributed::autograd;

namespace detail {
void forget_gatherings();
void meet_at_the_end(std::chrono::duration<float> timeout);
}  // namespace detail

namespace {

using detail::AgentRequest;
using detail::switched_agent;
using detail::WorkerCard;

struct Session {
  std::mutex mutex;    // one init_rpc() or shutdown() at a time
  int generation = 0;  // how often RPC was initialised
  int rank = -1;       // the container of contexts keeps the first
  RpcOptions options;
  bool is_dynamic = false;
  StorePtr store;       // of the group
  int world_size = -1;  // unless it is dynamic
  std::shared_ptr<trpc::RpcAgent> agent;
  std::unique_ptr<detail::Heartbeat> heartbeat;
};

Session& session() {
  static auto* const current = new Session;
  return *current;
}

void check_arguments(const std::string& name, int rank, std::optional<int> world_size, const RpcOptions& options) {
  const auto where = "[lockstep/rpc] init_rpc: ";
  TORCH_CHECK(!name.empty(), where, "name is empty.");
  TORCH_CHECK(name.size() < WorkerInfo::MAX_NAME_LEN, where, "name has ", name.size(), " characters; it may have ",
              WorkerInfo::MAX_NAME_LEN - 1, ".");
  for (const char c : name) {
    TORCH_CHECK(std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == ':' || c == '-', where, "name '",
                name, "' has the character '", c, "'; it may have letters, digits, '_', ':' and '-'.");
  }
  TORCH_CHECK(rank >= 0, where, "rank is ", rank, ".");
  if (world_size) {
    TORCH_CHECK(*world_size >= 1, where, "world_size is ", *world_size, ".");
    TORCH_CHECK(rank < *world_size, where, "rank is ", rank, ", world_size ", *world_size, ".");
  } else {
    TORCH_CHECK(options.agent != Agent::kShm, where, "a group without a world_size needs TensorPipe.");
    TORCH_CHECK(options.device_maps.empty(), where, "a group without a world_size has no device maps.");
  }
  TORCH_CHECK(rank <= std::numeric_limits<trpc::worker_id_t>::max(), where, "rank is ", rank, "; it may be up to ",
              std::numeric_limits<trpc::worker_id_t>::max(), ".");
  TORCH_CHECK(options.num_worker_threads > 0, where, "num_worker_threads is ", options.num_worker_threads, ".");
  TORCH_CHECK(options.rpc_timeout.count() >= 0, where, "rpc_timeout is ", options.rpc_timeout.count(),
              " s; zero is no limit.");
  detail::check_tensorpipe_options(options);
}

StorePtr meet(int rank, int world_size, const RpcOptions& options) {
  if (options.store) return options.store;
  const auto world = current_world();
  if (world && options.init_method == "env://") {
    TORCH_CHECK(world->rank() == rank && world->world_size() == world_size, "[lockstep/rpc] init_rpc: rank is ", rank,
                " of ", world_size, ", but this process is rank ", world->rank(), " of ", world->world_size(),
                " of the job. Give a store or an init_method for another numbering.");
    return world->store();
  }
  auto place = options.init_method == "env://" ? detect_rank_environment() : RankEnvironment{};
  place.rank = rank;
  place.world_size = world_size;
  TORCH_CHECK(world_size == 1 || place.master_port != 0 || options.init_method != "env://",
              "[lockstep/rpc] init_rpc: MASTER_ADDR and MASTER_PORT are not set. Set them, or init_method, or store.");
  return rendezvous(options.init_method, place, options.init_timeout);
}

std::int64_t accelerators() {
  return gpu_count();
}

/// Devices that may appear in messages: given ones, or all that maps from and to this worker name.
std::vector<c10::Device> devices_of(const std::vector<WorkerCard>& cards, int rank) {
  const auto& own = cards[static_cast<std::size_t>(rank)];
  if (!own.devices.empty()) return own.devices;
  std::set<c10::DeviceIndex> indices;
  for (const auto& [worker, map] : own.device_maps) {
    for (const auto& [mine, theirs] : map) {
      if (!mine.is_cpu()) indices.insert(mine.index());
    }
  }
  for (const auto& card : cards) {
    const auto map = card.device_maps.find(own.name);
    if (map == card.device_maps.end()) continue;
    for (const auto& [theirs, mine] : map->second) {
      if (!mine.is_cpu()) indices.insert(mine.index());
    }
  }
  std::vector<c10::Device> devices;
  for (const auto index : indices) devices.emplace_back(c10::kCUDA, index);
  return devices;
}

std::unordered_map<std::string, DeviceMap> reverse_maps(const std::vector<WorkerCard>& cards, const std::string& own) {
  std::unordered_map<std::string, DeviceMap> reverse;
  for (const auto& card : cards) {
    const auto map = card.device_maps.find(own);
    if (map == card.device_maps.end()) continue;
    for (const auto& [theirs, mine] : map->second) reverse[card.name].emplace(mine, theirs);
  }
  return reverse;
}

std::shared_ptr<trpc::RpcAgent> make_agent(const AgentRequest& request, const std::vector<WorkerCard>& cards) {
  auto callback = detail::make_request_callback();
  if (detail::choose_agent(cards) == Agent::kTensorPipe) {
    return detail::make_tensorpipe_agent(request, std::move(callback));
  }
  const auto& options = request.options;
  return make_shm_agent(request.store, request.name, request.rank, *request.world_size,
                        {.num_worker_threads = options.num_worker_threads,
                         .rpc_timeout_seconds = options.rpc_timeout.count(),
                         .start_timeout = options.init_timeout},
                        std::move(callback));
}

/// What the options say, or else the environment. Transports and channels are TensorPipe's.
Agent asked_for(const RpcOptions& options) {
  if (options.agent != Agent::kAuto) return options.agent;
  if (options.transports || options.channels) return Agent::kTensorPipe;
  const auto given = env("LOCKSTEP_RPC_AGENT").value_or("auto");
  if (given == "shm") return Agent::kShm;
  if (given == "tensorpipe") return Agent::kTensorPipe;
  TORCH_CHECK(given == "auto", "[lockstep/rpc] init_rpc: LOCKSTEP_RPC_AGENT is '", given,
              "'; it may be auto, shm or tensorpipe.");
  return Agent::kAuto;
}

/// References have one type for libtorch, boxes know theirs; libtorch's own messages have dicts of strings inside.
std::shared_ptr<trpc::TypeResolver> type_resolver() {
  return std::make_shared<trpc::TypeResolver>([](const c10::QualifiedName& name) {
    const auto& text = name.qualifiedName();
    return c10::StrongTypePtr(nullptr, text == "Any" ? c10::AnyType::get() : c10::parseType(text));
  });
}

void end_at_exit() {
  if (!detail::is_initialised()) return;
  TORCH_WARN("[lockstep/rpc] the process ends without shutdown(). Others that call it will get errors.");
  try {
    shutdown(/*graceful=*/false);
  } catch (const std::exception& error) {
    TORCH_WARN("[lockstep/rpc] ", error.what());
  }
}

void warn_of_silence(const std::string& worker) {
  TORCH_WARN("[lockstep/rpc] worker '", worker,
             "' gives no sign of life. Is its process stopped, or are all its threads held?");
}

/// Ends RPC in this process whatever has happened before.
void tear_down(Session& current) {
  const auto agent = switched_agent();
  std::exception_ptr error;
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  current.heartbeat.reset();
  attempt([&] { agent->shutdown(); });
  agent->switch_to(nullptr);
  detail::forget_gatherings();
  current.agent.reset();
  current.store.reset();  // its port may be wanted again
  if (error) std::rethrow_exception(error);
}

void check_leaks(const RpcOptions& options) {
  if (!options.fail_on_rref_leak) return;
  auto info = trpc::RRefContext::getInstance().getDebugInfo();
  const auto count = [&](const char* key) { return info.contains(key) ? std::stol(info.at(key)) : 0L; };
  if (count("num_owner_rrefs") == 0 && count("num_forks") == 0) return;
  std::vector<std::string> objects;
  for (const auto& [type, number] : detail::living_boxes()) objects.push_back(str(number, " of ", type));
  TORCH_CHECK(false, "[lockstep/rpc] shutdown: worker '", worker_info().name_, "' still owns ",
              count("num_owner_rrefs"), " objects which ", count("num_forks"),
              " references of other workers hold (objects behind RRefs here: ", join(objects, ", "),
              "). Let RRefs end before shutdown().");
}

/// Makes `agent` the one that carries messages, and starts it. Then runs `greet`; if that fails, RPC ends again.
void begin(Session& current, const AgentRequest& request, std::shared_ptr<trpc::RpcAgent> new_agent,
           const std::function<void()>& greet) {
  tautograd::DistAutogradContainer::init(request.rank);
  current.rank = request.rank;
  current.options = request.options;
  current.is_dynamic = !request.world_size;
  current.agent = std::move(new_agent);
  current.agent->setTypeResolver(type_resolver());
  auto& agent = switched_agent();
  if (!agent) {
    agent = std::make_shared<detail::SwitchedAgent>(WorkerInfo(request.name, static_cast<std::int64_t>(request.rank)));
    agent->setTypeResolver(type_resolver());
    trpc::RpcAgent::setCurrentRpcAgent(agent);
    std::atexit(&end_at_exit);
  }
  agent->setRpcTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(request.options.rpc_timeout));
  agent->limit_flow(request.options.max_bytes_in_flight);
  agent->switch_to(current.agent);
  detail::begin_session();
  try {
    agent->start();
    greet();
  } catch (...) {
    try {
      tear_down(current);
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first error is the one to tell
    }
    throw;
  }
}

void begin_with_all(Session& current, AgentRequest request, const WorkerCard& own) {
  const auto& options = request.options;
  const int world_size = *request.world_size;
  request.store = c10::make_intrusive<c10d::PrefixStore>(str("lockstep_rpc/", current.generation),
                                                         meet(request.rank, world_size, options));
  // From here on a failed attempt has used up its keys.
  ++current.generation;
  const auto cards = detail::exchange(own, request.rank, world_size, *request.store, options.init_timeout);
  detail::check_cards_together(cards, *request.store);
  request.store = c10::make_intrusive<c10d::PrefixStore>("agent", request.store);
  request.devices = devices_of(cards, request.rank);
  request.reverse_device_maps = reverse_maps(cards, request.name);
  // Nobody's first call finds a worker that is not there yet.
  begin(current, request, make_agent(request, cards), [&] { barrier({}, options.init_timeout); });
  current.store = request.store;
  current.world_size = world_size;
}

void join_dynamically(Session& current, AgentRequest request, const WorkerCard& own) {
  const auto& options = request.options;
  const auto world = current_world();
  TORCH_CHECK(options.store || world, "[lockstep/rpc] init_rpc: a group without a world_size needs a store, or the ",
              "job's: call lockstep::init() first, or give RpcOptions::store.");
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("lockstep_rpc/dynamic", options.store ? options.store : world->store());
  const detail::MembershipLock nobody_else(store, own.name, options.init_timeout);
  // TensorPipe's connections are kept by rank, and never made anew.
  TORCH_CHECK(store->add(str("rank/", request.rank), 1) == 1, "[lockstep/rpc] init_rpc: rank ", request.rank,
              " of this group is taken, or was, by a worker that left. Join under another rank, as a new process.");
  request.store = c10::make_intrusive<c10d::PrefixStore>("agent", store);
  begin(current, request, detail::make_tensorpipe_agent(request, detail::make_request_callback()), [&] {
    detail::compare_with_members(own, *store);
    detail::tell_members(/*joins=*/true);
  });
  current.store = store;
}

/// libtorch's distributed engine runs gradients that arrive on its inter-op threads, and DDP waits there for the other
/// ranks' reductions: with few of them, workers wait for each other for ever.
void have_enough_threads() {
  constexpr int kEnough = 8;
  if (at::get_num_interop_threads() >= kEnough) return;
  try {
    at::set_num_interop_threads(kEnough);
  } catch (const c10::Error&) {
    TORCH_WARN("[lockstep/rpc] init_rpc: this process has ", at::get_num_interop_threads(),
               " inter-op threads and uses them already. Backwards through DDP and other workers may need ", kEnough,
               ": call at::set_num_interop_threads(", kEnough, ") at the beginning.");
  }
}

/// Libtorch's agent counts calls in the store until all workers have read the same number. Who serves the store, rank 0
/// as a rule, must not be the first to go.
void go_last_if_server(const Session& current) {
  constexpr auto kLeft = "left";
  constexpr std::chrono::seconds kPatience(2);
  try {
    current.store->add(kLeft, 1);
    if (current.rank == 0) detail::wait_for_others(*current.store, kLeft, current.world_size, kPatience);
    // NOLINTNEXTLINE(bugprone-empty-catch): whoever served it is gone, and nobody needs it any more
  } catch (const std::exception&) {
  }
}

/// The graceful end: with everybody, or, where workers come and go, as one who goes.
void say_goodbye(Session& current, std::chrono::duration<float> timeout) {
  const auto limit =
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout.count() > 0 ? timeout : rpc_timeout());
  // Everybody is here, and so everybody's calls have been made.
  if (!current.is_dynamic) detail::meet_at_the_end(timeout);
  trpc::RRefContext::getInstance().delAllUsersAndUnforkedOwners(limit);
  std::optional<detail::MembershipLock> nobody_else;
  if (current.is_dynamic) {
    nobody_else.emplace(current.store, worker_info().name_, limit);
    detail::tell_members(/*joins=*/false);
  }
  switched_agent()->join(/*shutdown=*/true, timeout.count());
  if (!current.is_dynamic) go_last_if_server(current);
  check_leaks(current.options);
}

}  // namespace

RpcOptions& RpcOptions::set_device_map(const std::string& worker, const DeviceMap& map) {
  for (const auto& [from, to] : map) device_maps[worker].insert_or_assign(from, to);
  return *this;
}

void init_rpc(const std::string& name, int rank, std::optional<int> world_size, const RpcOptions& options) {
  check_arguments(name, rank, world_size, options);
  auto& current = session();
  const std::lock_guard lock(current.mutex);
  TORCH_CHECK(!detail::is_initialised(), "[lockstep/rpc] init_rpc: RPC is initialised already, as worker '",
              current.agent->getWorkerInfo().name_, "'. Call shutdown() first.");
  TORCH_CHECK(current.rank == -1 || current.rank == rank, "[lockstep/rpc] init_rpc: this process was rank ",
              current.rank, " before, and cannot be rank ", rank, " now.");
  AgentRequest request{.store = nullptr, .name = name, .rank = rank, .world_size = world_size, .options = options};
  const WorkerCard own{.name = name,
                       .host = host_id(),
                       .agent = asked_for(options),
                       .functions = detail::registered_functions(),
                       .device_maps = options.device_maps,
                       .devices = options.devices,
                       .device_count = accelerators()};
  if (world_size) {
    begin_with_all(current, std::move(request), own);
  } else {
    join_dynamically(current, std::move(request), own);
  }
  have_enough_threads();
  if (options.heartbeat.count() > 0) {
    current.heartbeat = std::make_unique<detail::Heartbeat>(
        options.heartbeat, options.on_silent_worker ? options.on_silent_worker : &warn_of_silence);
  }
}

void init_rpc(const std::string& name, const RpcOptions& options) {
  const auto place = detect_rank_environment();
  init_rpc(name, place.rank, place.world_size, options);
}

void shutdown(bool graceful, std::chrono::duration<float> timeout) {
  auto& current = session();
  detail::current_agent("shutdown()");
  const std::lock_guard lock(current.mutex);
  std::exception_ptr error;
  current.heartbeat.reset();
  if (graceful) {
    try {
      say_goodbye(current, timeout);
    } catch (...) {
      error = std::current_exception();
    }
  }
  try {
    tear_down(current);
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  if (error) std::rethrow_exception(error);
}

bool is_initialised() {
  return detail::is_initialised();
}

WorkerInfo worker_info() {
  detail::current_agent("worker_info()");
  return switched_agent()->real()->getWorkerInfo();
}

WorkerInfo worker_info(const Callee& worker) {
  return worker.info();
}

std::vector<WorkerInfo> worker_infos() {
  const auto agent = detail::current_agent("worker_infos()");
  std::map<int, WorkerInfo> by_rank;
  for (const auto& info : agent->getWorkerInfos()) by_rank.emplace(info.id_, info);
  std::vector<WorkerInfo> infos;
  for (const auto& [rank, info] : by_rank) infos.push_back(info);
  return infos;
}

std::chrono::duration<float> rpc_timeout() {
  return detail::current_agent("rpc_timeout()")->getRpcTimeout();
}

void set_rpc_timeout(std::chrono::duration<float> timeout) {
  TORCH_CHECK(timeout.count() >= 0, "[lockstep/rpc] set_rpc_timeout: ", timeout.count(), " s; zero is no limit.");
  detail::current_agent("set_rpc_timeout()")
      ->setRpcTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
}

std::vector<std::string> silent_workers() {
  detail::current_agent("silent_workers()");
  const auto& heartbeat = session().heartbeat;
  return heartbeat ? heartbeat->silent() : std::vector<std::string>();
}

std::map<std::string, std::string> debug_info() {
  std::map<std::string, std::string> all;
  const auto agent = detail::current_agent("debug_info()");
  for (const auto& [key, value] : trpc::RRefContext::getInstance().getDebugInfo()) all["rref." + key] = value;
  for (const auto& [key, value] : agent->getDebugInfo()) all[key] = value;
  for (const auto& [key, value] : tautograd::DistEngine::getInstance().getDebugInfo()) {
    all["dist_autograd." + key] = str(value);
  }
  all["peak_bytes_in_flight"] = str(switched_agent()->peak_flow());
  all["dist_autograd.num_autograd_contexts"] =
      str(tautograd::DistAutogradContainer::getInstance().numAutogradContexts());
  return all;
}

}  // namespace lockstep::rpc
