#include "lockstep/shm/process.h"

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "lockstep/base/env.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"

namespace lockstep::shm {
namespace {

/// Who is alive in this process's eyes. Never destroyed: tensors in static variables may come late.
struct Registry {
  explicit Registry(int generation) : generation(generation) {}

  const int generation;
  std::mutex mutex;
  std::map<std::size_t, std::weak_ptr<OwnProcess>> own;  // by the reserve asked for
  std::map<ProcessId, std::weak_ptr<PeerProcess>> peers;
};

/// A forked process starts with an empty one: its parent's belongs to the parent, and may be locked for good.
Registry& registry() {
  static std::atomic<Registry*> current = nullptr;
  const int generation = fork_generation();
  auto* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->generation == generation) return *found;
  auto fresh = std::make_unique<Registry>(generation);
  return current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel) ? *fresh.release() : *found;
}

/// Address space of one pool. It costs nothing until used, but there is not without end of it, and every process maps
/// the pools of all.
std::size_t reserve_among(int ranks, std::size_t wanted) {
  constexpr std::size_t kMostOfAll = std::size_t{8} << 40;
  return std::min(wanted, kMostOfAll / static_cast<std::size_t>(ranks)) / 4096 * 4096;
}

ProcessId random_id() {
  ProcessId id;
  if (::getrandom(id.data(), sizeof(id), 0) != sizeof(id)) throw MemoryError("[lockstep/shm] getrandom failed");
  return id;
}

}  // namespace

std::shared_ptr<OwnProcess> OwnProcess::get(int ranks) {
  const auto asked = env_integer(env, "LOCKSTEP_SHM_RESERVE_BYTES");
  const auto wanted = asked ? static_cast<std::size_t>(*asked) : total_memory();
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& entry = all.own[wanted];
  auto own = entry.lock();
  if (!own) {
    own = std::make_shared<OwnProcess>(reserve_among(ranks, wanted));
    entry = own;
  }
  return own;
}

OwnProcess::OwnProcess(std::size_t reserve) : id_(random_id()), home_(fork_generation()), pool_(reserve) {
  std::tie(lifeline_, watched_end_) = make_lifeline();
}

OwnProcess::~OwnProcess() {
  if (fork_generation() != home_) {
    lifeline_.release();  // closed at the fork; the number may be another file's by now
  } else {
    forget_lifeline(lifeline_.get());
  }
}

std::shared_ptr<PeerProcess> PeerProcess::find(const ProcessId& id) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.peers.find(id);
  return found == all.peers.end() ? nullptr : found->second.lock();
}

std::shared_ptr<PeerProcess> PeerProcess::adopt(const ProcessId& id, UniqueFd pool, UniqueFd lifeline) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.peers, [](const auto& each) { return each.second.expired(); });
  auto& entry = all.peers[id];
  auto peer = entry.lock();
  if (!peer) {
    peer = std::make_shared<PeerProcess>(std::move(pool), std::move(lifeline));
    entry = peer;
  }
  return peer;
}

PeerProcess::PeerProcess(UniqueFd pool, UniqueFd lifeline)
    : pool_(SharedMemory::attach("the pool of another rank", std::move(pool))), lifeline_(std::move(lifeline)) {
  pool_.forget_fd();
}

bool PeerProcess::is_gone() const {
  pollfd lifeline = {.fd = lifeline_.get(), .events = 0, .revents = 0};
  return ::poll(&lifeline, 1, 0) > 0 && (lifeline.revents & (POLLHUP | POLLERR)) != 0;
}

}  // namespace lockstep::shm
