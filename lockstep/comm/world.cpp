#include "lockstep/comm/world.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/stack_dump.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/group_state.h"

namespace lockstep {

struct World::State {
  RankEnvironment place;
  c10::Device device;
  bool is_device_given;
  StorePtr store;
  GroupPtr group;
};

namespace {

RankEnvironment place_of(const InitOptions& options) {
  const bool has_rank = options.rank >= 0;
  const bool has_size = options.world_size >= 0;
  TORCH_CHECK(has_rank == has_size, "[lockstep/comm] init: give both rank and world_size, or none: rank is ",
              options.rank, ", world_size is ", options.world_size);
  if (!has_rank) {
    TORCH_CHECK(!options.store && options.init_method == "env://",
                "[lockstep/comm] init: ", options.store ? "a store" : "init method '" + options.init_method + "'",
                " says where to meet, but not who this is: set rank and world_size");
    return detect_rank_environment();
  }
  TORCH_CHECK(options.world_size >= 1 && options.rank < options.world_size, "[lockstep/comm] init: rank ", options.rank,
              " is not below world_size ", options.world_size);
  RankEnvironment place;
  if (options.init_method == "env://" && !options.store && options.world_size > 1) {
    // As in Python: the launcher says where to meet, the caller who this is.
    place = detect_rank_environment();
    TORCH_CHECK(place.master_port != 0,
                "[lockstep/comm] init: rank and world_size are given, but MASTER_ADDR and MASTER_PORT are not set. "
                "Set them, or init_method, or store.");
  }
  place.launcher = "options";
  place.rank = options.rank;
  place.world_size = options.world_size;
  const auto local_world_size = env_integer(env, "LOCAL_WORLD_SIZE");
  place.knows_hosts = local_world_size.has_value() || options.world_size == 1;
  place.local_rank = static_cast<int>(env_integer(env, "LOCAL_RANK").value_or(options.rank));
  place.local_world_size = static_cast<int>(local_world_size.value_or(options.world_size));
  if (options.init_method.starts_with("tcp://")) place.master_addr = tcp_host(options.init_method);
  return place;
}

/// The address the other ranks reach this one at.
std::string own_address(const RankEnvironment& place) {
  if (place.knows_hosts && place.local_world_size == place.world_size) return "127.0.0.1";
  auto address = address_towards(place.master_addr);
  // Distributions map the host's own name to a loopback address, which would send the other hosts to themselves.
  const bool is_loopback = address.starts_with("127.") || address == "::1";
  if (place.knows_hosts && is_loopback) {
    const auto outside = outside_address();
    TORCH_CHECK(!outside.empty(), "[lockstep/comm] rank ", place.rank, " of ", place.world_size, ": '",
                place.master_addr, "' leads to ", address,
                ", where other hosts cannot reach this one, and there is no other address. "
                "Set MASTER_ADDR to an address, or GLOO_SOCKET_IFNAME to the interface.");
    address = outside;
  }
  return address;
}

c10::Device device_for(const InitOptions& options, const RankEnvironment& place) {
  if (options.device) return *options.device;
  const int gpus = gpu_count();
  if (gpus == 0) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(place.local_rank % gpus));
}

std::string backend_for(const InitOptions& options, const RankEnvironment& place, c10::Device device) {
  if (!options.backend.empty()) return options.backend;
  if (gpu_count() == 0) return "cpu:shm";
  const bool has_own_gpu = device.is_cuda() && place.local_world_size <= gpu_count();
  return has_own_gpu && is_backend_registered("nccl") ? "cpu:shm,cuda:nccl" : "cpu:shm,cuda:gloo";
}

/// Lockstep-run shows what ranks write, and asks them where they are when its time is over.
void help_launcher() {
  struct stat output = {};
  // In a pipe, lines would come late, and be lost if the rank is killed. Files stay as quick as they are. A buffer of
  // our own: without one glibc goes on filling the old one if the program has written already.
  static char buffer[BUFSIZ];
  static std::once_flag once;
  if (::fstat(STDOUT_FILENO, &output) == 0 && S_ISFIFO(output.st_mode)) {
    std::call_once(once, [] { std::setvbuf(stdout, buffer, _IOLBF, sizeof(buffer)); });
  }
  dump_stacks_on_request();
}

struct CurrentWorld {
  std::mutex mutex;
  std::weak_ptr<const World::State> state;
};

}  // namespace

int World::rank() const {
  return state_->place.rank;
}
int World::world_size() const {
  return state_->place.world_size;
}
int World::local_rank() const {
  return state_->place.local_rank;
}
int World::local_world_size() const {
  return state_->place.local_world_size;
}
int World::restart_count() const {
  return state_->place.restart_count;
}
c10::Device World::device() const {
  return state_->device;
}
bool World::is_device_given() const {
  return state_->is_device_given;
}
const GroupPtr& World::group() const {
  return state_->group;
}
const StorePtr& World::store() const {
  return state_->store;
}
const std::string& World::launcher() const {
  return state_->place.launcher;
}

int gpu_count() {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
}

World init(const InitOptions& options) {
  if (env("LOCKSTEP_LAUNCHER")) help_launcher();
  TORCH_CHECK(!current_world(),
              "[lockstep/comm] init was called twice. Keep the World it returned, or use current_world().");
  TORCH_CHECK(options.timeout.count() > 0, "[lockstep/comm] init: the timeout must be positive, got ",
              options.timeout.count(), " ms");
  const auto place = place_of(options);
  const auto device = device_for(options, place);
  const auto backend = backend_for(options, place, device);
  // Misuse is refused before anybody is contacted.
  parse_backend_spec(backend);
  const StorePtr meeting = options.store ? options.store : rendezvous(options.init_method, place, options.timeout);
  // A store may outlive a world, torchrun's does: every init() on it gets keys of its own. Ranks count alike.
  const auto generation = place.world_size == 1 ? 0 : meeting->add(str("lockstep/init/", place.rank), 1);
  auto group = detail::connect_group({
      .store = c10::make_intrusive<c10d::PrefixStore>(str("world/", generation), meeting),
      .rank = place.rank,
      .size = place.world_size,
      .name = "world",
      .global_ranks = detail::first_ranks(place.world_size),
      .timeout = options.timeout,
      .backend_spec = backend,
      .address = own_address(place),
      .ended_dir = place.ended_dir,
  });
  auto state = std::make_shared<const World::State>(World::State{
      .place = place,
      .device = device,
      .is_device_given = options.device.has_value(),
      .store = c10::make_intrusive<c10d::PrefixStore>("user", meeting),
      .group = std::move(group),
  });
  auto& current = rank_local<CurrentWorld>();
  const std::lock_guard lock(current.mutex);
  current.state = state;
  return World(std::move(state));
}

std::optional<World> current_world() {
  auto& current = rank_local<CurrentWorld>();
  const std::lock_guard lock(current.mutex);
  auto state = current.state.lock();
  if (!state) return std::nullopt;
  return World(std::move(state));
}

GroupPtr default_group() {
  const auto world = current_world();
  TORCH_CHECK(world, "[lockstep/comm] there is no default group: call lockstep::init() first and keep what it returns");
  return world->group();
}

}  // namespace lockstep
