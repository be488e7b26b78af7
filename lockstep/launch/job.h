// The ranks of one job on this machine: started together, watched, stopped together. One thread calls run(); the
// callbacks run on that thread. When run() returns or throws, no process of the job is left. Neither output nor
// reports are ever a reason for a rank to block for long: run() reads them all the time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/child.h"
#include "lockstep/launch/exit_status.h"

namespace lockstep {

class Job;

namespace detail {
class RunningRank;
}

/// Names the file descriptor a rank may write its report to; set if JobOptions::collect_reports.
inline constexpr const char* kReportFdVariable = "LOCKSTEP_REPORT_FD";

enum class OutputStream { kStdout, kStderr };

struct RankSpec {
  int rank = 0;  // the number callbacks and results use; unique within the job
  std::vector<std::string> argv;
  EnvironmentChanges environment;
};

struct JobOptions {
  std::vector<RankSpec> ranks;

  /// Each line a rank writes, without its newline; a last line without one is delivered too. A line longer than
  /// max_line_bytes comes in pieces. Empty: lines are only kept for RankResult::last_lines.
  std::function<void(int rank, OutputStream stream, std::string_view line)> on_line;
  std::size_t max_line_bytes = 1 << 20;
  std::size_t keep_last_lines = 20;

  /// Gives every rank a pipe to report through, its number in LOCKSTEP_REPORT_FD.
  bool collect_reports = false;

  std::optional<std::chrono::milliseconds> timeout;

  /// Called when a rank has ended, however it did.
  std::function<void(int rank, const ExitStatus& status)> on_end;

  /// Called once when the time is over, before any rank is stopped: may signal ranks, for stack dumps say. If it says
  /// that it did, output is read for up to linger_after_timeout more.
  std::function<bool(Job& job, const std::vector<int>& alive_ranks)> on_timeout;
  std::chrono::milliseconds linger_after_timeout{0};

  /// Between asking ranks to stop (SIGTERM) and killing them.
  std::chrono::milliseconds grace{5000};

  bool stop_others_on_failure = true;
  /// Before they are: time for ranks that lost a peer to notice it, say so and end by themselves. Who failed first is
  /// then told by what they say, not by the clock alone.
  std::chrono::milliseconds linger_after_failure{0};

  /// What counts as failing; a test kit's ranks may end with other codes on purpose.
  std::function<bool(const ExitStatus& status)> is_failure = [](const ExitStatus& status) { return !status.ok(); };
};

struct RankResult {
  int rank = 0;
  bool started = false;                 // false only if an interrupt came before its turn
  ExitStatus status;                    // ended() if started
  std::vector<std::string> last_lines;  // both streams, in order of arrival, without libtorch's stack frames
  std::string report;
  std::chrono::milliseconds duration{0};
  bool stopped_by_us = false;  // it still ran when the job began to stop its ranks
};

struct JobResult {
  std::vector<RankResult> ranks;    // as in JobOptions::ranks
  std::optional<int> first_failed;  // see [Note: who failed first]; never one that was stopped by us
  bool timed_out = false;
  std::vector<int> alive_at_timeout;
  std::optional<int> interrupted_by;  // the first signal given to interrupt()

  bool ok() const;
  /// Throws std::out_of_range for a rank that is not part of the job.
  const RankResult& at(int rank) const;
};

class Job {
 public:
  /// Starts nothing yet. Throws std::invalid_argument for no ranks, a rank without a program, or a rank named twice.
  explicit Job(JobOptions options);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();

  /// Starts the ranks and blocks until all have ended. To be called once. Throws std::system_error if a rank cannot be
  /// started, and whatever a callback throws; the ranks are killed first.
  JobResult run();

  /// Asks run() to stop. The first call forwards `signal` to all ranks, which then have the grace to end; a second call
  /// kills. Async-signal-safe, from any thread, also before run().
  void interrupt(int signal) noexcept;

  /// Sends a signal to the program of a rank, not to processes it started; false if it no longer runs. For callbacks.
  bool signal_rank(int rank, int signal);

  /// The program's process id while the rank runs, for debuggers and tests; nullopt otherwise. For callbacks.
  std::optional<pid_t> pid(int rank) const;

 private:
  using Clock = Child::Clock;
  enum class Phase { kRunning, kLingering, kStopping, kKilling };

  void start();
  void wait_for_events() const;
  void announce_ends();
  void read_interrupts();
  void stop_after_failure();
  void act_on_time();
  void time_out();
  void stop(int signal);
  void signal_all(int signal);
  void kill_all();
  bool is_done() const;
  std::optional<Clock::time_point> next_deadline() const;
  std::vector<int> alive_ranks() const;
  detail::RunningRank* find_running(int rank) const;
  JobResult result() const;
  std::optional<int> first_failed(const std::vector<RankResult>& ranks) const;

  // Fixed after construction.
  const JobOptions options_;
  UniqueFd interrupt_reader_;
  UniqueFd interrupt_writer_;

  // Only touched by the thread in run().
  std::vector<std::unique_ptr<detail::RunningRank>> running_;  // a prefix of options_.ranks: the started ones
  Phase phase_ = Phase::kRunning;
  Clock::time_point started_at_{};
  std::optional<Clock::time_point> phase_ends_at_;      // set in kLingering and kStopping
  std::optional<Clock::time_point> stopping_began_at_;  // timeout or first stop: what ends later did not fail by itself
  bool timed_out_ = false;
  std::vector<int> alive_at_timeout_;
  std::optional<int> interrupted_by_;
};

}  // namespace lockstep
