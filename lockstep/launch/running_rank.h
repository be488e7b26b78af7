// One started rank of a job: its child, and what has been read from it so far. Internal to launch: private to Job.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/child.h"
#include "lockstep/launch/job.h"
#include "lockstep/launch/lines.h"

// NOLINTNEXTLINE(readability-identifier-naming): POSIX named it
struct pollfd;

namespace lockstep::detail {

class RunningRank {
 public:
  /// Starts the rank. Borrows both arguments. Throws std::system_error.
  RunningRank(const JobOptions& options, const RankSpec& spec);

  int rank() const { return spec_.rank; }
  Child& child() { return child_; }
  const Child& child() const { return child_; }
  bool runs() const { return !child_.exit_status(); }
  bool failed() const { return child_.exit_status() && options_.is_failure(*child_.exit_status()); }

  /// Whether the whole tree is gone and all it wrote was read.
  bool is_done() const { return child_.is_gone() && !stdout_open_ && !stderr_open_ && !report_reader_; }

  /// True once: when it is first asked after the rank has ended.
  bool is_end_news() { return !runs() && !std::exchange(end_was_told_, true); }

  /// Adds what to wait for.
  void add_events(std::vector<pollfd>& events) const;

  /// Takes in exit and output, without blocking. Runs JobOptions::on_line.
  void update();

  RankResult result(std::optional<Child::Clock::time_point> stopping_began_at) const;

 private:
  static ChildOptions child_options(const JobOptions& options, const RankSpec& spec, int report_writer);
  bool read_output(int fd, OutputStream stream, LineSplitter& lines);
  bool read_report();
  void take_line(OutputStream stream, std::string_view line);

  const JobOptions& options_;
  const RankSpec& spec_;
  UniqueFd report_reader_;
  const Child::Clock::time_point started_at_;
  Child child_;
  bool stdout_open_ = true;
  bool stderr_open_ = true;
  LineSplitter stdout_lines_;
  LineSplitter stderr_lines_;
  std::deque<std::string> last_lines_;
  std::string report_;
  bool end_was_told_ = false;
};

}  // namespace lockstep::detail
