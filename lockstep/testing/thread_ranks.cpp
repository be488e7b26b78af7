#include "lockstep/testing/thread_ranks.h"

#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/stack_dump.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/testing/chaos.h"
#include "lockstep/testing/event_tail.h"
#include "lockstep/testing/skip.h"

namespace lockstep::testing {
namespace {

// What a rank thread gets to end after it was woken by a failure or by the hang guard.
constexpr auto kGrace = std::chrono::seconds(10);

struct Rank {
  RankScope scope;
  EventTail tail;
  std::thread thread;
  RankOutcome outcome;
  bool was_woken = false;
  bool has_ended = false;
};

class ThreadRanks {
 public:
  ThreadRanks(RunOptions options, const RankBody& body)
      : options_(std::move(options)), body_(body), run_(std::make_shared<ThreadRun>(make_schedule())) {}

  RunReport run();

 private:
  std::shared_ptr<ThreadSchedule> make_schedule() const {
    if (options_.chaos_seed) return std::make_shared<ChaosSchedule>(*options_.chaos_seed, options_.world_size);
    if (options_.completes_late) return std::make_shared<LateSchedule>();
    return std::make_shared<ThreadSchedule>();
  }

  void run_rank(int rank);
  void run_body(int rank);
  void fail(int rank, const std::string& text);
  /// What is pending, the last events of all ranks, and the stacks of those that still run. `self` is the asking rank,
  /// or -1. REQUIRES: mutex_ not held.
  std::string whereabouts(int self);

  const RunOptions options_;
  const RankBody& body_;
  const std::shared_ptr<ThreadRun> run_;
  std::string meeting_point_;
  std::vector<std::unique_ptr<Rank>> ranks_;  // fixed once the threads run; members guarded by mutex_

  std::mutex mutex_;
  std::condition_variable ended_;
  int running_ = 0;
  std::mutex report_mutex_;  // one whereabouts() at a time
};

void ThreadRanks::fail(int rank, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    ranks_[rank]->outcome = {RankOutcome::Kind::kFailed, text};
  }
  run_->abort(str("rank ", rank, " failed: ", text.substr(0, text.find('\n'))));
}

void ThreadRanks::run_body(int rank) {
  // Else backward would run on a device thread all ranks share, and a collective in a hook would block them all.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const World world = init({.backend = options_.backend,
                            .timeout = options_.collective_timeout,
                            .init_method = meeting_point_,
                            .rank = rank,
                            .world_size = options_.world_size});
  testing::run_body(options_, world, body_);
}

void ThreadRanks::run_rank(int rank) {
  Rank& self = *ranks_[rank];
  const EnterRank enter(self.scope);
  // Else it would compute with another number of threads, and give other bits, until libtorch thinks of it.
  at::init_num_threads();
  ThreadRun::enter(run_, rank);
  {
    const ObserverScope observe(self.tail);
    try {
      run_body(rank);
    } catch (const Skip& skip) {
      {
        const std::lock_guard lock(mutex_);
        self.outcome = {RankOutcome::Kind::kSkipped, skip.reason};
      }
      run_->abort(str("rank ", rank, " skipped: ", skip.reason));
    } catch (const PeerFailure& failure) {
      const std::lock_guard lock(mutex_);
      self.was_woken = true;
      self.outcome = {RankOutcome::Kind::kStopped, lockstep::detail::first_line(failure)};
    } catch (const c10::DistBackendError& error) {
      // A deadline passed: the ranks that did not come are the interesting ones, so look at them before they are woken.
      fail(rank, str(error.what_without_backtrace(), "\n", whereabouts(rank)));
    } catch (const c10::Error& error) {
      fail(rank, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(rank, error.what());
    } catch (...) {
      fail(rank, "an exception that is no std::exception");
    }
  }
  const std::lock_guard lock(mutex_);
  self.has_ended = true;
  --running_;
  ended_.notify_all();
}

std::string ThreadRanks::whereabouts(int self) {
  const std::lock_guard one_at_a_time(report_mutex_);
  const auto pending = run_->describe_pending();
  std::string text = pending.empty() ? "" : "pending:\n" + pending;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    Rank& other = *ranks_[rank];
    text += str("rank ", rank, " did last:\n", other.tail.text());
    {
      const std::lock_guard lock(mutex_);
      if (rank == self || other.has_ended) continue;
    }
    const auto stack = stack_of(other.thread.native_handle());
    text += str("rank ", rank, " is at:\n", stack.empty() ? "  (no answer)\n" : stack);
  }
  return text;
}

RunReport ThreadRanks::run() {
  enable_stack_dumps();
  static std::atomic<uint64_t> next_run = 0;
  meeting_point_ = str("hash://threads-", next_run++);
  // Holds the store while ranks come and go; they find it by name.
  const auto store = rendezvous(meeting_point_, {}, options_.timeout);
  for (int rank = 0; rank < options_.world_size; ++rank) ranks_.push_back(std::make_unique<Rank>());
  running_ = options_.world_size;
  {
    // No rank may look at another's thread before it is set.
    const std::lock_guard lock(report_mutex_);
    for (int rank = 0; rank < options_.world_size; ++rank) {
      ranks_[rank]->thread = std::thread([this, rank] { run_rank(rank); });
    }
  }

  RunReport report;
  std::unique_lock lock(mutex_);
  if (!ended_.wait_for(lock, options_.timeout, [&] { return running_ == 0; })) {
    std::vector<int> hung;
    for (int rank = 0; rank < options_.world_size; ++rank) {
      if (!ranks_[rank]->has_ended) hung.push_back(rank);
    }
    lock.unlock();
    report.problem = str("the run did not end within ", options_.timeout.count(), " ms; rank ", join(hung, ", "),
                         " still ran\n", whereabouts(-1));
    run_->abort("the hang guard's time was over");
    lock.lock();
    if (!ended_.wait_for(lock, kGrace, [&] { return running_ == 0; })) {
      // A thread cannot be killed, and going on would free what it still uses.
      std::fprintf(stderr, "[lockstep/testing] %s\nThe ranks do not end; giving up the process.\n",
                   report.problem.c_str());
      std::fflush(nullptr);
      std::_Exit(kFailedExitCode);
    }
    for (const int rank : hung) {
      if (ranks_[rank]->outcome.kind != RankOutcome::Kind::kFailed) {
        ranks_[rank]->outcome = {RankOutcome::Kind::kHung, "see above"};
      }
    }
  }
  lock.unlock();
  for (auto& rank : ranks_) rank->thread.join();
  for (auto& rank : ranks_) report.ranks.push_back(rank->outcome);
  // Ranks woken because another skipped did not fail.
  bool has_failed = !report.problem.empty();
  for (const auto& rank : report.ranks) has_failed = has_failed || rank.kind == RankOutcome::Kind::kFailed;
  if (!has_failed) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank]->was_woken) report.problem = str("rank ", rank, " took part in a collective; others skipped");
    }
  }
  if (options_.chaos_seed) report.replay = str("LOCKSTEP_CHAOS_SEED=", *options_.chaos_seed);
  judge(report);
  return report;
}

}  // namespace

RunReport run_threads(RunOptions options, const RankBody& body) {
  return ThreadRanks(with_defaults(std::move(options), /*as_processes=*/false), body).run();
}

}  // namespace lockstep::testing
