#include "lockstep/testing/rank_process.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lockstep/base/env.h"
#include "lockstep/base/stack_dump.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/launch/job.h"
#include "lockstep/testing/event_tail.h"
#include "lockstep/testing/skip.h"

namespace lockstep::testing::detail {
namespace {

/// Lives as long as the process: a signal handler reads it.
EventTail& event_tail() {
  static EventTail& tail = *new EventTail;
  return tail;
}

void write_last_events(int fd) {
  [[maybe_unused]] const auto written = ::write(fd, kStoppedMark, sizeof(kStoppedMark) - 1);
  event_tail().write_to(fd);
}

}  // namespace

std::optional<RankIdentity> rank_identity() {
  const auto call = env(kCallVariable);
  if (!call) return std::nullopt;
  return RankIdentity{
      .call = *call,
      .rank = static_cast<int>(env_integer(env, kRankVariable).value()),
      .world_size = static_cast<int>(env_integer(env, kWorldSizeVariable).value()),
      .store_path = env(kStoreVariable).value(),
      .report_fd = static_cast<int>(env_integer(env, kReportFdVariable).value_or(STDERR_FILENO)),
  };
}

void explain_rank_termination(const RankIdentity& self) {
  static ObserverScope& observe = *new ObserverScope(event_tail());
  static_cast<void>(observe);
  explain_termination(self.report_fd, write_last_events);
}

World join_world(const RankIdentity& self, const RunOptions& options) {
  std::cout << "rank " << self.rank << " of " << self.world_size << ", process " << ::getpid() << std::endl;
  // NCCL's watchdog would dump and abort while a test provokes a hang on purpose.
  ::setenv("TORCH_NCCL_DESYNC_DEBUG", "0", /*overwrite=*/1);
  World world = init({.backend = options.backend,
                      .timeout = options.collective_timeout,
                      .rank = self.rank,
                      .world_size = self.world_size,
                      .store = c10::make_intrusive<c10d::FileStore>(self.store_path, self.world_size)});
  if (!world.device().is_cpu()) {
    c10::impl::VirtualGuardImpl(world.device().type()).setDevice(world.device());
  }
  barrier(world.group());
  return world;
}

RankOutcome run_guarded(const std::function<void()>& body, std::optional<int>* skip_code) {
  try {
    body();
    return {};
  } catch (const Skip& skip) {
    *skip_code = static_cast<int>(skip.code);
    return {RankOutcome::Kind::kSkipped, skip.reason};
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    const std::string stack = std::string(error.what()).substr(message.size());
    return {RankOutcome::Kind::kFailed, str(message, "\n", event_tail().text(), stack)};
  } catch (const std::exception& error) {
    return {RankOutcome::Kind::kFailed, str(error.what(), "\n", event_tail().text())};
  } catch (...) {
    return {RankOutcome::Kind::kFailed, kForeignException};
  }
}

void send_report(const RankIdentity& self, const std::string& text) {
  std::size_t sent = 0;
  while (sent < text.size()) {
    const auto count = ::write(self.report_fd, text.data() + sent, text.size() - sent);
    if (count <= 0) return;
    sent += static_cast<std::size_t>(count);
  }
}

void end_process(const RankIdentity& self, const RankOutcome& outcome, std::optional<int> skip_code) {
  // Its outcome is fixed: being stopped from here on must not add to the report, or change the exit code.
  ::signal(SIGTERM, SIG_IGN);
  send_report(self, outcome.kind == RankOutcome::Kind::kPassed ? kPassedMark : outcome.text);
  std::fflush(nullptr);
  std::cout.flush();
  const int code = outcome.kind == RankOutcome::Kind::kPassed ? 0 : skip_code.value_or(kFailedExitCode);
  std::_Exit(code);
}

}  // namespace lockstep::testing::detail
