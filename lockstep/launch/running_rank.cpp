#include "lockstep/launch/running_rank.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

constexpr int kReportFd = 3;
// Per call, so that one talkative rank does not keep the others, or the clock, waiting.
constexpr int kReadsPerUpdate = 4;

enum class ReadOutcome { kBytes, kNothingYet, kEnd };

ReadOutcome read_some(int fd, std::string_view& bytes) {
  static thread_local std::array<char, 1 << 16> buffer;
  for (;;) {
    const ssize_t count = ::read(fd, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return ReadOutcome::kNothingYet;
    if (count <= 0) return ReadOutcome::kEnd;
    bytes = std::string_view(buffer.data(), static_cast<std::size_t>(count));
    return ReadOutcome::kBytes;
  }
}

// Calls `take` with what there is. Returns whether the stream is still open. When nobody of the tree is left to write
// (`drain`), reads to the end, and treats a pipe that escaped to a stranger as closed.
template <class Take>
bool read_stream(int fd, bool drain, const Take& take) {
  std::string_view bytes;
  for (int reads = 0; drain || reads < kReadsPerUpdate; ++reads) {
    switch (read_some(fd, bytes)) {
      case ReadOutcome::kBytes:
        take(bytes);
        break;
      case ReadOutcome::kNothingYet:
        return !drain;
      case ReadOutcome::kEnd:
        return false;
    }
  }
  return true;
}

UniqueFd open_report(UniqueFd& reader) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "cannot create a pipe");
  reader.reset(fds[0]);
  ::fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return UniqueFd(fds[1]);
}

}  // namespace

RunningRank::RunningRank(const JobOptions& options, const RankSpec& spec)
    : options_(options),
      spec_(spec),
      started_at_(Child::Clock::now()),
      child_(child_options(options, spec, options.collect_reports ? open_report(report_reader_).get() : -1)),
      stdout_lines_(options.max_line_bytes),
      stderr_lines_(options.max_line_bytes) {}

ChildOptions RunningRank::child_options(const JobOptions& options, const RankSpec& spec, int report_writer) {
  ChildOptions result{.argv = spec.argv, .environment = spec.environment, .inherited_fds = {}};
  // Also when there is none: the number from a job around this one means nothing here.
  result.environment[kReportFdVariable] = std::nullopt;
  if (options.collect_reports) {
    result.environment[kReportFdVariable] = std::to_string(kReportFd);
    result.inherited_fds.push_back({.fd = report_writer, .as = kReportFd});
  }
  return result;
}

void RunningRank::add_events(std::vector<pollfd>& events) const {
  if (!child_.is_gone()) events.push_back({child_.event_fd(), POLLIN, 0});
  if (stdout_open_) events.push_back({child_.stdout_fd(), POLLIN, 0});
  if (stderr_open_) events.push_back({child_.stderr_fd(), POLLIN, 0});
  if (report_reader_) events.push_back({report_reader_.get(), POLLIN, 0});
}

void RunningRank::update() {
  child_.update();
  if (stdout_open_) stdout_open_ = read_output(child_.stdout_fd(), OutputStream::kStdout, stdout_lines_);
  if (stderr_open_) stderr_open_ = read_output(child_.stderr_fd(), OutputStream::kStderr, stderr_lines_);
  if (report_reader_ && !read_report()) report_reader_.reset();
}

bool RunningRank::read_output(int fd, OutputStream stream, LineSplitter& lines) {
  const auto sink = [&](std::string_view line) { take_line(stream, line); };
  const bool open = read_stream(fd, child_.is_gone(), [&](std::string_view bytes) { lines.add(bytes, sink); });
  if (!open) lines.finish(sink);
  return open;
}

bool RunningRank::read_report() {
  return read_stream(report_reader_.get(), child_.is_gone(), [&](std::string_view bytes) { report_.append(bytes); });
}

void RunningRank::take_line(OutputStream stream, std::string_view line) {
  if (options_.on_line) options_.on_line(spec_.rank, stream, line);
  // An uncaught c10::Error ends with dozens of them, after what it says.
  if (line.starts_with("frame #")) return;
  last_lines_.emplace_back(line);
  if (last_lines_.size() > options_.keep_last_lines) last_lines_.pop_front();
}

RankResult RunningRank::result(std::optional<Child::Clock::time_point> stopping_began_at) const {
  const auto duration = child_.exit_time() - started_at_;
  return {.rank = spec_.rank,
          .started = true,
          .status = child_.exit_status().value_or(ExitStatus{}),
          .last_lines = {last_lines_.begin(), last_lines_.end()},
          .report = report_,
          .duration = std::chrono::duration_cast<std::chrono::milliseconds>(duration),
          .stopped_by_us = stopping_began_at && child_.exit_time() >= *stopping_began_at};
}

}  // namespace lockstep::detail
