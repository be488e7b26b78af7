#include "lockstep/comm/process_home.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/comm/group.h"

namespace lockstep::detail {
namespace {

struct Process {
  char state = 'X';
  std::string started = {};  // in clock ticks since boot: tells it from a later process of the same number
};

Process look_at(const std::string& number) {
  std::string line;
  std::getline(std::ifstream(str("/proc/", number, "/stat")), line);
  // The program's name stands in parentheses and may hold anything.
  const auto end = line.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  Process process;
  fields >> process.state;
  constexpr int kFieldsBetween = 18;
  for (int i = 0; i < kFieldsBetween + 1; ++i) fields >> process.started;
  return process;
}

/// Processes have the same numbers for those who share it.
std::string surroundings() {
  struct stat pid_namespace = {};
  ::stat("/proc/self/ns/pid", &pid_namespace);
  return str(pid_namespace.st_ino, " ", host_id());
}

}  // namespace

std::string process_home() {
  const auto number = std::to_string(::getpid());
  return str(number, " ", look_at(number).started, " ", surroundings());
}

bool is_gone(const std::string& home) {
  std::istringstream fields(home);
  std::string number;
  std::string started;
  std::string rest;
  fields >> number >> started >> std::ws;
  std::getline(fields, rest);
  if (rest != surroundings()) return false;
  const auto process = look_at(number);
  return process.state == 'X' || process.state == 'Z' || process.started != started;
}

}  // namespace lockstep::detail
