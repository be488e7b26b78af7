// A disk that is full: the save fails on all ranks, and the checkpoint before it stays.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "lockstep/base/env.h"
#include "lockstep/checkpoint/load.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/temp_dir.h"

namespace lockstep {
namespace {

constexpr const char* kSmallDisk = "LOCKSTEP_TEST_SMALL_DISK";

int run(const std::string& command) {
  return std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe): before any thread
}

/// Runs below, with a disk of its own.
TEST(FullDisk, InsideOfASmallOne) {
  const auto folder = env(kSmallDisk);
  if (!folder) GTEST_SKIP() << "run by FullDisk.LeavesTheCheckpointBefore";
  const auto path = *folder + "/last";
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World&) {
    auto small = at::ones({100});
    dcp::save(path, dcp::State().add("x", small));
    torch::nn::Linear large(400, 400);
    dcp::State state;
    state.add("x", small).add("model", large);
    testing::expect_error([&] { dcp::save(path, state); },
                          {"was not saved", "No space left on device", ".safetensors"});
    auto loaded = at::zeros({100});
    dcp::load(path, dcp::State().add("x", loaded));
    EXPECT_TRUE(loaded.equal(small));
  });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(*folder), std::filesystem::directory_iterator()), 1);
}

TEST(FullDisk, LeavesTheCheckpointBefore) {
  const testing::TempDir folder;
  const auto small_disk = str("unshare -rm sh -c 'mount -t tmpfs -o size=256k none ", folder.path(), " && ");
  if (run(small_disk + "true' 2> /dev/null") != 0) GTEST_SKIP() << "this user may not mount a disk of their own";
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  EXPECT_EQ(run(str(small_disk, kSmallDisk, "=", folder.path(), " ", program,
                    " --gtest_filter=FullDisk.InsideOfASmallOne --gtest_brief=1'")),
            0);
}

}  // namespace
}  // namespace lockstep
