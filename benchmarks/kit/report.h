// What a benchmark found: rows of ours beside a peer's, printed as a table and written as JSON while they come, so that
// a benchmark which fails late leaves what it had. One thread uses a Report. The JSON is described in
// docs/benchmarks.md.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// Measured values of one thing.
using Samples = std::vector<double>;

/// Samples in two numbers. A value that is no median says so in the benchmark's description.
struct Figure {
  double value = 0;   // the median
  double spread = 0;  // interquartile range relative to the median
  std::size_t sample_count = 0;
  double noise = 0;  // of a difference: how far from it the truth may lie. 0 for what was measured directly

  /// That is, whether it cannot be told from zero.
  bool is_noise() const { return value <= noise && noise > 0; }
};

/// REQUIRES: at least one sample.
Figure figure_of(Samples samples);

/// Each sample being the difference of two measured values. The noise is the interquartile range, or how far below zero
/// the median lies where it should not; of one sample all is noise. REQUIRES: at least one sample.
Figure difference_figure_of(Samples samples);

enum class Better { kLower, kHigher };

/// What a ratio says: itself, or a bound of it where one of its terms is noise.
enum class Bound { kNone, kAtLeast, kAtMost };

/// How many times better we are.
struct Ratio {
  double value = 0;
  Bound bound = Bound::kNone;
};

struct Row {
  std::string case_name;
  std::string metric;  // "ms" for times, else any unit
  Figure ours;
  std::string peer;
  Figure theirs;
  Better better = Better::kLower;
  std::optional<double> goal = std::nullopt;  // what the ratio is meant to reach

  /// Above 1 if we are better. None if both sides are noise.
  std::optional<Ratio> ratio() const;
};

class Report {
 public:
  /// Writes the file at once, so that there is one whatever happens later; no file if the path is empty.
  explicit Report(std::string name, std::string json_path = {});

  /// Adds the row, prints it, after the table's head if it is the first, and writes the file anew. A row without a
  /// ratio is only told of. Throws std::runtime_error if the file cannot be written.
  void add(Row row);

  const std::vector<Row>& rows() const { return rows_; }

 private:
  void write_json() const;

  std::string name_;
  std::string json_path_;
  std::vector<Row> rows_;
};

/// The processor's name and how many cores this process may use.
std::string describe_machine();

}  // namespace lockstep::bench
