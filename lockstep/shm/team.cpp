#include "lockstep/shm/team.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

#include "lockstep/base/deadline.h"
#include "lockstep/base/str.h"
#include "lockstep/shm/errors.h"
#include "lockstep/shm/lifeline.h"
#include "lockstep/shm/meeting.h"
#include "lockstep/shm/process.h"

namespace lockstep::shm {
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
    bytes = layout.bytes;
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
  if (process_) process_->pool().trim();
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
  const auto me = static_cast<std::size_t>(team->rank());
  const auto ranks = static_cast<std::size_t>(team->size());
  team->memories_.resize(ranks);
  team->others_.resize(ranks);
  team->pools_.resize(ranks);
  auto& memory = team->memories_[me];
  try {
    memory = SharedMemory::create("lockstep-team", team->layout_.bytes);
    memory.commit(0, team->layout_.channels);
    team->process_ = OwnProcess::get(team->size());
  } catch (const std::exception& error) {
    complain(agree, error.what());
    throw;
  }
  team->bases_[me] = memory.data();
  new (memory.data()) Lane;

  std::vector<Peer> found;
  try {
    found = meet(team->seat_, {.memory = memory, .process = *team->process_}, agree);
  } catch (const std::exception& error) {
    team->fail(error.what());  // for those who have met already
    throw;
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (rank != me) team->memories_[rank] = std::move(found[rank].memory);
    team->bases_[rank] = team->memories_[rank].data();
    team->others_[rank] = std::move(found[rank].process);
    const auto& other = team->others_[rank];
    team->pools_[rank] = other ? other->pool() : team->process_->pool().memory().data();
  }
  if (SharedMemory::commits_without_fd()) memory.forget_fd();
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
  return process_->pool().locate(at, bytes);
}

std::byte* Team::resolve_claim(int rank, std::uint64_t location, std::uint64_t bytes) const {
  if (room_) return nullptr;
  const auto& other = others_[static_cast<std::size_t>(rank)];
  const auto size = other ? other->pool_bytes() : process_->pool().memory().size();
  return location <= size && bytes <= size - location ? resolve(rank, location) : nullptr;
}

std::shared_ptr<Pool> Team::pool() const {
  return room_ ? nullptr : std::shared_ptr<Pool>(process_, &process_->pool());
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

int Team::lifeline(int rank) const {
  if (room_) return -1;
  const auto& other = others_[static_cast<std::size_t>(rank)];
  return other ? other->lifeline() : -1;
}

bool Team::is_gone(int rank) const {
  if (has_left(rank)) return true;
  if (room_) return false;
  const auto& other = others_[static_cast<std::size_t>(rank)];
  return other && other->is_gone();
}

}  // namespace lockstep::shm
