#include "lockstep/launch/launch_environment.h"

#include <stdexcept>

#include "tests/unit/launch/time_limit.h"

namespace lockstep {
namespace {

LaunchLayout second_of_two_nodes() {
  return {.ranks_per_node = 4,
          .node_count = 2,
          .node_rank = 1,
          .master_host = "head",
          .master_port = 29500,
          .restart_count = 2,
          .max_restarts = 3,
          .run_id = "run"};
}

TEST(LaunchEnvironment, NumbersRanksNodeByNode) {
  const auto changes = variables_for_rank(second_of_two_nodes(), 2);
  EXPECT_EQ(changes.at("RANK"), "6");
  EXPECT_EQ(changes.at("WORLD_SIZE"), "8");
  EXPECT_EQ(changes.at("LOCAL_RANK"), "2");
  EXPECT_EQ(changes.at("LOCAL_WORLD_SIZE"), "4");
  EXPECT_EQ(changes.at("GROUP_RANK"), "1");
  EXPECT_EQ(changes.at("GROUP_WORLD_SIZE"), "2");
  EXPECT_EQ(changes.at("ROLE_RANK"), "6");
  EXPECT_EQ(changes.at("ROLE_WORLD_SIZE"), "8");
}

TEST(LaunchEnvironment, SaysWhereTheStoreIsAndWhichAttemptThisIs) {
  const auto changes = variables_for_rank(second_of_two_nodes(), 0);
  EXPECT_EQ(changes.at("MASTER_ADDR"), "head");
  EXPECT_EQ(changes.at("MASTER_PORT"), "29500");
  EXPECT_EQ(changes.at("TORCHELASTIC_RESTART_COUNT"), "2");
  EXPECT_EQ(changes.at("TORCHELASTIC_MAX_RESTARTS"), "3");
  EXPECT_EQ(changes.at("TORCHELASTIC_RUN_ID"), "run");
  EXPECT_EQ(changes.at("LOCKSTEP_LAUNCHER"), "lockstep-run");
  EXPECT_EQ(changes.at("LOCKSTEP_RESTART_COUNT"), "2");
}

TEST(LaunchEnvironment, RemovesWhatOtherLaunchersLeft) {
  const auto changes = variables_for_rank(second_of_two_nodes(), 0);
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    ASSERT_TRUE(changes.contains(name)) << name;
    EXPECT_EQ(changes.at(name), std::nullopt) << name;
  }
}

TEST(LaunchEnvironment, RefusesARankOutsideTheLayout) {
  auto layout = second_of_two_nodes();
  EXPECT_THROW(variables_for_rank(layout, 4), std::invalid_argument);
  EXPECT_THROW(variables_for_rank(layout, -1), std::invalid_argument);
  layout.node_rank = 2;
  EXPECT_THROW(variables_for_rank(layout, 0), std::invalid_argument);
}

TEST(OmpThreads, ShareTheCores) {
  EXPECT_EQ(omp_threads_per_rank(false, 2, 8), 4);
  EXPECT_EQ(omp_threads_per_rank(false, 3, 8), 2);
}

TEST(OmpThreads, AreAtLeastOne) {
  EXPECT_EQ(omp_threads_per_rank(false, 16, 8), 1);
}

TEST(OmpThreads, AreLeftAloneForOneRankOrWhenSet) {
  EXPECT_EQ(omp_threads_per_rank(false, 1, 8), std::nullopt);
  EXPECT_EQ(omp_threads_per_rank(true, 4, 8), std::nullopt);
}

TEST(AvailableCores, AreAtLeastOne) {
  EXPECT_GE(available_cores(), 1);
}

}  // namespace
}  // namespace lockstep
