#include "checkpoint_cli/options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <map>

#include "lockstep/base/str.h"

#ifndef LOCKSTEP_VERSION
#define LOCKSTEP_VERSION "development version"
#endif

namespace lockstep::checkpoint_cli {
namespace {

constexpr const char* kProgram = "lockstep-checkpoint";

CLI::App* declared(CLI::App& app, Command& command, Action action, const char* name, const char* what) {
  auto* sub = app.add_subcommand(name, what);
  // Not those of a subcommand that was not chosen.
  sub->callback([&command, action] { command.action = action; });
  return sub;
}

void declare(CLI::App& app, Command& command, std::string& max_file_size) {
  app.set_version_flag("--version", str(kProgram, " ", LOCKSTEP_VERSION));
  app.require_subcommand(1);
  auto* inspect = declared(app, command, Action::kInspect, "inspect", "Lists tensors, values, files and sizes");
  inspect->add_option("PATH", command.path, "A checkpoint, a Hugging Face folder or a safetensors file")->required();
  inspect->add_flag("--json", command.is_json, "As JSON");

  auto* verify = declared(app, command, Action::kVerify, "verify",
                          "Reads everything and compares checksums; exit code 1 and a list if something is damaged");
  verify->add_option("PATH", command.path, "A checkpoint, a Hugging Face folder or a safetensors file")->required();

  auto* merge = declared(app, command, Action::kMerge, "merge", "Writes whole tensors as a Hugging Face folder");
  merge->add_option("FROM", command.path, "A checkpoint, a Hugging Face folder or a safetensors file")->required();
  merge->add_option("TO", command.other, "The folder to write; one that is there is replaced")->required();
  merge->add_option("--entry", command.entry,
                    "Only tensors of this entry, without its name: 'model' makes 'head.weight' of 'model.head.weight'");
  merge->add_option("--max-file-size", max_file_size, "Several files rather than longer ones (default 5GB)");

  auto* diff = declared(app, command, Action::kDiff, "diff",
                        "Compares names, shapes, dtypes and values; exit code 0 if they are the same, 1 if not, 2 if "
                        "that cannot be told");
  diff->add_option("A", command.path, "A checkpoint, a Hugging Face folder or a safetensors file")->required();
  diff->add_option("B", command.other, "Another")->required();
  diff->add_option("--tolerance", command.tolerance, "Differences up to this are none (default 0)")
      ->check(CLI::NonNegativeNumber);
}

Parsed mistake(const std::string& what) {
  return {.exit_code = 2, .text_for_stderr = str(kProgram, ": ", what, "\nTry '", kProgram, " --help'.\n")};
}

}  // namespace

Parsed parse_command(const std::vector<std::string>& arguments) {
  Command command;
  std::string max_file_size = "5GB";
  CLI::App app("Looks at checkpoints, compares them and makes Hugging Face folders of them.", kProgram);
  declare(app, command, max_file_size);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    return {.text_for_stdout = chosen.empty() ? app.help() : chosen.front()->help()};
  } catch (const CLI::CallForVersion& version) {
    return {.text_for_stdout = str(version.what(), "\n")};
  } catch (const CLI::ParseError& error) {
    return mistake(error.what());
  }
  const auto bytes = parse_bytes(max_file_size);
  if (!bytes) return mistake(str("--max-file-size must be a size like 500MB or 5GB, not '", max_file_size, "'"));
  command.max_file_bytes = *bytes;
  return {.command = command};
}

std::optional<int64_t> parse_bytes(const std::string& text) {
  static const std::map<std::string, double> units = {{"", 1},         {"B", 1},       {"KB", 1e3},     {"MB", 1e6},
                                                      {"GB", 1e9},     {"TB", 1e12},   {"KiB", 0x1p10}, {"MiB", 0x1p20},
                                                      {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [unit, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error != std::errc()) return std::nullopt;
  const auto factor = units.find(std::string(unit, end));
  if (factor == units.end()) return std::nullopt;
  const double bytes = std::floor(number * factor->second);
  constexpr double kMost = 0x1p62;
  if (!(bytes >= 1 && bytes <= kMost)) return std::nullopt;
  return static_cast<int64_t>(bytes);
}

}  // namespace lockstep::checkpoint_cli
