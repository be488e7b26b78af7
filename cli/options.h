// The command line of lockstep-run, as a value. Pure: reads nothing but its arguments, prints nothing, never exits.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::cli {

struct Endpoint {
  std::string host;
  int port = 0;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};

struct RunOptions {
  int ranks_per_node = 1;
  int node_count = 1;
  int node_rank = 0;
  std::optional<Endpoint> master;  // always set if node_count > 1
  int max_restarts = 0;
  std::optional<std::string> log_dir;
  std::optional<std::chrono::milliseconds> timeout;
  std::chrono::milliseconds grace{5000};
  bool prefix = true;
  bool survivors = false;
  std::vector<std::string> command;  // never empty
};

/// Either options to run with, or what to print and the code to exit with: 0 for help and version, 2 for a mistake.
struct Parsed {
  std::optional<RunOptions> options;
  int exit_code = 0;
  std::string text_for_stdout;
  std::string text_for_stderr;
};

/// `arguments` without the program's own name; `core_count` is what "-n auto" stands for.
Parsed parse_options(const std::vector<std::string>& arguments, int core_count);

/// "90", "90s", "1.5m", "2h", "250ms"; nullopt if it is none of these, not above zero, or beyond a century.
std::optional<std::chrono::milliseconds> parse_duration(const std::string& text);

/// "host:29500" or "[::1]:29500"; nullopt if it is neither.
std::optional<Endpoint> parse_endpoint(const std::string& text);

}  // namespace lockstep::cli
