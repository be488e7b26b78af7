#include "cli/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <iostream>
#include <optional>
#include <system_error>

#include "cli/ended_ranks.h"
#include "cli/output.h"
#include "cli/summary.h"
#include "lockstep/base/env.h"
#include "lockstep/base/signal_sets.h"
#include "lockstep/base/str.h"
#include "lockstep/launch/job.h"
#include "lockstep/launch/launch_environment.h"
#include "lockstep/launch/port.h"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Shared with the signal handler.
std::atomic<Job*> running_job{nullptr};
std::atomic<int> first_signal{0};
static_assert(std::atomic<Job*>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

extern "C" void on_signal(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
  if (Job* job = running_job.load()) job->interrupt(signal);
}

void handle_signals() {
  ::signal(SIGPIPE, SIG_IGN);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGHUP}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    // Under nohup the job shall outlive the terminal.
    if (signal == SIGHUP && action.sa_handler == SIG_IGN) continue;
    // No SA_RESTART: a write to a reader that does not read must come back.
    action = {};
    action.sa_handler = on_signal;
    ::sigaction(signal, &action, nullptr);
  }
}

// Makes a job the one that signals go to.
class SignalTarget {
 public:
  explicit SignalTarget(Job& job) {
    // Blocked meanwhile, so that a signal reaches the job exactly once; coming twice would mean "kill".
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    ::sigprocmask(SIG_SETMASK, &all, &before);
    running_job = &job;
    if (const int signal = first_signal) job.interrupt(signal);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
  }
  SignalTarget(const SignalTarget&) = delete;
  SignalTarget& operator=(const SignalTarget&) = delete;
  ~SignalTarget() { running_job = nullptr; }
};

bool has_survivor(const JobResult& result) {
  return !result.timed_out && !result.interrupted_by &&
         std::any_of(result.ranks.begin(), result.ranks.end(), [](const auto& each) { return each.status.ok(); });
}

// Ranks that know the request write where their threads are; others would die of it. False if there are none.
bool ask_for_stacks(Job& job, const std::vector<int>& ranks) {
  bool any = false;
  for (const int rank : ranks) {
    const auto pid = job.pid(rank);
    if (!pid || !is_in_signal_set(str("/proc/", *pid, "/status"), "SigCgt", SIGUSR2)) continue;
    any = job.signal_rank(rank, SIGUSR2) || any;
  }
  return any;
}

class Launcher {
 public:
  explicit Launcher(const RunOptions& options)
      : options_(options),
        started_at_(Clock::now()),
        output_(
            {.prefix = options.prefix, .log_dir = options.log_dir, .in_a_hurry = [] { return first_signal != 0; }}) {
    layout_.ranks_per_node = options.ranks_per_node;
    layout_.node_count = options.node_count;
    layout_.node_rank = options.node_rank;
    layout_.max_restarts = options.max_restarts;
    if (options.master) {
      layout_.master_host = options.master->host;
      layout_.master_port = options.master->port;
    }
    layout_.run_id = options.node_count > 1 ? str("lockstep-", layout_.master_host, "-", layout_.master_port)
                                            : str("lockstep-", ::getpid(), "-", std::time(nullptr));
    choose_omp_threads();
  }

  int run() {
    for (layout_.restart_count = 0;; ++layout_.restart_count) {
      const JobResult result = run_attempt();
      std::cerr << summary(result) << std::flush;
      if (options_.survivors && has_survivor(result)) return 0;
      const bool may_restart = result.first_failed && !result.interrupted_by && first_signal == 0;
      if (!may_restart || layout_.restart_count == options_.max_restarts) return exit_code(result);
      std::cerr << "lockstep-run: restarting all ranks (" << layout_.restart_count + 1 << " of "
                << options_.max_restarts << ")\n";
    }
  }

 private:
  void choose_omp_threads() {
    const int cores = available_cores();
    omp_threads_ = omp_threads_per_rank(env("OMP_NUM_THREADS").has_value(), options_.ranks_per_node, cores);
    if (!omp_threads_) return;
    std::cerr << "lockstep-run: OMP_NUM_THREADS=" << *omp_threads_ << " for each of " << options_.ranks_per_node
              << " ranks on " << cores << (cores == 1 ? " core" : " cores") << "; set it to choose otherwise\n";
  }

  JobResult run_attempt() {
    // A new port for each attempt: connections of the last one may linger on the old one.
    std::optional<PortReservation> port;
    if (!options_.master) layout_.master_port = port.emplace().port();
    const EndedRanks ended;
    if (options_.survivors) {
      if (ended.path().empty()) throw std::system_error(errno, std::generic_category(), "no folder for --survivors");
      layout_.store_file = ended.path() + "/store";  // which outlives every rank
    }
    JobOptions options;
    for (int local_rank = 0; local_rank < options_.ranks_per_node; ++local_rank) {
      options.ranks.push_back({layout_.rank(local_rank), options_.command, environment(local_rank)});
      if (!ended.path().empty()) options.ranks.back().environment[kEndedVariable] = ended.path();
    }
    options.on_line = [this](int rank, OutputStream stream, std::string_view line) {
      output_.write_line(rank, stream, line);
    };
    options.keep_last_lines = 10;
    options.timeout = time_left();
    options.grace = options_.grace;
    options.on_end = [&ended](int rank, const ExitStatus& status) { ended.add(rank, status); };
    options.on_timeout = ask_for_stacks;
    options.linger_after_timeout = std::chrono::milliseconds(2000);
    // Survivors name the rank that is gone, over gloo after a grace of 0.8 s of their own.
    options.linger_after_failure = std::chrono::milliseconds(1500);
    options.stop_others_on_failure = !options_.survivors;
    output_.begin_attempt(layout_.restart_count, options.ranks);
    Job job(std::move(options));
    const SignalTarget target(job);
    return job.run();
  }

  EnvironmentChanges environment(int local_rank) const {
    EnvironmentChanges changes = variables_for_rank(layout_, local_rank);
    if (omp_threads_) changes["OMP_NUM_THREADS"] = std::to_string(*omp_threads_);
    // As torchrun does.
    constexpr const char* kNcclErrors = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    if (!env(kNcclErrors)) changes[kNcclErrors] = "1";
    // A pipe makes Python keep lines back, and lose them when it is killed. C++ programs are told by init().
    constexpr const char* kPythonOutput = "PYTHONUNBUFFERED";
    if (!env(kPythonOutput)) changes[kPythonOutput] = "1";
    return changes;
  }

  // The timeout is for the whole run, not for each attempt.
  std::optional<std::chrono::milliseconds> time_left() const {
    if (!options_.timeout) return std::nullopt;
    const auto used = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_at_);
    return std::max(std::chrono::milliseconds(0), *options_.timeout - used);
  }

  const RunOptions& options_;
  const Clock::time_point started_at_;
  Output output_;
  LaunchLayout layout_;
  std::optional<int> omp_threads_;
};

// As shells do: 127 if the program does not exist, 126 if it cannot be executed.
int code_for(const std::system_error& error) {
  switch (error.code().value()) {
    case ENOENT:
    case ENOTDIR:
      return 127;
    case EACCES:
    case EPERM:
    case ENOEXEC:
    case E2BIG:
      return 126;
    default:
      return 1;
  }
}

}  // namespace

int launch(const RunOptions& options) {
  handle_signals();
  try {
    return Launcher(options).run();
  } catch (const std::system_error& error) {
    std::cerr << "lockstep-run: " << error.what() << "\n";
    return code_for(error);
  } catch (const std::exception& error) {
    std::cerr << "lockstep-run: " << error.what() << "\n";
    return 1;
  }
}

}  // namespace lockstep::cli
