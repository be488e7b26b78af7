// Whether a process that a rank was is gone, as seen from its host and from others.
#include "lockstep/comm/process_home.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep::detail {
namespace process_home_test {

/// A home as its words: the process's number, when it began, and where its numbers count.
struct Home {
  int64_t number = 0;
  int64_t started = 0;
  std::string surroundings = "";

  std::string text() const { return str(number, " ", started, " ", surroundings); }
};

Home own_home() {
  Home home;
  std::istringstream words(process_home());
  words >> home.number >> home.started >> std::ws;
  std::getline(words, home.surroundings);
  return home;
}

/// Sleeps until it is killed, under any name.
class Sleeper {
 public:
  explicit Sleeper(const std::string& name = "sleeper") {
    const auto path = folder_.file(name);
    std::filesystem::create_symlink("/bin/sleep", path);
    std::string program = "sleep";
    std::string seconds = "1000";
    char* const arguments[] = {program.data(), seconds.data(), nullptr};
    EXPECT_EQ(::posix_spawn(&pid_, path.c_str(), nullptr, nullptr, arguments, environ), 0);
    home_ = own_home();
    home_.number = pid_;
    home_.started = start_of_child(name);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() {
    kill();
    reap();
  }

  const Home& home() const { return home_; }
  /// Ended, but its parent has not asked how.
  void kill() const {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    siginfo_t ended = {};
    EXPECT_EQ(::waitid(P_PID, pid_, &ended, WEXITED | WNOWAIT), 0);
  }
  void reap() {
    if (pid_ <= 0) return;
    EXPECT_EQ(::waitpid(pid_, nullptr, 0), pid_);
    pid_ = -1;
  }

 private:
  int64_t start_of_child(const std::string& name) const {
    std::ifstream file(str("/proc/", pid_, "/stat"));
    std::string line;
    std::getline(file, line);
    const auto prefix = str(pid_, " (", name, ") ");
    EXPECT_EQ(line.substr(0, prefix.size()), prefix);
    // Field 22 of all, of which two stand before.
    std::istringstream fields(line.substr(prefix.size()));
    std::string field;
    for (int i = 3; i <= 22; ++i) fields >> field;
    return std::stoll(field);
  }

  const testing::TempDir folder_;
  pid_t pid_ = -1;
  Home home_;
};

TEST(ProcessHome, IsNotGoneForItsOwnProcess) {
  EXPECT_FALSE(is_gone(process_home()));
  EXPECT_EQ(own_home().number, ::getpid());
  EXPECT_EQ(own_home().text(), process_home());
  EXPECT_EQ(process_home(), process_home());
}

TEST(ProcessHome, IsGoneWithAProcessThatWasKilled) {
  Sleeper sleeper;
  EXPECT_FALSE(is_gone(sleeper.home().text()));
  sleeper.kill();
  EXPECT_TRUE(is_gone(sleeper.home().text())) << "nobody has waited for it yet";
  sleeper.reap();
  EXPECT_TRUE(is_gone(sleeper.home().text()));
}

TEST(ProcessHome, IsReadWhateverTheProgramIsCalled) {
  Sleeper sleeper(") Z (1 2) X");
  EXPECT_FALSE(is_gone(sleeper.home().text()));
  sleeper.kill();
  EXPECT_TRUE(is_gone(sleeper.home().text()));
}

TEST(ProcessHome, IsGoneIfItsNumberIsAnotherProcesssNow) {
  auto home = own_home();
  ++home.started;
  EXPECT_TRUE(is_gone(home.text()));
  home.started -= 2;
  EXPECT_TRUE(is_gone(home.text()));
}

TEST(ProcessHome, IsNeverGoneWhereItCannotBeSeen) {
  Sleeper sleeper;
  sleeper.kill();
  sleeper.reap();
  auto elsewhere = sleeper.home();
  elsewhere.surroundings += "-2";  // another host
  EXPECT_FALSE(is_gone(elsewhere.text()));
  elsewhere.surroundings = "1" + sleeper.home().surroundings;  // another container
  EXPECT_FALSE(is_gone(elsewhere.text()));
  EXPECT_FALSE(is_gone(""));
}

}  // namespace process_home_test
}  // namespace lockstep::detail
