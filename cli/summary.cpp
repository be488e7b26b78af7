#include "cli/summary.h"

#include <iomanip>
#include <sstream>
#include <vector>

#include "lockstep/base/str.h"

namespace lockstep::cli {
namespace {

std::string named(const std::vector<int>& ranks) {
  return str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks, ", "));
}

void describe_first_failure(std::ostream& out, const RankResult& failed) {
  out << "lockstep-run: rank " << failed.rank << " failed first: " << failed.status.describe() << " after "
      << std::fixed << std::setprecision(1) << static_cast<double>(failed.duration.count()) / 1000.0 << " s";
  if (failed.last_lines.empty()) {
    out << "; it wrote nothing\n";
    return;
  }
  out << "; its last lines:\n";
  for (const auto& line : failed.last_lines) out << "  | " << line << "\n";
}

}  // namespace

int exit_code(const JobResult& result) {
  if (result.first_failed) return result.at(*result.first_failed).status.shell_code();
  if (result.interrupted_by) return 128 + *result.interrupted_by;
  return result.timed_out ? kTimeoutCode : 0;
}

std::string summary(const JobResult& result) {
  std::ostringstream out;
  if (result.first_failed) describe_first_failure(out, result.at(*result.first_failed));
  if (result.timed_out) {
    out << "lockstep-run: time is over; " << named(result.alive_at_timeout) << " still ran\n";
  }
  if (result.interrupted_by) out << "lockstep-run: interrupted by signal " << *result.interrupted_by << "\n";

  std::vector<int> stopped;
  std::vector<int> not_started;
  for (const auto& each : result.ranks) {
    if (!each.started) {
      not_started.push_back(each.rank);
    } else if (each.stopped_by_us) {
      stopped.push_back(each.rank);
    } else if (!each.status.ok() && each.rank != result.first_failed) {
      out << "lockstep-run: rank " << each.rank << " failed too: " << each.status.describe() << "\n";
    }
  }
  if (!stopped.empty()) out << "lockstep-run: stopped " << named(stopped) << "\n";
  if (!not_started.empty()) out << "lockstep-run: never started " << named(not_started) << "\n";
  return out.str();
}

}  // namespace lockstep::cli
