// Messages from one rank to another. They pass collectives by: a thread of their own moves them, chunk by chunk, so
// that ranks may send to each other at the same time and receive in any order of tags.
//
// Messages from one sender with one tag arrive in order. A message nobody has asked for stays with its sender, except
// when it stands in the way of one that somebody has.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/shm/request.h"
#include "lockstep/shm/team.h"

namespace lockstep::shm {

/// Held by shared_ptr: its thread, once there is one, keeps it too.
class Messages : public std::enable_shared_from_this<Messages> {
 public:
  /// From whoever sends first.
  static constexpr int kAnyRank = -1;
  /// Called once, from the messages' thread, with the sender's or receiver's rank. Must not wait for another message.
  using Done = std::function<void(std::exception_ptr error, int peer)>;

  struct Transfer {
    int peer = kAnyRank;
    std::int64_t tag = 0;
    Span span;
    DType dtype = DType::kFloat;
    std::size_t element_bytes = 1;
    std::chrono::milliseconds timeout = std::chrono::minutes(30);
    Done done;
  };

  explicit Messages(std::shared_ptr<Team> team);

  /// Neither blocks. The memory must stay until `done`.
  void send(Transfer transfer);
  void receive(Transfer transfer);

  /// Fails what is under way with `reason`. Whoever makes an object of this class calls it at the end.
  void close(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    Transfer transfer;
    Clock::time_point deadline;
    std::size_t moved = 0;
    bool has_begun = false;
  };
  /// A message that stood in the way.
  struct Stored {
    std::int64_t tag = 0;
    DType dtype = DType::kFloat;
    std::vector<std::byte> bytes;
  };
  /// What arrives from one rank: the message under way goes to a receiver, into store, or nowhere.
  struct Incoming {
    std::unique_ptr<Pending> receiver;
    std::unique_ptr<Stored> store;
    std::size_t moved = 0;
    std::size_t bytes = 0;
    bool is_under_way = false;
    std::deque<Stored> stored;
  };

  void add(Transfer transfer, std::deque<std::unique_ptr<Pending>>& list);
  void work();
  void accept_new();
  bool move_all();
  bool is_idle() const;
  bool push(int to);
  bool pull(int from);
  bool begin_message(int from, const Channel::Slot& slot);
  bool serve_from_store();
  std::unique_ptr<Pending> take_receiver(int from, std::int64_t tag);
  bool wants_from(int from) const;
  void look_after();
  void finish(std::unique_ptr<Pending> pending, int peer, const std::string& problem);
  std::string describe(const Pending& pending, bool is_send) const;
  std::string describe_mismatch(const Pending& receiver, int from, std::size_t bytes, DType dtype) const;
  template <class Match>
  void fail_where(const Match& match);

  const std::shared_ptr<Team> team_;

  std::mutex mutex_;  // guards what other threads add
  std::deque<std::unique_ptr<Pending>> new_sends_;
  std::deque<std::unique_ptr<Pending>> new_receives_;
  std::optional<std::string> close_reason_;  // once it is closed
  std::thread thread_;

  // The messages' thread only.
  std::vector<std::deque<std::unique_ptr<Pending>>> sends_;  // by receiver
  std::deque<std::unique_ptr<Pending>> receives_;            // in the order asked
  std::vector<Incoming> incoming_;                           // by sender
  bool is_ending_ = false;
  std::vector<int> times_seen_gone_;
  std::vector<std::function<void()>> finished_;
};

}  // namespace lockstep::shm
