// The hybrid model of the examples on six processes, with gradients known by hand.
#include <latch>

#include "examples/hybrid/hybrid_model.h"
#include "lockstep/base/str.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::hybrid_test {

using hybrid::DdpMode;
using hybrid::Gradients;
using testing::expect_error;

std::latch stop_called(1);
const auto stop = rpc::function("hybrid_test.stop", [] { stop_called.count_down(); });

/// Runs `master` on rank 5 while the others serve. Each of its `groups` is made by all ranks.
void run(int groups, const std::function<void()>& master) {
  testing::run_processes_in_gtest({.world_size = 6, .backend = "gloo"}, [&](const World& world) {
    const auto role = hybrid::role_of(world.rank());
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size());
    if (role == hybrid::Role::kMaster) {
      master();
      for (int rank = 0; rank < 5; ++rank) rpc::rpc_sync(rank, stop);
    } else {
      if (role == hybrid::Role::kServer) {
        for (int i = 0; i < groups; ++i) new_group({0, 1, 2, 3});
      }
      stop_called.wait();
    }
    rpc::shutdown();
  });
}

using Rows = std::vector<std::vector<float>>;
at::Tensor matrix(const Rows& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(row));
  return at::stack(tensors);
}

// RPC-60 to RPC-68
TEST(Hybrid, WithoutDdpHasEachTrainersOwnGradients) {
  run(0, [] {
    const std::vector<Rows> fc1 = {
        {{-32, -16}, {0, -16}}, {{16, -16}, {16, -16}}, {{-16, 16}, {-16, 16}}, {{32, 16}, {0, 16}}};
    const std::vector<Rows> fc2 = {{{-56, -28, -28}}, {{0, -28, -28}}, {{0, 28, 28}}, {{56, 28, 28}}};
    hybrid::lead(DdpMode::kNone, false, [&](int round, const std::vector<Gradients>& all) {
      for (std::size_t trainer = 0; trainer < 4; ++trainer) {
        ASSERT_TRUE(all[trainer].first.empty());
        ASSERT_EQ(all[trainer].second.size(), 2);
        EXPECT_TRUE(at::equal(all[trainer].second[0], matrix(fc1[trainer])))
            << round << trainer << all[trainer].second[0];
        EXPECT_TRUE(at::equal(all[trainer].second[1], matrix(fc2[trainer])))
            << round << trainer << all[trainer].second[1];
      }
    });
  });
}

// RPC-64, RPC-69
TEST(Hybrid, WithDdpInsideAveragesTheWrappedLayer) {
  run(1, [] {
    const std::vector<Rows> fc1 = {
        {{-32, -16}, {0, -16}}, {{16, -16}, {16, -16}}, {{-16, 16}, {-16, 16}}, {{32, 16}, {0, 16}}};
    hybrid::lead(DdpMode::kInside, false, [&](int round, const std::vector<Gradients>& all) {
      for (std::size_t trainer = 0; trainer < 4; ++trainer) {
        ASSERT_EQ(all[trainer].first.size(), 1);
        EXPECT_TRUE(at::equal(all[trainer].first[0], at::zeros({1, 3}))) << round << all[trainer].first[0];
        ASSERT_EQ(all[trainer].second.size(), 1);
        EXPECT_TRUE(at::equal(all[trainer].second[0], matrix(fc1[trainer]))) << round << all[trainer].second[0];
      }
    });
  });
}

// RPC-59, RPC-64, RPC-69
TEST(Hybrid, WithDdpOutsideAveragesAll) {
  run(1, [] {
    hybrid::lead(DdpMode::kOutside, false, [&](int round, const std::vector<Gradients>& all) {
      for (const auto& [ddp, others] : all) {
        ASSERT_EQ(ddp.size(), 2);
        ASSERT_TRUE(others.empty());
        for (const auto& each : ddp) EXPECT_TRUE(at::equal(each, at::zeros_like(each))) << round << each;
      }
    });
  });
}

// RPC-65, RPC-70
TEST(Hybrid, WithUnevenInputsDividesByAllTrainers) {
  run(1, [] {
    hybrid::lead(DdpMode::kOutside, true, [&](int round, const std::vector<Gradients>& all) {
      for (std::size_t trainer = 0; trainer < 4; ++trainer) {
        const bool is_short = trainer < 2;
        const auto fc1 = is_short ? Rows{{0, 12}, {0, 4}} : Rows{{2, -2}, {-2, 2}};
        const auto fc2 = is_short ? Rows{{0, 14, 14}} : Rows{{7, 0, 0}};
        ASSERT_EQ(all[trainer].first.size(), 2);
        EXPECT_TRUE(at::equal(all[trainer].first[0], matrix(fc1))) << round << trainer << all[trainer].first[0];
        EXPECT_TRUE(at::equal(all[trainer].first[1], matrix(fc2))) << round << trainer << all[trainer].first[1];
      }
    });
  });
}

// RPC-67
TEST(Hybrid, RunsAHundredTimesWithoutAHang) {
  constexpr int kGroups = 16;
  run(kGroups, [] {
    const auto see = [](int /*round*/, const std::vector<Gradients>& all) { ASSERT_EQ(all.size(), 4); };
    for (int i = 0; i < 84; ++i) hybrid::lead(DdpMode::kNone, false, see);
    for (int i = 0; i < kGroups; ++i) hybrid::lead(i % 2 == 0 ? DdpMode::kOutside : DdpMode::kInside, false, see);
  });
}

// RPC-75
TEST(Hybrid, LogsWhereLinesComeFrom) {
  using hybrid::Level;
  ::unsetenv("debug");
  EXPECT_EQ(hybrid::log_line(Level::kDebug, "a/b.cpp", 3, "text"), "");
  const auto line = hybrid::log_line(Level::kInfo, "a/b.cpp", 3, "text");
  EXPECT_THAT(line, ::testing::MatchesRegex("b.cpp:3 INFO p:[0-9]+ t:[0-9]+: text\n"));
  ::setenv("debug", "1", 1);
  EXPECT_THAT(hybrid::log_line(Level::kDebug, "b.cpp", 4, "more"),
              ::testing::MatchesRegex("b.cpp:4 DEBUG p:[0-9]+ t:[0-9]+: more\n"));
  ::unsetenv("debug");
}

// RPC-60
TEST(Hybrid, HasSixRanks) {
  for (const int rank : {-1, 6}) expect_error([&] { hybrid::role_of(rank); }, {"ranks 0 to 5", str(rank)});
}

}  // namespace lockstep::hybrid_test
