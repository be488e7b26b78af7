// What lockstep-checkpoint was asked to do, and parsing it. Pure: prints and exits nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::checkpoint_cli {

enum class Action { kInspect, kVerify, kMerge, kDiff };

struct Command {
  Action action = Action::kInspect;
  std::string path = "";   // FROM, A
  std::string other = "";  // TO, B
  bool is_json = false;
  std::string entry = "";
  int64_t max_file_bytes = 0;
  double tolerance = 0;
};

/// Either a command, or texts and an exit code.
struct Parsed {
  std::optional<Command> command = std::nullopt;
  int exit_code = 0;
  std::string text_for_stdout = "";
  std::string text_for_stderr = "";
};

/// Without the program's name.
Parsed parse_command(const std::vector<std::string>& arguments);

/// "500MB", "5GB" as Hugging Face counts, "2GiB", "4096"; none if it is no size, or none above 0.
std::optional<int64_t> parse_bytes(const std::string& text);

}  // namespace lockstep::checkpoint_cli
