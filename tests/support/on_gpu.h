// Tests on an accelerator: one rank, alone and over NCCL, and two ranks that share a GPU by gloo.
#pragma once

#include <cstdlib>

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::testing {

/// Skipped where there is no GPU.
class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }

  /// One rank that has a communicator, although it could do without.
  static void on_nccl(const RankBody& body) {
    ::setenv("LOCKSTEP_CONNECT_ALONE", "1", 1);
    run_threads_in_gtest({.world_size = 1, .backend = "nccl"}, body);
    ::unsetenv("LOCKSTEP_CONNECT_ALONE");
  }

  static void on_gpu(const RankBody& body) {
    run_threads_in_gtest({.world_size = 1, .backend = "nccl"}, body);
    on_nccl(body);
    run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, body);
  }
};

}  // namespace lockstep::testing
