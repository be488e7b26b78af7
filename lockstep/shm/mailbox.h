// Records of any kind and order from every rank of a team to every other, for those who do not know what comes next.
//
// Each ordered pair of ranks has a ring of bytes, in the place of the team's channels: a team with a mailbox has no
// Messages. Records are whole or not there. What a peer writes is not trusted: positions and lengths are checked
// before anything is read, and each side keeps its own place in a ring to itself.
//
// Several threads of a rank may serve its mailbox, one at a time *attends*: it looks for mail while it is awake. As
// long as nobody does, senders wake one of those who doze. So a thread that stops attending to do what came by mail
// wakes nobody, and still nothing is left lying.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "lockstep/shm/team.h"

namespace lockstep::shm {

/// What a peer has written makes no sense: part of a sentence.
class BadMail : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Mailbox {
 public:
  static constexpr std::uint32_t kRingBytes = kMessageSlots * kMessageChunkBytes;
  /// Of one record. Longer ones travel by other means, a block of the pool for example.
  static constexpr std::size_t kMostBytes = kRingBytes / 8;

  explicit Mailbox(std::shared_ptr<Team> team);

  // Writing: by one thread at a time for each receiver.

  /// Where to write a record for `to`, aligned to 16 bytes, or null while the ring is full. send() follows. Throws
  /// BadMail if the receiver's place in the ring is impossible, MemoryError if there is none for the ring.
  std::byte* reserve(int to, std::size_t bytes);
  void send(int to);
  /// Has the receiver ring when it has taken something. Try reserve() once more afterwards.
  void ask_for_room(int to);

  // Reading: by the thread that attends.

  /// The oldest record of `from`, if there is one: valid until drop(). Throws BadMail.
  std::optional<std::span<const std::byte>> next(int from);
  void drop(int from);
  /// No mail of `from` is looked at any more.
  void close(int from);

  // Attending.

  /// Counts what may concern whoever attends.
  std::uint32_t bell() const;
  /// False if somebody else attends.
  bool try_attend();
  /// True if there is mail that nobody has been told of.
  bool leave();
  /// True if the bell rang since it was `seen`, false if the patience was over before.
  bool stay_awake(std::uint32_t seen, const Patience& patience) const;
  /// Sleeps until the bell is no longer `seen`, or for no reason. For threads that do not attend.
  void doze(std::uint32_t seen);

  /// Rings at `rank`'s door, my own included: who attends there looks up, or one who dozes wakes.
  void ring(int rank);
  /// Wakes one of my threads that doze, though another attends.
  void call_one();
  void call_all();

 private:
  struct Outgoing {
    std::uint32_t sent = 0;     // bytes, as published
    std::uint32_t pending = 0;  // as they will be published
    bool is_open = false;
  };
  struct Incoming {
    std::uint32_t taken = 0;   // bytes
    std::uint32_t length = 0;  // of the record that is looked at
    std::atomic<bool> is_closed = false;
  };

  std::byte* ring_of(int from, int to) const { return team_->message_chunk(from, to, 0); }
  Signal& own_bell() const { return team_->lane(team_->rank()).bell; }
  bool has_mail() const;

  const std::shared_ptr<Team> team_;
  std::vector<Outgoing> outgoing_;  // by receiver
  std::vector<Incoming> incoming_;  // by sender
  std::atomic_flag opening_;        // the team's channels are opened by one thread at a time
  std::atomic<bool> is_attended_ = false;
};

}  // namespace lockstep::shm
