#include "lockstep/launch/child.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <thread>

#include "lockstep/base/str.h"
#include "tests/multiprocess/launch/processes.h"
#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

using testing_internal::eventually;
using testing_internal::kPatience;
using testing_internal::Mark;
using testing_internal::TemporaryDirectory;

ChildOptions shell(const std::string& script) {
  ChildOptions options;
  options.argv = {"/bin/sh", "-c", script};
  return options;
}

// Waits for the end and returns what the child wrote to stdout. For outputs that fit a pipe.
std::string finish(Child& child) {
  EXPECT_TRUE(child.wait_until_gone(kPatience));
  std::string text(1 << 16, '\0');
  const ssize_t bytes = ::read(child.stdout_fd(), text.data(), text.size());
  text.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return text;
}

TEST(Child, ReportsItsExitCode) {
  Child child(shell("exit 3"));
  finish(child);
  EXPECT_EQ(child.exit_status()->describe(), "exit code 3");
}

TEST(Child, ReportsTheSignalThatKilledIt) {
  Child child(shell("kill -9 $$"));
  finish(child);
  EXPECT_EQ(child.exit_status()->describe(), "killed by signal 9 (Killed)");
}

TEST(Child, SeesTheChangedEnvironment) {
  ::setenv("LOCKSTEP_TEST_REMOVED", "old", 1);
  ::setenv("LOCKSTEP_TEST_REPLACED", "old", 1);
  auto options = shell("echo ${LOCKSTEP_TEST_REMOVED-none} $LOCKSTEP_TEST_REPLACED \"$LOCKSTEP_TEST_ADDED\"");
  options.environment = {
      {"LOCKSTEP_TEST_REMOVED", std::nullopt}, {"LOCKSTEP_TEST_REPLACED", "new"}, {"LOCKSTEP_TEST_ADDED", "a = b"}};
  Child child(options);
  EXPECT_EQ(finish(child), "none new a = b\n");
}

TEST(Child, FindsItsProgramInThePathItWillSee) {
  const TemporaryDirectory directory;
  testing_internal::write_file(directory / "here-only", "#!/bin/sh\necho found $1\n");
  ::chmod((directory / "here-only").c_str(), 0755);
  ChildOptions options;
  options.argv = {"here-only", "it"};
  options.environment = {{"PATH", directory.path()}};
  Child child(options);
  EXPECT_EQ(finish(child), "found it\n");
}

TEST(Child, RunsAScriptWithoutInterpreterLineThroughTheShell) {
  const TemporaryDirectory directory;
  testing_internal::write_file(directory / "script", "echo plain $1\n");
  ::chmod((directory / "script").c_str(), 0755);
  ChildOptions options;
  options.argv = {directory / "script", "text"};
  Child child(options);
  EXPECT_EQ(finish(child), "plain text\n");
}

TEST(Child, ThrowsNamingAProgramThatDoesNotExist) {
  for (const char* name : {"no-such-program", "/no/such/program"}) {
    ChildOptions options;
    options.argv = {name};
    try {
      Child child(options);
      FAIL() << name << " started";
    } catch (const std::system_error& error) {
      EXPECT_EQ(error.code().value(), ENOENT);
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
}

TEST(Child, ThrowsForAFileThatIsNotExecutable) {
  ChildOptions options;
  options.argv = {"/etc/passwd"};
  try {
    Child child(options);
    FAIL() << "started";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code().value(), EACCES);
  }
}

TEST(Child, InheritsNoFileDescriptorButThoseGiven) {
  // Without O_CLOEXEC, as foreign code opens them.
  const UniqueFd careless(::fcntl(0, F_DUPFD, 50));  // NOLINT(android-cloexec-dup)
  int fds[2];
  ASSERT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  UniqueFd reader(fds[0]);
  UniqueFd writer(fds[1]);
  auto options = shell("echo /proc/self/fd/*; echo hello >&7");
  options.inherited_fds = {{.fd = writer.get(), .as = 7}};
  Child child(options);
  writer.reset();
  const std::string listed = finish(child);
  EXPECT_NE(listed.find("/fd/7"), std::string::npos) << listed;
  EXPECT_EQ(listed.find(str("/fd/", careless.get())), std::string::npos) << listed;
  char text[16] = {};
  EXPECT_EQ(::read(reader.get(), text, sizeof(text)), 6);
  EXPECT_STREQ(text, "hello\n");
  EXPECT_EQ(::read(reader.get(), text, sizeof(text)), 0) << "somebody else still holds the pipe";
}

TEST(Child, PlacesDescriptorsWhoseNumbersCross) {
  int first[2];
  int second[2];
  ASSERT_EQ(::pipe2(first, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(second, O_CLOEXEC), 0);
  const UniqueFd owned[] = {UniqueFd(first[0]), UniqueFd(first[1]), UniqueFd(second[0]), UniqueFd(second[1])};
  if (second[1] > 9) GTEST_SKIP() << "a shell has no syntax for descriptors above 9";
  auto options = shell(str("echo one >&", second[1], "; echo two >&", first[1]));
  options.inherited_fds = {{.fd = first[1], .as = second[1]}, {.fd = second[1], .as = first[1]}};
  Child child(options);
  finish(child);
  char text[8] = {};
  ASSERT_EQ(::read(first[0], text, sizeof(text)), 4);
  EXPECT_STREQ(text, "one\n");
  ASSERT_EQ(::read(second[0], text, sizeof(text)), 4);
  EXPECT_STREQ(text, "two\n");
}

TEST(Child, StartsWithDefaultSignalsAndAnEmptyStdin) {
  std::signal(SIGUSR1, SIG_IGN);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  // Signals 32 and 33 are the C library's own and cannot be set: leave their bits out.
  Child child(
      shell("cat; for bits in $(grep -E 'Sig(Ign|Blk)' /proc/self/status | cut -f2); do "
            "printf '%016x\\n' $((0x$bits & ~0x180000000)); done"));
  ::pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
  std::signal(SIGUSR1, SIG_DFL);
  EXPECT_EQ(finish(child), "0000000000000000\n0000000000000000\n");
}

TEST(Child, OutlivesTheThreadThatStartedIt) {
  std::optional<Child> child;
  const TemporaryDirectory directory;
  auto options = shell("while [ ! -e " + (directory / "go") + " ]; do sleep 0.02; done; exit 5");
  std::thread([&] { child.emplace(options); }).join();
  EXPECT_FALSE(child->wait_until_gone(std::chrono::milliseconds(300)));
  testing_internal::write_file(directory / "go", "");
  finish(*child);
  EXPECT_EQ(child->exit_status()->code, 5);
}

TEST(Child, WorksInAProcessThatIgnoresSigchld) {
  std::signal(SIGCHLD, SIG_IGN);
  {
    Child child(shell("exit 4"));
    finish(child);
    EXPECT_EQ(child.exit_status()->code, 4);
  }
  std::signal(SIGCHLD, SIG_DFL);
}

TEST(Child, TakesItsWholeTreeAlongWhenDestroyed) {
  const Mark mark;
  auto options = shell("setsid sleep 1000 & (sleep 1000 &) ; sleep 1000");
  options.environment = {{mark.name(), "1"}};
  {
    const Child child(options);
    ASSERT_TRUE(eventually([&] { return mark.processes().size() == 4; }));
  }
  EXPECT_TRUE(mark.processes().empty());
}

TEST(Child, IsGoneOnlyAfterItsOrphans) {
  const Mark mark;
  auto options = shell("setsid sh -c 'trap \"\" TERM; sleep 1000' & exit 0");
  options.environment = {{mark.name(), "1"}};
  Child child(options);
  finish(child);
  EXPECT_TRUE(child.exit_status()->ok());
  EXPECT_TRUE(mark.processes().empty());
}

TEST(Child, LetsOrphansThatFinishByThemselvesFinish) {
  const TemporaryDirectory directory;
  Child child(shell("(sleep 0.1; echo cleaned > " + (directory / "trace") + ") & exit 0"));
  finish(child);
  EXPECT_EQ(testing_internal::read_file(directory / "trace"), "cleaned\n");
}

TEST(Child, SignalsTheWholeGroup) {
  const Mark mark;
  auto options = shell("sleep 1000 & sleep 1000 & wait");
  options.environment = {{mark.name(), "1"}};
  Child child(options);
  ASSERT_TRUE(eventually([&] { return mark.processes().size() == 3; }));
  child.kill(SIGTERM);
  finish(child);
  EXPECT_EQ(child.exit_status()->signal, SIGTERM);
}

TEST(Child, CanSignalTheProgramWithoutItsHelpers) {
  Child child(
      shell("trap 'asked=1' USR2; sleep 1000 & helper=$!; echo ready; while [ -z $asked ]; do sleep 0.02; done; "
            "kill -0 $helper && echo helper lives; exit 0"));
  pollfd ready{child.stdout_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, -1), 1);
  // The loop's own sleep is a helper too.
  child.signal_program(SIGUSR2);
  EXPECT_EQ(finish(child), "ready\nhelper lives\n");
}

/// What stands behind the name in a process's stat file: its state, its parent, …
std::string stat_of(pid_t process) {
  const std::string stat = testing_internal::read_file(str("/proc/", process, "/stat"));
  return stat.substr(stat.rfind(')') + 2);
}

pid_t guardian_of(const Child& child) {
  return std::stoi(stat_of(child.pid()).substr(2));
}

// The guardian ends with the program, and an order that comes in between stays unread.
TEST(Child, ReportsItsExitCodeIfItIsSignalledWhileItEnds) {
  Child child(shell("sleep 0.1; exit 3"));
  const pid_t guardian = guardian_of(child);
  ::kill(guardian, SIGSTOP);
  EXPECT_TRUE(eventually([&] { return stat_of(child.pid())[0] == 'Z'; }));
  child.kill(SIGTERM);
  ::kill(guardian, SIGCONT);
  finish(child);
  EXPECT_EQ(child.exit_status()->describe(), "exit code 3");
}

TEST(Child, DiesWithItsGuardian) {
  const Mark mark;
  auto options = shell("sleep 1000");
  options.environment = {{mark.name(), "1"}};
  Child child(options);
  const pid_t guardian = guardian_of(child);
  ASSERT_EQ(testing_internal::read_file(str("/proc/", guardian, "/comm")), "lockstep-guard\n");
  ::kill(guardian, SIGKILL);
  EXPECT_TRUE(child.wait_until_gone(kPatience));
  EXPECT_EQ(child.exit_status()->signal, SIGKILL);
  EXPECT_TRUE(eventually([&] { return mark.processes().empty(); }));
}

}  // namespace
}  // namespace lockstep
