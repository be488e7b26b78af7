// Where the ranks' lines go: to the terminal with a prefix, and to log files. Never throws for a full disk or a closed
// pipe, for training should not die of its log; the stream concerned falls silent.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/launch/job.h"

namespace lockstep::cli {

struct OutputOptions {
  bool prefix = true;
  std::optional<std::string> log_dir;
  /// True once the user has asked to stop: a reader that does not read shall not hold us up then.
  std::function<bool()> in_a_hurry;
};

class Output {
 public:
  explicit Output(OutputOptions options);

  /// Opens the log files of an attempt, if logs are wanted; existing ones are overwritten.
  /// Throws std::runtime_error naming the path.
  void begin_attempt(int attempt, const std::vector<RankSpec>& ranks);

  void write_line(int rank, OutputStream stream, std::string_view line);

 private:
  struct Terminal {
    int fd;
    bool colored;
    bool open = true;
  };
  bool write_all(int fd, std::string_view text) const;

  const OutputOptions options_;
  Terminal stdout_;
  Terminal stderr_;
  std::map<std::pair<int, OutputStream>, UniqueFd> logs_;
};

}  // namespace lockstep::cli
