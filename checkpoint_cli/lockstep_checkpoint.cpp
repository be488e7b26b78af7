// lockstep-checkpoint: lists, checks, merges and compares checkpoints. See docs/checkpoint.md.
#include <iostream>
#include <string>
#include <vector>

#include "checkpoint_cli/commands.h"
#include "checkpoint_cli/options.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto parsed = lockstep::checkpoint_cli::parse_command(arguments);
  std::cout << parsed.text_for_stdout;
  std::cerr << parsed.text_for_stderr;
  return parsed.command ? lockstep::checkpoint_cli::run(*parsed.command, std::cout, std::cerr) : parsed.exit_code;
}
