// The meeting place behind ThreadBackend. Internal to comm; see thread_backend.h for the idea.
//
// Locking: one mutex per hub guards all meetings. The operation itself runs outside it, on the thread of the last rank
// to arrive, while every other rank of the meeting can only wait, so tensors are never touched by two threads.
#pragma once

#include <c10/core/Event.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/comm/threads/thread_backend.h"

namespace lockstep {

/// One rank's part in one collective.
struct Seat {
  Call call;
  /// The caller's own tensors, also when the call works on buffers.
  std::vector<at::Tensor> results;
  /// Late completion: buffers the operation works on, and the tensors they are delivered to in wait().
  std::vector<std::pair<at::Tensor, at::Tensor>> undelivered;
  /// Accelerator tensors: what the rank had enqueued when it called.
  std::shared_ptr<c10::Event> ready;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Meeting {
  explicit Meeting(std::size_t size) : seats(size) {}
  std::vector<std::optional<Seat>> seats;
  std::size_t arrived = 0;
  bool is_done = false;
  std::exception_ptr error;
  std::shared_ptr<c10::Event> finished;  // accelerator tensors: recorded after the operation
};

class ThreadHub : public std::enable_shared_from_this<ThreadHub> {
 public:
  ThreadHub(int size, std::string group_name, std::shared_ptr<ThreadRun> run);

  /// Returns the hub of `key`, made by whichever rank comes first. Called once per rank.
  static std::shared_ptr<ThreadHub> attach(const std::string& key, int size, const std::string& group_name);

  /// Takes rank's seat in meeting `sequence`, and runs the operation if it was the last free one. Does not block on
  /// others.
  std::shared_ptr<Meeting> arrive(int rank, uint64_t sequence, Call&& call);
  /// Blocks until the operation ran, then delivers. Throws its error, PeerFailure, or a timeout that names missing
  /// ranks.
  void wait(Meeting& meeting, int rank, uint64_t sequence, std::chrono::milliseconds timeout);
  bool is_done(const Meeting& meeting) const;
  /// The future of rank's part; outputs are delivered when it completes.
  c10::intrusive_ptr<c10::ivalue::Future> future(Meeting& meeting, int rank);

  void abort(const std::string& reason);
  std::string describe_pending() const;

 private:
  void finish(Meeting& meeting, std::exception_ptr error);
  std::vector<int> missing_ranks(const Meeting& meeting) const;
  std::string where(int rank, uint64_t sequence) const;

  // Fixed after construction.
  const int size_;
  const std::string group_name_;
  const std::shared_ptr<ThreadRun> run_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::shared_ptr<Meeting>> open_meetings_;
  std::string abort_reason_;
};

/// Why the calls of two ranks cannot be one collective, or nothing if they can.
std::optional<std::string> find_mismatch(const Call& one, const Call& other);

/// Performs the collective for all ranks, in rank order. calls[r] is rank r's.
void perform(const std::vector<const Call*>& calls);

}  // namespace lockstep
