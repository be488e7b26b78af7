#include "benchmarks/kit/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "lockstep/base/str.h"
#include "lockstep/launch/launch_environment.h"

namespace lockstep::bench {
namespace {

constexpr std::size_t kFigureWidth = 18;

/// The value below which `part` of the sorted samples lie, interpolated.
double quantile(const Samples& sorted, double part) {
  const double position = part * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const auto above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

std::string formatted(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

double highest(const Figure& figure) {
  return std::max(figure.value, 0.0) + figure.noise;
}

double lowest(const Figure& figure) {
  return figure.value - figure.noise;
}

/// Four digits; times in a unit that suits them.
std::string readable(const Figure& figure, const std::string& metric) {
  const double value = figure.is_noise() ? highest(figure) : figure.value;
  const auto spread = figure.is_noise() ? std::string(" or less") : formatted(" ±%2.0f%%", 100 * figure.spread);
  if (metric != "ms") return formatted("%.4g ", value) + metric + spread;
  if (value < 0.1) return formatted("%.4g us", 1e3 * value) + spread;
  return formatted("%.4g ms", value) + spread;
}

/// "≥40" if it is a bound.
std::string readable(const Ratio& ratio) {
  static const std::map<Bound, std::string> marks = {{Bound::kNone, ""}, {Bound::kAtLeast, "≥"}, {Bound::kAtMost, "≤"}};
  return marks.at(ratio.bound) + formatted(ratio.value < 100 ? "%.3g" : "%.0f", ratio.value);
}

std::string judged(const Ratio& ratio, double goal) {
  const auto text = formatted("%.4g", goal);
  if (ratio.value >= goal) return text + (ratio.bound == Bound::kAtMost ? " undecided" : " reached");
  return text + (ratio.bound == Bound::kAtLeast ? " undecided" : " missed");
}

/// Spaces before the text up to the width in columns: UTF-8's later bytes take none.
std::string padded(const std::string& text, std::size_t width) {
  const auto columns = static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
  return std::string(columns < width ? width - columns : 0, ' ') + text;
}

nlohmann::ordered_json json_of(const Row& row) {
  nlohmann::ordered_json json{
      {"case", row.case_name},
      {"metric", row.metric},
      {"ours", row.ours.value},
      {"ours_spread", row.ours.spread},
      {"ours_samples", row.ours.sample_count},
      {"peer", row.peer},
      {"theirs", row.theirs.value},
      {"theirs_spread", row.theirs.spread},
      {"theirs_samples", row.theirs.sample_count},
      {"ratio", row.ratio()->value},
  };
  if (row.ratio()->bound != Bound::kNone) {
    json["ratio_bound"] = row.ratio()->bound == Bound::kAtLeast ? "at least" : "at most";
  }
  if (row.ours.noise > 0) json["ours_noise"] = row.ours.noise;
  if (row.theirs.noise > 0) json["theirs_noise"] = row.theirs.noise;
  if (row.goal) json["goal"] = *row.goal;
  return json;
}

}  // namespace

Figure figure_of(Samples samples) {
  std::sort(samples.begin(), samples.end());
  const double median = quantile(samples, 0.5);
  const double range = quantile(samples, 0.75) - quantile(samples, 0.25);
  return {.value = median, .spread = range == 0 ? 0 : range / std::abs(median), .sample_count = samples.size()};
}

Figure difference_figure_of(Samples samples) {
  std::sort(samples.begin(), samples.end());
  const double range = quantile(samples, 0.75) - quantile(samples, 0.25);
  auto figure = figure_of(std::move(samples));
  figure.noise = figure.sample_count == 1 ? std::abs(figure.value) : std::max(range, -figure.value);
  return figure;
}

std::optional<Ratio> Row::ratio() const {
  const auto& above = better == Better::kLower ? theirs : ours;
  const auto& below = better == Better::kLower ? ours : theirs;
  if (above.is_noise() && below.is_noise()) return std::nullopt;
  if (below.is_noise()) return Ratio{lowest(above) / highest(below), Bound::kAtLeast};
  if (above.is_noise()) return Ratio{highest(above) / lowest(below), Bound::kAtMost};
  return Ratio{above.value / below.value};
}

Report::Report(std::string name, std::string json_path) : name_(std::move(name)), json_path_(std::move(json_path)) {
  write_json();
}

void Report::add(Row row) {
  const auto ratio = row.ratio();
  if (!ratio) {
    std::printf("%s: no row beside %s, both are below the noise\n", row.case_name.c_str(), row.peer.c_str());
    std::fflush(stdout);
    return;
  }
  if (rows_.empty()) {
    std::printf("%-62s %s  %-19s %s %8s  %s\n", "case", padded("ours", kFigureWidth).c_str(), "peer",
                padded("theirs", kFigureWidth).c_str(), "ratio", "goal");
  }
  std::printf("%-62s %s  %-19s %s %s  %s\n", row.case_name.c_str(),
              padded(readable(row.ours, row.metric), kFigureWidth).c_str(), row.peer.c_str(),
              padded(readable(row.theirs, row.metric), kFigureWidth).c_str(), padded(readable(*ratio), 8).c_str(),
              row.goal ? judged(*ratio, *row.goal).c_str() : "");
  std::fflush(stdout);
  rows_.push_back(std::move(row));
  write_json();
}

void Report::write_json() const {
  if (json_path_.empty()) return;
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : rows_) rows.push_back(json_of(row));
  const nlohmann::ordered_json json{{"name", name_}, {"machine", describe_machine()}, {"rows", rows}};
  std::ofstream file(json_path_);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write " + json_path_);
}

std::string describe_machine() {
  std::string processor = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    processor = line.substr(line.find(": ") + 2);
    break;
  }
  const int cores = available_cores();
  return str(processor, ", ", cores, cores == 1 ? " core" : " cores");
}

}  // namespace lockstep::bench
