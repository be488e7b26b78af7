#include "lockstep/shm/team.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"
#include "lockstep/shm/meeting.h"

namespace lockstep::shm {
namespace {

/// Address space for zero-copy tensors of one rank. It costs nothing until used, but there is not without end of it.
std::size_t pool_reserve(int ranks) {
  constexpr std::size_t kMostPerTeam = std::size_t{8} << 40;
  const auto wanted = env_integer(env, "LOCKSTEP_SHM_RESERVE_BYTES");
  const auto reserve = wanted ? static_cast<std::size_t>(*wanted) : total_memory();
  return std::min(reserve, kMostPerTeam / static_cast<std::size_t>(ranks)) / 4096 * 4096;
}

}  // namespace

std::string Seat::name_of(int rank) const {
  return names.empty() ? std::to_string(rank) : std::to_string(names[static_cast<std::size_t>(rank)]);
}

std::string Seat::who() const {
  const bool is_renamed = !names.empty() && (names.front() != 0 || names.back() != size - 1);
  if (!is_renamed) return str("[lockstep/shm] rank ", rank, " of ", size);
  return str("[lockstep/shm] rank ", name_of(rank), " (", rank, " of ", size, " in group '", group, "')");
}

/// The memory of ranks that are threads, without pools: they can read each other's tensors anyway.
struct Team::Room {
  explicit Room(int size) : ranks(static_cast<std::size_t>(size)) {
    const Layout layout(size);
    bytes = layout.pool;
    for (auto& rank : ranks) {
      // Untouched pages cost nothing: channels may never be used.
      void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) throw std::bad_alloc();
      rank = static_cast<std::byte*>(at);
      new (rank) Lane;
    }
  }
  ~Room() {
    for (auto* rank : ranks) {
      if (rank != nullptr) ::munmap(rank, bytes);
    }
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  Signal come;  // how many ranks
  std::vector<std::byte*> ranks;
  std::size_t bytes = 0;
};

Team::Team(Seat seat)
    : seat_(std::move(seat)),
      home_(fork_generation()),
      layout_(seat_.size),
      bases_(static_cast<std::size_t>(seat_.size)),
      open_channels_(static_cast<std::size_t>(seat_.size)) {}

void Team::leave() {
  if (bases_.empty() || base(rank()) == nullptr || !is_at_home()) return;
  auto& mine = lane(rank());
  if (mine.has_left.exchange(1, std::memory_order_acq_rel) != 0) return;
  // Whoever sleeps until I publish shall look up and see that I will not.
  post(mine.ready, mine.ready.value.load());
}

Team::~Team() {
  leave();
  if (!is_at_home()) own_lifeline_.release();  // closed at the fork; the number may be another file's by now
  if (own_lifeline_) forget_lifeline(own_lifeline_.get());
}

std::shared_ptr<Team> Team::of_threads(Seat seat, const std::string& key) {
  static std::mutex mutex;
  static auto& rooms = *new std::unordered_map<std::string, std::shared_ptr<Room>>;
  const std::shared_ptr<Team> team(new Team(std::move(seat)));
  {
    const std::lock_guard lock(mutex);
    auto& room = rooms[key];
    if (!room) room = std::make_shared<Room>(team->size());
    team->room_ = room;
  }
  auto& come = team->room_->come;
  ring(come);
  // Nobody goes on, or away, before all are in: a room that was given up would be found empty by those who come later.
  const auto deadline = deadline_after(team->seat_.timeout);
  try {
    for (auto seen = come.value.load(); seen != static_cast<std::uint32_t>(team->size()); seen = come.value.load()) {
      nap(come, seen, kLongestNap);
      if (team->seat_.interrupt) team->seat_.interrupt();
      if (std::chrono::steady_clock::now() < deadline) continue;
      throw PeerError(str(team->seat_.who(), ": making the shared-memory group '", team->seat_.group, "' failed: ",
                          seen, " of ", team->size(), " ranks came within ", team->seat_.timeout.count(), " ms"));
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    rooms.erase(key);
    throw;
  }
  {
    const std::lock_guard lock(mutex);
    rooms.erase(key);
  }
  team->bases_ = team->room_->ranks;
  return team;
}

std::shared_ptr<Team> Team::of_processes(Seat seat, const std::function<std::string(const std::string&)>& agree) {
  const std::shared_ptr<Team> team(new Team(std::move(seat)));
  const auto& layout = team->layout_;
  auto memory = SharedMemory::create("lockstep", layout.pool + pool_reserve(team->size()));
  memory.commit(0, layout.channels);
  new (memory.data()) Lane;
  auto [lifeline, watched_end] = make_lifeline();
  team->own_lifeline_ = std::move(lifeline);

  auto found = meet(team->seat_, {.memory = memory.fd(), .lifeline = watched_end.get()}, agree);
  team->memories_.resize(static_cast<std::size_t>(team->size()));
  team->memories_[static_cast<std::size_t>(team->rank())] = std::move(memory);
  for (int rank = 0; rank < team->size(); ++rank) {
    auto& peer = found[static_cast<std::size_t>(rank)];
    auto& mapped = team->memories_[static_cast<std::size_t>(rank)];
    if (rank != team->rank()) {
      mapped = SharedMemory::attach(str("memory of rank ", team->seat_.name_of(rank)), std::move(peer.memory));
      mapped.forget_fd();
    }
    team->bases_[static_cast<std::size_t>(rank)] = mapped.data();
    team->lifelines_.push_back(std::move(peer.lifeline));
  }
  return team;
}

std::byte* Team::message_chunk(int from, int to, std::uint32_t number) const {
  const auto header = (sizeof(Channel) + 63) / 64 * 64;
  return reinterpret_cast<std::byte*>(&channel(from, to)) + header + (number % kMessageSlots) * kMessageChunkBytes;
}

void Team::open_channel(int to) {
  if (open_channels_[static_cast<std::size_t>(to)]) return;
  if (!room_) {
    memories_[static_cast<std::size_t>(rank())].commit(
        layout_.channels + static_cast<std::size_t>(to) * layout_.channel_bytes, layout_.channel_bytes);
  }
  open_channels_[static_cast<std::size_t>(to)] = true;
}

std::optional<std::uint64_t> Team::locate(const std::byte* at, std::size_t bytes) const {
  if (room_) return reinterpret_cast<std::uint64_t>(at);
  const auto& mine = memories_[static_cast<std::size_t>(rank())];
  const std::byte* pool = mine.data() + layout_.pool;
  if (at < pool || at + bytes > mine.data() + mine.size()) return std::nullopt;
  return static_cast<std::uint64_t>(at - mine.data());
}

bool Team::is_at_home() const {
  return fork_generation() == home_;
}

void Team::fail(const std::string& reason) {
  if (!is_at_home()) return;
  auto& mine = lane(rank());
  auto state = Failure::kNone;
  if (!mine.failure_state.compare_exchange_strong(state, Failure::kBeingWritten)) return;
  std::strncpy(mine.failure, reason.c_str(), sizeof(mine.failure) - 1);
  mine.failure_state.store(Failure::kWritten, std::memory_order_release);
}

std::optional<std::string> Team::failure() const {
  for (int rank = 0; rank < size(); ++rank) {
    const auto& each = lane(rank);
    if (each.failure_state.load(std::memory_order_acquire) == Failure::kWritten) return std::string(each.failure);
  }
  return std::nullopt;
}

bool Team::is_gone(int rank) const {
  if (has_left(rank)) return true;
  if (room_ || rank == this->rank()) return false;
  pollfd lifeline = {.fd = lifelines_[static_cast<std::size_t>(rank)].get(), .events = 0, .revents = 0};
  return ::poll(&lifeline, 1, 0) > 0 && (lifeline.revents & (POLLHUP | POLLERR)) != 0;
}

}  // namespace lockstep::shm
