#include "lockstep/testing/process_ranks.h"

#include <unistd.h>

#include <climits>
#include <csignal>
#include <sstream>

#include "lockstep/base/stack_dump.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/launch/job.h"
#include "lockstep/testing/rank_job.h"
#include "lockstep/testing/rank_process.h"
#include "lockstep/testing/skip.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::testing {

namespace detail {

namespace {

std::string own_program() {
  std::string path(PATH_MAX, '\0');
  const auto length = ::readlink("/proc/self/exe", path.data(), path.size());
  TORCH_CHECK(length > 0, "[lockstep/testing] cannot find the running program");
  path.resize(static_cast<std::size_t>(length));
  return path;
}

// Of a rank that was stopped: it is others whose stacks matter.
constexpr int kStoppedFrames = 12;

std::string first_lines(const std::string& text, int count) {
  std::size_t end = 0;
  for (int line = 0; line < count; ++line) {
    const auto found = text.find('\n', end);
    if (found == std::string::npos) return text;
    end = found + 1;
  }
  return text.substr(0, end) + (end < text.size() ? "  …\n" : "");
}

}  // namespace

JobOptions rank_job(const RunOptions& options, const ProcessCall& call, const std::string& store_path) {
  JobOptions job;
  job.collect_reports = true;
  job.keep_last_lines = 40;
  job.timeout = options.timeout;
  // Asked to stop, a rank says where it is and ends; this is how long it may take to do so.
  job.grace = std::chrono::seconds(5);
  const auto program = own_program();
  for (int rank = 0; rank < options.world_size; ++rank) {
    RankSpec spec;
    spec.rank = rank;
    spec.argv = {program};
    spec.argv.insert(spec.argv.end(), call.arguments.begin(), call.arguments.end());
    spec.environment = {
        {kCallVariable, call.name},
        {kRankVariable, std::to_string(rank)},
        {kWorldSizeVariable, std::to_string(options.world_size)},
        {kStoreVariable, store_path},
        {"LOCAL_RANK", std::to_string(rank)},
        {"LOCAL_WORLD_SIZE", std::to_string(options.world_size)},
        {"OMP_NUM_THREADS", "1"},
    };
    for (const auto& name : call.unset) spec.environment[name] = std::nullopt;
    job.ranks.push_back(std::move(spec));
  }
  return job;
}

RankOutcome outcome_of(const RankResult& rank, bool was_alive_at_timeout, std::optional<int> expected_code) {
  const auto mark = rank.report.find(kStoppedMark);
  auto text = rank.report.substr(0, mark);
  if (mark != std::string::npos) {
    // Event lines are readable as they are; frames start with the first line that has an address.
    const auto where = rank.report.substr(mark + sizeof(kStoppedMark) - 1);
    std::string events;
    std::string frames;
    std::istringstream lines(where);
    for (std::string line; std::getline(lines, line);) {
      auto& part = line.starts_with("  ") ? events : frames;
      part += line + "\n";
    }
    const auto stack = readable_frames(frames);
    text += str("\nit did last:\n", events, "and was at:\n",
                was_alive_at_timeout ? stack : first_lines(stack, kStoppedFrames));
  }
  if (expected_code && !rank.stopped_by_us && rank.status.ended() && rank.status.shell_code() == *expected_code) {
    return {RankOutcome::Kind::kPassed, text};
  }
  if (was_alive_at_timeout) return {RankOutcome::Kind::kHung, text.empty() ? "it did not say where" : text};
  // One that was about to end by an error of its own when the others were stopped has failed as well.
  const bool is_plain_failure = rank.status.code == kFailedExitCode && !text.empty();
  if (rank.stopped_by_us && !is_plain_failure) return {RankOutcome::Kind::kStopped, text};
  if (expected_code) {
    return {RankOutcome::Kind::kFailed,
            str("expected exit code ", *expected_code, ", got ", rank.status.describe(), "\n", text)};
  }
  if (rank.status.ok() && text == kPassedMark) return {RankOutcome::Kind::kPassed, ""};
  if (rank.status.ok()) return {RankOutcome::Kind::kFailed, "it ended with code 0, but did not finish the test's body"};
  if (rank.status.code && is_skip_code(*rank.status.code)) return {RankOutcome::Kind::kSkipped, text};
  return {RankOutcome::Kind::kFailed,
          is_plain_failure && text != kForeignException
              ? text
              : str(rank.status.describe(), "\n", text, "\nlast lines:\n", join(rank.last_lines, "\n"))};
}

RunReport report_of(const JobResult& job, const RunOptions& options) {
  RunReport report;
  if (job.timed_out) {
    report.problem = str("the run did not end within ", options.timeout.count(), " ms; rank ",
                         join(job.alive_at_timeout, ", "), " still ran");
  }
  for (const auto& rank : job.ranks) {
    const auto& alive = job.alive_at_timeout;
    const bool was_alive = std::find(alive.begin(), alive.end(), rank.rank) != alive.end();
    report.ranks.push_back(outcome_of(rank, was_alive, options.expected_exit_code));
  }
  judge(report);
  return report;
}

}  // namespace detail

bool is_rank_process() {
  return detail::rank_identity().has_value();
}

RunReport run_processes(RunOptions options, const ProcessCall& call, const RankBody& body) {
  options = with_defaults(std::move(options), /*as_processes=*/true);
  if (const auto self = detail::rank_identity()) {
    if (self->call != call.name) return {};
    detail::explain_rank_termination(*self);
    std::optional<int> skip_code;
    std::optional<World> world;
    const auto outcome = detail::run_guarded(
        [&] {
          world.emplace(detail::join_world(*self, options));
          run_body(options, *world, body);
          barrier(world->group());
          world.reset();
        },
        &skip_code);
    detail::end_process(*self, outcome, skip_code);
  }
  const TempDir directory;
  auto job_options = detail::rank_job(options, call, directory.file("store"));
  // Ranks that skip, or fail on purpose, must all get the chance to.
  job_options.is_failure = [&](const ExitStatus& status) {
    return !options.expected_exit_code && !status.ok() && !(status.code && is_skip_code(*status.code));
  };
  return detail::report_of(Job(std::move(job_options)).run(), options);
}

}  // namespace lockstep::testing
