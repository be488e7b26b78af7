#include "tests/multiprocess/launch/processes.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "lockstep/base/str.h"

namespace lockstep::testing_internal {

bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

TemporaryDirectory::TemporaryDirectory() {
  path_ = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr) throw std::system_error(errno, std::generic_category(), path_);
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

int count_lines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

Mark::Mark() {
  static std::atomic<int> counter{0};
  name_ = str("LOCKSTEP_TEST_MARK_", ::getpid(), "_", ++counter);
}

std::vector<pid_t> Mark::processes() const {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    // A zombie has no environment any more.
    if (read_file("/proc/" + name + "/environ").find(name_ + "=") != std::string::npos)
      found.push_back(std::stoi(name));
  }
  return found;
}

Program::Program(const std::vector<std::string>& argv, const std::map<std::string, std::string>& environment) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!environment.contains(text.substr(0, text.find('=')))) variables.push_back(text);
  }
  for (const auto& [name, value] : environment) variables.push_back(str(name, "=", value));
  std::vector<char*> argv_pointers;
  for (const auto& each : argv) argv_pointers.push_back(const_cast<char*>(each.c_str()));
  argv_pointers.push_back(nullptr);
  std::vector<char*> variable_pointers;
  for (auto& each : variables) variable_pointers.push_back(each.data());
  variable_pointers.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  const int flags = O_WRONLY | O_CREAT | O_APPEND;
  ::posix_spawn_file_actions_addopen(&actions, 1, (directory_ / "out").c_str(), flags, 0600);
  ::posix_spawn_file_actions_addopen(&actions, 2, (directory_ / "err").c_str(), flags, 0600);
  const int error =
      ::posix_spawnp(&pid_, argv_pointers[0], &actions, nullptr, argv_pointers.data(), variable_pointers.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::system_error(error, std::generic_category(), argv.at(0));
}

Program::~Program() {
  if (reaped_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Program::signal(int number) const {
  ::kill(pid_, number);
}

Outcome Program::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  reaped_ = true;
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), .out = out(), .err = err()};
}

std::vector<std::string> lockstep_run(const std::vector<std::string>& arguments) {
  std::vector<std::string> argv = {LOCKSTEP_RUN_PATH};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return argv;
}

Outcome run_to_end(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment) {
  return Program(lockstep_run(arguments), environment).wait();
}

}  // namespace lockstep::testing_internal
