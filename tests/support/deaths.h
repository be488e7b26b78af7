// Ranks that die on purpose, and what the others have in common afterwards.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/observer.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::deaths {

/// Kills this process when the library announces its n-th event from now on, or one of a unit in a state.
class DiesAt : public Observer {
 public:
  explicit DiesAt(int event) : left_(event) {}
  DiesAt(std::string unit, std::string state) { at(std::move(unit), std::move(state)); }
  void at(std::string unit, std::string state) {
    unit_ = std::move(unit);
    state_ = std::move(state);
  }
  void on_event(const Event& event) override {
    if (left_ >= 0 && left_-- == 0) ::raise(SIGKILL);
    if (!unit_.empty() && event.state == state_ && event.unit.find(unit_) != std::string::npos) ::raise(SIGKILL);
  }

 private:
  int left_ = -1;
  std::string unit_;
  std::string state_;
};

/// Runs `body` on processes of which some may be killed. Those that are not end as if they were, so that nobody is
/// stopped for another's sake.
inline void run(int world_size, const testing::RankBody& body,
                std::chrono::milliseconds collective_timeout = std::chrono::seconds(40), const std::string& what = "") {
  constexpr int kKilled = 128 + SIGKILL;
  const auto report = testing::run_processes_from_gtest({.world_size = world_size,
                                                         .backend = "shm",
                                                         .timeout = std::chrono::seconds(120),
                                                         .collective_timeout = collective_timeout,
                                                         .expected_exit_code = kKilled},
                                                        [&](const World& world) {
                                                          body(world);
                                                          if (!::testing::Test::HasFailure()) std::_Exit(kKilled);
                                                        });
  if (testing::is_rank_process()) return;
  EXPECT_TRUE(report.has_passed()) << what << "\n" << report.describe();
}

/// All ranks that are left have the same bits, and none is NaN.
inline void expect_same_bits(const std::vector<at::Tensor>& parameters, const GroupPtr& group) {
  for (const auto& parameter : parameters) {
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
    const auto first = parameter.detach().clone();
    broadcast(first, 0, group);
    EXPECT_TRUE(at::equal(first, parameter));
  }
}

}  // namespace lockstep::deaths
