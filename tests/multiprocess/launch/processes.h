// Runs programs for the launch tests without the code under test, and finds what they left behind. A Mark is a variable
// in the environment that every descendant inherits, whatever group, session or parent it moves to.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep::testing_internal {

/// Far above what a loaded machine needs; reached only by a bug.
inline constexpr std::chrono::seconds kPatience{60};

/// Polls until the condition holds; false after kPatience.
bool eventually(const std::function<bool()>& condition);

/// A directory that is removed with everything in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory();
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text);
int count_lines(const std::string& text);

class Mark {
 public:
  Mark();
  const std::string& name() const { return name_; }
  /// Live processes (zombies do not count) that carry the mark.
  std::vector<pid_t> processes() const;

 private:
  std::string name_;
};

struct Outcome {
  int code = -1;  // 128 + signal if killed by one
  std::string out;
  std::string err;
};

/// A program started with posix_spawn; its output goes to files. Killed at the latest on destruction.
class Program {
 public:
  explicit Program(const std::vector<std::string>& argv, const std::map<std::string, std::string>& environment = {});
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program();
  pid_t pid() const { return pid_; }
  void signal(int number) const;
  std::string out() const { return read_file(directory_ / "out"); }
  std::string err() const { return read_file(directory_ / "err"); }
  /// Waits for the end. The tests' time limit bounds it.
  Outcome wait();

 private:
  TemporaryDirectory directory_;
  pid_t pid_ = -1;
  bool reaped_ = false;
};

/// lockstep-run with these arguments; `environment` is added.
std::vector<std::string> lockstep_run(const std::vector<std::string>& arguments);
Outcome run_to_end(const std::vector<std::string>& arguments,
                   const std::map<std::string, std::string>& environment = {});

}  // namespace lockstep::testing_internal
