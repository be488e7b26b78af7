// Collectives among ranks that are threads of one process; also what a world of one rank runs on.
//
// The ranks of a group share a ThreadHub. A call takes a seat at the meeting with its sequence number and returns at
// once; the last rank to arrive computes the whole operation, in rank order, so every run gives the same bits. Nobody
// computes while another waits for a lock, and a wait names the ranks that are missing.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/call_backend.h"

namespace lockstep {

/// Thrown in ranks that were waiting when another rank failed. The other rank's error is the one to report.
class PeerFailure : public c10::DistBackendError {
 public:
  using DistBackendError::DistBackendError;
};

/// Decides when things happen under threads-as-ranks. The default does nothing; the test kit's chaos scheduler does.
/// Called from all rank threads at once.
class ThreadSchedule {
 public:
  virtual ~ThreadSchedule() = default;
  /// Called on the rank's thread before it takes its seat, and before it waits. `rank` is its rank in the world.
  virtual void pause(int /*rank*/) {}
  /// True if the outputs shall appear only in wait(), and hold garbage until then, so that a missing wait is seen.
  virtual bool completes_late(int /*rank*/) { return false; }
};

class ThreadHub;

/// All hubs of one set of rank threads: what must fail together, and the schedule they share.
class ThreadRun {
 public:
  explicit ThreadRun(std::shared_ptr<ThreadSchedule> schedule = std::make_shared<ThreadSchedule>());

  /// Wakes every rank that waits in a collective, now and later, with PeerFailure(reason). The first reason stays.
  void abort(const std::string& reason);

  /// Throws PeerFailure(context + reason) once abort() was called.
  void throw_if_aborted(const std::string& context);

  ThreadSchedule& schedule() { return *schedule_; }

  /// What the ranks of the run wait for, one line per open collective, for hang reports. Empty if nobody waits.
  std::string describe_pending();

  /// The run of the calling rank; one of its own for a process that is a rank.
  static std::shared_ptr<ThreadRun> current();
  /// The calling rank's number in that run's world, whatever group it uses.
  static int current_rank();
  /// Makes `run` the one of the calling rank, which is `rank` in its world.
  static void enter(std::shared_ptr<ThreadRun> run, int rank);

 private:
  friend class ThreadHub;
  const std::shared_ptr<ThreadSchedule> schedule_;

  std::vector<std::shared_ptr<ThreadHub>> hubs();

  std::mutex mutex_;
  std::vector<std::weak_ptr<ThreadHub>> hubs_;
  std::string abort_reason_;
};

class ThreadBackend : public CallBackend {
 public:
  /// Collective over the `size` ranks that share `hub_key`; all in one process.
  ThreadBackend(const std::string& hub_key, int rank, int size, const std::string& group_name,
                std::chrono::milliseconds timeout);
  ~ThreadBackend() override;

  void abort() override;
  void fail(const std::string& reason) override;
  BackendTraits traits() const override { return {.is_idle_alone = true}; }

 protected:
  WorkPtr submit(Call&& call) override;
  uint64_t sequence_number() const override { return next_sequence_; }

 private:
  const std::shared_ptr<ThreadHub> hub_;
  uint64_t next_sequence_ = 0;
};

}  // namespace lockstep
