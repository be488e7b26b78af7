// How a process ended, as a small value. Exactly one of code and signal is set once a process has ended; neither
// before.
#pragma once

#include <optional>
#include <string>

namespace lockstep {

struct ExitStatus {
  std::optional<int> code;
  std::optional<int> signal;

  bool ended() const { return code || signal; }
  bool ok() const { return code == 0; }

  /// "exit code 3", "killed by signal 9 (Killed)" or "still running".
  std::string describe() const;

  /// What a shell would report: the code, or 128 + signal. REQUIRES: ended().
  int shell_code() const { return code ? *code : 128 + *signal; }

  friend bool operator==(const ExitStatus&, const ExitStatus&) = default;
};

}  // namespace lockstep
