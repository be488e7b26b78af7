// How far training is: a bar that is drawn over and over on a terminal, now and then a line where there is none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::examples {

struct Progress {
  int64_t step = 0;
  int64_t steps = 1;
  double loss = 0;     // mean since the last report
  double seconds = 0;  // since the first step began
  double tokens_per_second = 0;
  /// Share of communication that was hidden behind compute so far; none if nothing was communicated.
  std::optional<double> hidden = std::nullopt;
};

/// One line of less than 80 columns.
std::string describe(const Progress& progress);

class ProgressBar {
 public:
  /// "bar", "lines", "none", or "auto": whichever fits the standard output.
  explicit ProgressBar(const std::string& style);

  void show(const Progress& progress);

 private:
  std::string style_;
  bool has_drawn_ = false;
  int64_t next_line_ = 0;  // in twentieths of the way
};

}  // namespace lockstep::examples
