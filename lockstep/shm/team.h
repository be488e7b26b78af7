// The ranks of one host that share memory: who they are, what each one shows, and how the others notice that one is
// gone. Made collectively; afterwards each rank uses its own Team object, from one thread at a time.
//
// Processes meet at a Unix socket without a name in the file system and show each other memory of the team's own. Their
// pools for zero-copy tensors and the lifelines that the kernel cuts when they die belong to the processes, and serve
// every team of theirs.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/shm/lane.h"
#include "lockstep/shm/memory.h"

namespace lockstep::shm {

/// One rank's place in a team.
struct Seat {
  int rank = 0;
  int size = 1;
  /// For messages: what the ranks are called outside, if not 0, 1, …
  std::vector<int> names = {};
  std::string group = "";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Asked now and then while waiting; throws to give up. For ranks that are threads and fail together.
  std::function<void()> interrupt = nullptr;

  std::string name_of(int rank) const;
  /// "[lockstep/shm] rank 1 of 4" or "[lockstep/shm] rank 5 (1 of 2 in group 'odd')".
  std::string who() const;
};

class OwnProcess;
class PeerProcess;
class Pool;

class Team {
 public:
  /// What a word begins with that tells why its rank cannot come.
  static constexpr char kComplaint = '!';
  /// Ranks are processes of one host and user, or threads of several. `agree` returns rank 0's argument on every rank,
  /// or throws if some rank's is a complaint. Collective.
  static std::shared_ptr<Team> of_processes(Seat seat, const std::function<std::string(const std::string&)>& agree);
  /// Ranks are threads of this process that give the same key, which nobody used before. Collective.
  static std::shared_ptr<Team> of_threads(Seat seat, const std::string& key);

  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  const Seat& seat() const { return seat_; }
  int rank() const { return seat_.rank; }
  int size() const { return seat_.size; }
  const Layout& layout() const { return layout_; }
  bool shares_address_space() const { return room_ != nullptr; }

  Lane& lane(int rank) const { return *reinterpret_cast<Lane*>(base(rank)); }
  std::byte* slot(int rank, std::uint32_t step) const {
    return base(rank) + layout_.ring + (step % kSlots) * layout_.slot_bytes;
  }
  /// The channel `from` owns towards `to`, and its chunk of a number.
  Channel& channel(int from, int to) const {
    return *reinterpret_cast<Channel*>(base(from) + layout_.channels +
                                       static_cast<std::size_t>(to) * layout_.channel_bytes);
  }
  std::byte* message_chunk(int from, int to, std::uint32_t number) const;
  /// Makes my channel to `to` usable.
  void open_channel(int to);

  /// A number by which the others find my memory at `at`, if all of it is shared.
  std::optional<std::uint64_t> locate(const std::byte* at, std::size_t bytes) const;
  std::byte* resolve(int rank, std::uint64_t location) const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it was a pointer of this process
    return room_ ? reinterpret_cast<std::byte*>(location) : pools_[static_cast<std::size_t>(rank)] + location;
  }
  /// The same for a location and a length that a rank only claims to have: null if they are outside of its pool.
  std::byte* resolve_claim(int rank, std::uint64_t location, std::uint64_t bytes) const;

  /// My process's memory for zero-copy tensors, in this team and all others: nothing among threads, who need none.
  std::shared_ptr<Pool> pool() const;

  /// False in a process forked off the one that made the team: there it must not speak for the rank.
  bool is_at_home() const;

  /// Tells the others why this rank can go no further. The first reason stays.
  void fail(const std::string& reason);
  /// Why some rank can go no further, in the words of the one that noticed.
  std::optional<std::string> failure() const;
  bool is_gone(int rank) const;
  /// What hangs up when the rank's process ends; -1 for ranks of this one.
  int lifeline(int rank) const;
  /// Tells the others that this rank will take part in nothing more. Its memory stays while the team lives.
  void leave();
  bool has_left(int rank) const { return lane(rank).has_left.load(std::memory_order_acquire) != 0; }

 private:
  struct Room;
  Team(Seat seat);
  std::byte* base(int rank) const { return bases_[static_cast<std::size_t>(rank)]; }

  // Fixed once made.
  const Seat seat_;
  const int home_;  // the fork_generation() of the process that made it
  const Layout layout_;
  std::vector<std::byte*> bases_;
  std::shared_ptr<Room> room_;                        // threads
  std::vector<SharedMemory> memories_;                // processes: one per rank
  std::shared_ptr<OwnProcess> process_;               // processes
  std::vector<std::shared_ptr<PeerProcess>> others_;  // processes: nothing for ranks in this one
  std::vector<std::byte*> pools_;                     // processes: as mapped here
  std::vector<bool> open_channels_;                   // touched by the thread that sends
};

}  // namespace lockstep::shm
