#include "benchmarks/kit/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "lockstep/base/str.h"
#include "lockstep/launch/launch_environment.h"

namespace lockstep::bench {
namespace {

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

/// Four digits; times in a unit that suits them.
std::string readable(const Figure& figure, const std::string& metric) {
  const auto spread = formatted(" ±%2.0f%%", 100 * figure.spread);
  if (metric != "ms") return formatted("%.4g ", figure.value) + metric + spread;
  if (figure.value < 0.1) return formatted("%.4g us", 1e3 * figure.value) + spread;
  return formatted("%.4g ms", figure.value) + spread;
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
      {"ratio", row.ratio()},
  };
  if (row.goal) json["goal"] = *row.goal;
  return json;
}

}  // namespace

Figure figure_of(Samples samples) {
  std::sort(samples.begin(), samples.end());
  const double median = quantile(samples, 0.5);
  return {median, (quantile(samples, 0.75) - quantile(samples, 0.25)) / median, samples.size()};
}

double Row::ratio() const {
  return better == Better::kLower ? theirs.value / ours.value : ours.value / theirs.value;
}

void Report::add(Row row) {
  if (rows_.empty()) {
    std::printf("%-62s %17s  %-19s %17s %8s  %s\n", "case", "ours", "peer", "theirs", "ratio", "goal");
  }
  std::string goal;
  if (row.goal) goal = formatted("%.4g", *row.goal) + (row.ratio() >= *row.goal ? " reached" : " missed");
  // The width counts bytes, and "±" has two of them.
  std::printf("%-62s %18s  %-19s %18s %8s  %s\n", row.case_name.c_str(), readable(row.ours, row.metric).c_str(),
              row.peer.c_str(), readable(row.theirs, row.metric).c_str(),
              formatted(row.ratio() < 100 ? "%.3g" : "%.0f", row.ratio()).c_str(), goal.c_str());
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

void Report::write_json(const std::string& path) const {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : rows_) rows.push_back(json_of(row));
  const nlohmann::ordered_json json{{"name", name_}, {"machine", describe_machine()}, {"rows", rows}};
  std::ofstream file(path);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
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
