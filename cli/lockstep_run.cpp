// lockstep-run: starts a program as the ranks of one job. See docs/launch.md. Starts at once: no libtorch in here.
#include <iostream>
#include <string>
#include <vector>

#include "cli/launcher.h"
#include "cli/options.h"
#include "lockstep/launch/launch_environment.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto parsed = lockstep::cli::parse_options(arguments, lockstep::available_cores());
  std::cout << parsed.text_for_stdout;
  std::cerr << parsed.text_for_stderr;
  return parsed.options ? lockstep::cli::launch(*parsed.options) : parsed.exit_code;
}
