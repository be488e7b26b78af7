// What a benchmark found: rows of ours beside a peer's, printed as a table while they come and written as JSON at the
// end. One thread uses a Report. The JSON is described in docs/benchmarks.md.
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
};

/// REQUIRES: at least one sample.
Figure figure_of(Samples samples);

enum class Better { kLower, kHigher };

struct Row {
  std::string case_name;
  std::string metric;  // "ms" for times, else any unit
  Figure ours;
  std::string peer;
  Figure theirs;
  Better better = Better::kLower;
  std::optional<double> goal = std::nullopt;  // what the ratio is meant to reach

  /// Above 1 if we are better.
  double ratio() const;
};

class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {}

  /// Adds the row and prints it, after the table's head if it is the first.
  void add(Row row);

  /// Throws std::runtime_error if the file cannot be written.
  void write_json(const std::string& path) const;

  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::string name_;
  std::vector<Row> rows_;
};

/// The processor's name and how many cores this process may use.
std::string describe_machine();

}  // namespace lockstep::bench
