#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <stdexcept>

#include "lockstep/base/str.h"

#ifndef LOCKSTEP_VERSION
#define LOCKSTEP_VERSION "development version"
#endif

namespace lockstep::cli {
namespace {

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the user typed, before it is judged.
struct Raw {
  std::string ranks_per_node = "1";
  std::string node_count = "1";
  std::string node_rank = "0";
  std::string master;
  std::string max_restarts = "0";
  std::string log_dir;
  std::string timeout;
  std::string grace = "5s";
  bool no_prefix = false;
  bool survivors = false;
};

class UsageFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep-run [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n";
  }
};

void declare(CLI::App& app, Raw& raw) {
  app.formatter(std::make_shared<UsageFormatter>());
  // PROGRAM ends the options: what follows belongs to it, dashes or not.
  app.prefix_command();
  app.set_version_flag("--version", str("lockstep-run ", LOCKSTEP_VERSION));
  app.add_option("-n,--nproc-per-node,--nproc_per_node", raw.ranks_per_node,
                 "Ranks to start on this node, or 'auto' for one per core (default 1)");
  app.add_option("--nnodes", raw.node_count, "Nodes that run this command (default 1)");
  app.add_option("--node-rank,--node_rank", raw.node_rank, "Number of this node, from 0 (default 0)");
  app.add_option("--master", raw.master, "HOST:PORT where rank 0 listens; needed with several nodes");
  app.add_option("--max-restarts,--max_restarts", raw.max_restarts,
                 "Start all ranks again after a failure, up to this many times (default 0)");
  app.add_option("--log-dir,--log_dir", raw.log_dir, "Also write output to DIR/attempt_<k>/rank_<r>.out and .err");
  app.add_option("--timeout", raw.timeout, "Stop everything after this time: 90, 90s, 10m, 1h (default: none)");
  app.add_option("--grace", raw.grace, "Time between asking ranks to stop and killing them (default 5s)");
  app.add_flag(
      "--survivors", raw.survivors,
      "A rank that fails stops nobody: the others may go on without it, as by DistributedDataParallel::recover()");
  app.add_flag("--no-prefix", raw.no_prefix, "Do not put '[rank] ' before each line");
}

int parse_int(const char* option, const std::string& text, int lowest) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < lowest) {
    throw UsageError(str(option, " must be an integer of at least ", lowest, ", not '", text, "'"));
  }
  return number;
}

std::chrono::milliseconds parse_time(const char* option, const std::string& text) {
  if (const auto time = parse_duration(text)) return *time;
  throw UsageError(str(option, " must be a time like 90, 90s, 10m or 1h, not '", text, "'"));
}

RunOptions judge(const Raw& raw, std::vector<std::string> rest, int core_count) {
  RunOptions options;
  const bool is_explicit = !rest.empty() && rest[0] == "--";
  if (is_explicit) rest.erase(rest.begin());
  if (!is_explicit && !rest.empty() && rest[0].starts_with('-')) throw UsageError(str("unknown option ", rest[0]));
  if (rest.empty() || rest[0].empty()) throw UsageError("PROGRAM is missing");
  options.command = std::move(rest);

  // mpirun's spelling, which reads as "-n p" with a program called 2.
  if (raw.ranks_per_node == "p")
    throw UsageError(str("-np is -n here: lockstep-run -n ", options.command[0], " PROGRAM"));
  constexpr int kMaxRanksPerNode = 4096;  // beyond it is surely a slip, and the machine would suffer
  options.ranks_per_node = raw.ranks_per_node == "auto" ? core_count : parse_int("-n", raw.ranks_per_node, 1);
  if (options.ranks_per_node > kMaxRanksPerNode) throw UsageError(str("-n must be at most ", kMaxRanksPerNode));
  options.node_count = parse_int("--nnodes", raw.node_count, 1);
  if (options.node_count > 1'000'000 / options.ranks_per_node) throw UsageError("--nnodes is too large");
  options.node_rank = parse_int("--node-rank", raw.node_rank, 0);
  if (options.node_rank >= options.node_count) {
    throw UsageError(str("--node-rank ", options.node_rank, " does not exist with --nnodes ", options.node_count));
  }
  if (!raw.master.empty()) {
    options.master = parse_endpoint(raw.master);
    if (!options.master) throw UsageError(str("--master must be HOST:PORT, not '", raw.master, "'"));
  } else if (options.node_count > 1) {
    throw UsageError("--master HOST:PORT is needed with --nnodes above 1");
  }
  options.max_restarts = parse_int("--max-restarts", raw.max_restarts, 0);
  if (!raw.log_dir.empty()) options.log_dir = raw.log_dir;
  if (!raw.timeout.empty()) options.timeout = parse_time("--timeout", raw.timeout);
  options.grace = parse_time("--grace", raw.grace);
  options.prefix = !raw.no_prefix;
  options.survivors = raw.survivors;
  if (options.survivors && options.node_count > 1) {
    throw UsageError("--survivors is for one node: ranks of several meet at a store that dies with its rank");
  }
  return options;
}

Parsed mistake(const std::string& what) {
  return {.options = {},
          .exit_code = 2,
          .text_for_stdout = {},
          .text_for_stderr = str("lockstep-run: ", what,
                                 "\nUsage: lockstep-run [OPTIONS] [--] PROGRAM [ARGUMENTS...]\n"
                                 "Try 'lockstep-run --help'.\n")};
}

}  // namespace

Parsed parse_options(const std::vector<std::string>& arguments, int core_count) {
  Raw raw;
  CLI::App app("Starts PROGRAM as several ranks of one job, watches them, and stops all when one fails.",
               "lockstep-run");
  declare(app, raw);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    return {.options = judge(raw, app.remaining(), core_count),
            .exit_code = 0,
            .text_for_stdout = {},
            .text_for_stderr = {}};
  } catch (const CLI::CallForHelp&) {
    return {.options = {}, .exit_code = 0, .text_for_stdout = app.help(), .text_for_stderr = {}};
  } catch (const CLI::CallForVersion& version) {
    return {.options = {}, .exit_code = 0, .text_for_stdout = str(version.what(), "\n"), .text_for_stderr = {}};
  } catch (const CLI::ParseError& error) {
    return mistake(error.what());
  } catch (const UsageError& error) {
    return mistake(error.what());
  }
}

std::optional<std::chrono::milliseconds> parse_duration(const std::string& text) {
  static const std::map<std::string, double> unit_ms = {{"", 1e3},     {"s", 1e3},    {"ms", 1.0},       {"m", 60e3},
                                                        {"min", 60e3}, {"h", 3600e3}, {"d", 24 * 3600e3}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [unit, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) return std::nullopt;
  const auto factor = unit_ms.find(std::string(unit, end));
  if (factor == unit_ms.end()) return std::nullopt;
  constexpr double kCenturyMs = 100 * 365.25 * 24 * 3600e3;
  const double ms = std::ceil(number * factor->second);
  if (!(ms > 0 && ms < kCenturyMs)) return std::nullopt;
  return std::chrono::milliseconds(static_cast<long long>(ms));
}

std::optional<Endpoint> parse_endpoint(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  std::string host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  // An IPv6 address without brackets leaves open where the port begins.
  if (host.empty() || (!bracketed && host.find_first_of(":[]") != std::string::npos)) return std::nullopt;
  int port = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, port);
  if (error != std::errc() || stop != end || port < 1 || port > 65535) return std::nullopt;
  return Endpoint{host, port};
}

}  // namespace lockstep::cli
