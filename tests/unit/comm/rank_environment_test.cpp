// Which rank a process is, from every launcher's variables.
#include "lockstep/comm/rank_environment.h"

#include <gtest/gtest.h>

#include <map>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using Variables = std::map<std::string, std::string>;

RankEnvironment detect(const Variables& variables) {
  return detect_rank_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

void expect_refused(const Variables& variables, const std::vector<std::string>& words) {
  testing::expect_error([&] { detect(variables); }, words);
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29501"},
                             {"TORCHELASTIC_RUN_ID", "job"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

Variables without(Variables base, const std::string& name) {
  base.erase(name);
  return base;
}

TEST(RankEnvironment, IsAloneWithoutVariables) {
  const auto self = detect({});
  EXPECT_EQ(self.launcher, "none");
  EXPECT_EQ(self.rank, 0);
  EXPECT_EQ(self.world_size, 1);
  EXPECT_EQ(self.master_port, 0);
}

TEST(RankEnvironment, ReadsTorchrun) {
  const auto self = detect(kTorchrun);
  EXPECT_EQ(self.launcher, "torchrun");
  EXPECT_EQ(self.rank, 5);
  EXPECT_EQ(self.world_size, 8);
  EXPECT_EQ(self.local_rank, 1);
  EXPECT_EQ(self.local_world_size, 4);
  EXPECT_EQ(self.master_addr, "node0");
  EXPECT_EQ(self.master_port, 29501);
  EXPECT_EQ(self.restart_count, 2);
  EXPECT_TRUE(self.launcher_serves_store);
}

TEST(RankEnvironment, ReadsLockstepRun) {
  const auto self =
      detect(with(without(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE"), {{"LOCKSTEP_LAUNCHER", "lockstep-run"}}));
  EXPECT_EQ(self.launcher, "lockstep-run");
  EXPECT_FALSE(self.launcher_serves_store);
}

TEST(RankEnvironment, ReadsOpenMpi) {
  const Variables mpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                         {"PMIX_NAMESPACE", "1234"}};
  const auto self = detect(mpi);
  EXPECT_EQ(self.launcher, "mpirun");
  EXPECT_EQ(self.rank, 2);
  EXPECT_EQ(self.local_world_size, 3);
  EXPECT_EQ(self.master_addr, "127.0.0.1");
  EXPECT_GE(self.master_port, 20000);
  EXPECT_LT(self.master_port, 32000);
  EXPECT_EQ(detect(with(mpi, {{"OMPI_COMM_WORLD_RANK", "0"}})).master_port, self.master_port);
  EXPECT_NE(detect(with(mpi, {{"PMIX_NAMESPACE", "1235"}})).master_port, self.master_port);
  EXPECT_EQ(detect(with(mpi, {{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "9"}})).master_addr, "n1");
  expect_refused(with(mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
                 {"several hosts", "MASTER_ADDR"});
  expect_refused(without(mpi, "OMPI_COMM_WORLD_SIZE"), {"OMPI_COMM_WORLD_SIZE"});
}

TEST(RankEnvironment, ReadsSlurmSteps) {
  const Variables slurm = {{"SLURM_JOB_ID", "77"},          {"SLURM_STEP_ID", "0"},
                           {"SLURM_PROCID", "6"},           {"SLURM_NTASKS", "7"},
                           {"SLURM_LOCALID", "2"},          {"SLURM_NODEID", "1"},
                           {"SLURM_TASKS_PER_NODE", "4,3"}, {"SLURM_JOB_NODELIST", "gpu[03-04,9],login"}};
  const auto self = detect(slurm);
  EXPECT_EQ(self.launcher, "slurm");
  EXPECT_EQ(self.rank, 6);
  EXPECT_EQ(self.world_size, 7);
  EXPECT_EQ(self.local_rank, 2);
  EXPECT_EQ(self.local_world_size, 3);
  EXPECT_EQ(self.master_addr, "gpu03");
  EXPECT_GT(self.master_port, 0);
  EXPECT_EQ(detect(with(slurm, {{"SLURM_STEP_NUM_TASKS", "9"}, {"SLURM_STEP_TASKS_PER_NODE", "1,8"}})).world_size, 9);
  // A batch script sees the allocation, but is no rank.
  EXPECT_EQ(detect(without(slurm, "SLURM_STEP_ID")).launcher, "none");
  expect_refused(without(slurm, "SLURM_LOCALID"), {"SLURM_LOCALID"});
  expect_refused(with(slurm, {{"SLURM_TASKS_PER_NODE", "4"}}), {"SLURM_TASKS_PER_NODE", "no node 1"});
}

TEST(RankEnvironment, PrefersTorchrunInsideSlurmAndMpi) {
  const auto self =
      detect(with(kTorchrun, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}));
  EXPECT_EQ(self.rank, 5);
}

TEST(RankEnvironment, NamesTheVariableOfAHalfSetEnvironment) {
  expect_refused({{"RANK", "0"}}, {"RANK is set", "WORLD_SIZE is not"});
  expect_refused({{"WORLD_SIZE", "2"}}, {"WORLD_SIZE is set", "RANK is not"});
  expect_refused({{"LOCAL_RANK", "0"}}, {"LOCAL_RANK is set", "RANK is not"});
  expect_refused({{"LOCAL_WORLD_SIZE", "1"}}, {"LOCAL_WORLD_SIZE is set", "RANK is not"});
  expect_refused({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}, {"MASTER_ADDR is set", "RANK is not"});
  expect_refused({{"MASTER_PORT", "1"}}, {"MASTER_PORT is set", "RANK is not"});
  expect_refused({{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}, {"OMPI_COMM_WORLD_RANK"});
  expect_refused(without(without(kTorchrun, "MASTER_ADDR"), "MASTER_PORT"), {"MASTER_ADDR is not set"});
  expect_refused(without(kTorchrun, "MASTER_PORT"), {"MASTER_ADDR is set", "MASTER_PORT is not"});
  expect_refused(without(kTorchrun, "MASTER_ADDR"), {"MASTER_PORT is set", "MASTER_ADDR is not"});
  expect_refused(without(kTorchrun, "LOCAL_RANK"), {"LOCAL_RANK is not"});
}

TEST(RankEnvironment, NamesTheVariableOfAContradictoryEnvironment) {
  expect_refused(with(kTorchrun, {{"RANK", "8"}}), {"RANK=8", "WORLD_SIZE=8"});
  expect_refused(with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"});
  expect_refused(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE", "WORLD_SIZE=8"});
  expect_refused(with(kTorchrun, {{"RANK", "one"}}), {"RANK='one'", "not an integer"});
  expect_refused(with(kTorchrun, {{"RANK", "-1"}}), {"RANK=-1"});
  expect_refused(with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0"});
  expect_refused(with(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT=70000"});
  expect_refused(with(kTorchrun, {{"MASTER_PORT", "http"}}), {"MASTER_PORT='http'"});
}

TEST(RankEnvironment, SaysWhenItDoesNotKnowTheHosts) {
  EXPECT_TRUE(detect(kTorchrun).knows_hosts);
  const auto bare = detect(without(without(kTorchrun, "LOCAL_RANK"), "LOCAL_WORLD_SIZE"));
  EXPECT_FALSE(bare.knows_hosts);
  EXPECT_EQ(bare.local_rank, 5);
  EXPECT_EQ(bare.local_world_size, 8);
}

TEST(SlurmLists, AreUnderstood) {
  EXPECT_EQ(detail::first_slurm_host("node1"), "node1");
  EXPECT_EQ(detail::first_slurm_host("a,b"), "a");
  EXPECT_EQ(detail::first_slurm_host("a[1-3]"), "a1");
  EXPECT_EQ(detail::first_slurm_host("a[001,7]"), "a001");
  EXPECT_EQ(detail::slurm_tasks_on_node("4(x2),3", 1), 4);
  EXPECT_EQ(detail::slurm_tasks_on_node("4(x2),3", 2), 3);
  EXPECT_EQ(detail::slurm_tasks_on_node("2", 0), 2);
}

}  // namespace
}  // namespace lockstep
