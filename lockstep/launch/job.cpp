#include "lockstep/launch/job.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <iterator>
#include <set>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/str.h"
#include "lockstep/launch/running_rank.h"

namespace lockstep {
namespace {

// From the messages of comm, shm and rpc about ranks that are no longer there.
constexpr const char* kBlame[] = {"is gone: its process ended",
                                  "gone, hung or late",
                                  "left by an exception",
                                  "has left the group",
                                  "gave up",
                                  "before it came"};

bool blames_a_peer(const std::vector<std::string>& lines) {
  return std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    return std::any_of(std::begin(kBlame), std::end(kBlame),
                       [&](const char* words) { return line.find(words) != std::string::npos; });
  });
}

}  // namespace

bool JobResult::ok() const {
  return !timed_out && !interrupted_by &&
         std::all_of(ranks.begin(), ranks.end(), [](const RankResult& each) { return each.status.ok(); });
}

const RankResult& JobResult::at(int rank) const {
  for (const auto& each : ranks) {
    if (each.rank == rank) return each;
  }
  throw std::out_of_range(str("the job has no rank ", rank));
}

Job::Job(JobOptions options) : options_(std::move(options)) {
  if (options_.ranks.empty()) throw std::invalid_argument("a job needs at least one rank");
  std::set<int> seen;
  for (const auto& spec : options_.ranks) {
    if (spec.argv.empty()) throw std::invalid_argument(str("rank ", spec.rank, " has no program to run"));
    if (!seen.insert(spec.rank).second) throw std::invalid_argument(str("rank ", spec.rank, " is named twice"));
  }
  if (options_.max_line_bytes == 0) throw std::invalid_argument("max_line_bytes must be at least 1");
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot create a pipe");
  }
  interrupt_reader_.reset(fds[0]);
  interrupt_writer_.reset(fds[1]);
}

Job::~Job() = default;

JobResult Job::run() {
  if (started_at_ != Clock::time_point{}) throw std::logic_error("a job runs only once");
  started_at_ = Clock::now();
  try {
    start();
    while (!is_done()) {
      wait_for_events();
      for (const auto& each : running_) each->update();
      announce_ends();
      stop_after_failure();
      read_interrupts();
      act_on_time();
    }
  } catch (...) {
    // All at once, rather than one by one in the destructors.
    signal_all(SIGKILL);
    running_.clear();
    throw;
  }
  return result();
}

void Job::interrupt(int signal) noexcept {
  const int saved_errno = errno;
  const auto byte = static_cast<unsigned char>(signal);
  (void)!::write(interrupt_writer_.get(), &byte, 1);
  errno = saved_errno;
}

bool Job::signal_rank(int rank, int signal) {
  detail::RunningRank* running = find_running(rank);
  if (running == nullptr) return false;
  running->child().signal_program(signal);
  return true;
}

std::optional<pid_t> Job::pid(int rank) const {
  const detail::RunningRank* running = find_running(rank);
  if (running == nullptr) return std::nullopt;
  return running->child().pid();
}

void Job::start() {
  for (const auto& spec : options_.ranks) {
    read_interrupts();
    if (phase_ != Phase::kRunning) return;
    running_.push_back(std::make_unique<detail::RunningRank>(options_, spec));
  }
}

void Job::wait_for_events() const {
  std::vector<pollfd> events = {{interrupt_reader_.get(), POLLIN, 0}};
  for (const auto& each : running_) each->add_events(events);
  int timeout_ms = -1;
  if (const auto deadline = next_deadline()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline - Clock::now()).count();
    timeout_ms = static_cast<int>(std::clamp<long long>(left, 0, 3'600'000));
  }
  ::poll(events.data(), events.size(), timeout_ms);
}

void Job::announce_ends() {
  if (!options_.on_end) return;
  for (const auto& each : running_) {
    if (each->is_end_news()) options_.on_end(each->rank(), *each->child().exit_status());
  }
}

void Job::read_interrupts() {
  unsigned char signal = 0;
  while (::read(interrupt_reader_.get(), &signal, 1) == 1) {
    if (interrupted_by_) {
      kill_all();
    } else {
      interrupted_by_ = signal;
      stop(signal);
    }
  }
}

void Job::stop_after_failure() {
  if (phase_ != Phase::kRunning || !options_.stop_others_on_failure) return;
  const bool any_failed =
      std::any_of(running_.begin(), running_.end(), [](const auto& each) { return each->failed(); });
  if (!any_failed) return;
  phase_ = Phase::kLingering;
  phase_ends_at_ = Clock::now() + options_.linger_after_failure;
}

void Job::act_on_time() {
  const auto deadline = next_deadline();
  if (!deadline || Clock::now() < *deadline) return;
  switch (phase_) {
    case Phase::kRunning:
      return time_out();
    case Phase::kLingering:
      return stop(SIGTERM);
    case Phase::kStopping:
      return kill_all();
    case Phase::kKilling:
      return;
  }
}

std::optional<Job::Clock::time_point> Job::next_deadline() const {
  if (phase_ != Phase::kRunning) return phase_ends_at_;
  if (!options_.timeout) return std::nullopt;
  return started_at_ + *options_.timeout;
}

void Job::time_out() {
  timed_out_ = true;
  alive_at_timeout_ = alive_ranks();
  stopping_began_at_ = Clock::now();
  if (!options_.on_timeout || !options_.on_timeout(*this, alive_at_timeout_)) return stop(SIGTERM);
  phase_ = Phase::kLingering;
  phase_ends_at_ = Clock::now() + options_.linger_after_timeout;
}

void Job::stop(int signal) {
  if (!stopping_began_at_) stopping_began_at_ = Clock::now();
  signal_all(signal);
  // A second reason to stop does not prolong the grace.
  if (phase_ == Phase::kStopping || phase_ == Phase::kKilling) return;
  phase_ = Phase::kStopping;
  phase_ends_at_ = Clock::now() + options_.grace;
}

void Job::signal_all(int signal) {
  for (const auto& each : running_) each->child().kill(signal);
}

void Job::kill_all() {
  signal_all(SIGKILL);
  phase_ = Phase::kKilling;
  phase_ends_at_.reset();
}

bool Job::is_done() const {
  return std::all_of(running_.begin(), running_.end(), [](const auto& each) { return each->is_done(); });
}

std::vector<int> Job::alive_ranks() const {
  std::vector<int> alive;
  for (const auto& each : running_) {
    if (each->runs()) alive.push_back(each->rank());
  }
  return alive;
}

detail::RunningRank* Job::find_running(int rank) const {
  for (const auto& each : running_) {
    if (each->rank() == rank && each->runs()) return each.get();
  }
  return nullptr;
}

JobResult Job::result() const {
  JobResult result{.ranks = {},
                   .first_failed = {},
                   .timed_out = timed_out_,
                   .alive_at_timeout = alive_at_timeout_,
                   .interrupted_by = interrupted_by_};
  for (std::size_t i = 0; i < options_.ranks.size(); ++i) {
    if (i >= running_.size()) {
      result.ranks.push_back({.rank = options_.ranks[i].rank, .status = {}, .last_lines = {}, .report = {}});
      continue;
    }
    result.ranks.push_back(running_[i]->result(stopping_began_at_));
  }
  result.first_failed = first_failed(result.ranks);
  return result;
}

// [Note: who failed first] By the guardians' clocks, as a rule. But a rank that fails may take longer to end than those
// that it takes along: it unwinds its groups, on which the others fail at once. So of all that failed within the time
// others have to notice it, one that does not blame a peer goes before those that do.
std::optional<int> Job::first_failed(const std::vector<RankResult>& ranks) const {
  std::vector<std::size_t> failed;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    if (running_[i]->failed() && !ranks[i].stopped_by_us) failed.push_back(i);
  }
  if (failed.empty()) return std::nullopt;
  const auto time = [&](std::size_t i) { return running_[i]->child().exit_time(); };
  std::stable_sort(failed.begin(), failed.end(), [&](auto one, auto other) { return time(one) < time(other); });
  const auto end = time(failed[0]) + options_.linger_after_failure;
  for (const auto each : failed) {
    if (time(each) <= end && !blames_a_peer(ranks[each].last_lines)) return ranks[each].rank;
  }
  return ranks[failed[0]].rank;
}

}  // namespace lockstep
