// What the shm backend promises, ranks being processes.
#include "tests/support/shm_promises.h"

#include <csignal>
#include <cstdlib>

#include "lockstep/shm/memory.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/shm_order.h"
#include "tests/support/shm_refusals.h"

namespace lockstep::shm_promises_test {
namespace {

using namespace std::chrono_literals;

void run(int ranks, const testing::RankBody& body) {
  testing::run_processes_in_gtest({.world_size = ranks, .backend = "shm"}, body);
}

class ShmPromises : public ::testing::TestWithParam<int> {};

TEST_P(ShmPromises, SameBitsWhateverTheChunking) {
  run(GetParam(), [](const World& world) { shm_promises::check_same_bits(world); });
}

TEST_P(ShmPromises, ZeroCopyTensors) {
  run(GetParam(), [](const World& world) {
    shm_promises::check_zero_copy(world);
    shm_promises::check_in_place(world);
    shm_promises::check_memory_outlives_group(world);
    shm_promises::check_tensor_grows_beyond_group(world);
  });
}

TEST_P(ShmPromises, RefusesWhatRanksDisagreeOn) {
  run(GetParam(), [](const World& world) {
    shm_refusals::check_disagreements(world);
    shm_refusals::check_scatter_sizes(world);
  });
}

TEST_P(ShmPromises, RefusesMalformedCalls) {
  run(GetParam(), shm_refusals::check_malformed);
}

TEST_P(ShmPromises, MakesCallsInOrderWhileTheCallerComputes) {
  run(GetParam(), [](const World& world) {
    shm_order::check_many_in_flight(world);
    shm_order::check_strided_in_order(world);
    shm_order::check_futures(world);
    shm_order::check_two_groups(world);
    shm_order::check_wait_with_a_limit(world);
    shm_order::check_dropped(world);
    shm_order::check_mixed_with_blocking(world);
  });
}

TEST_P(ShmPromises, LetsCallbacksCommunicate) {
  run(GetParam(), [](const World& world) {
    shm_order::check_callback_that_waits(world, [](Pending& later) { later.wait(); });
    shm_order::check_callback_that_communicates(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmPromises, ::testing::Values(2, 3, 4));

TEST(ShmLoneRank, MultipliesByItsFactor) {
  testing::run_processes_in_gtest({.world_size = 1, .backend = "shm"}, [](const World& world) {
    const auto tensor = at::ones({5});
    launch({.kind = CallKind::kAllReduce, .inputs = {tensor}, .op = ReduceOp::PREMUL_SUM, .factor = 0.25},
           world.group())
        .wait();
    EXPECT_TRUE(at::equal(tensor, at::full({5}, 0.25F)));
    const auto output = at::zeros({5});
    launch({.kind = CallKind::kReduceScatterSingle,
            .inputs = {tensor},
            .outputs = {output},
            .op = ReduceOp::PREMUL_SUM,
            .factor = 2},
           world.group())
        .wait();
    EXPECT_TRUE(at::equal(output, at::full({5}, 0.5F)));
    EXPECT_TRUE(at::equal(tensor, at::full({5}, 0.25F)));
  });
}

TEST(ShmCallbacks, MayWaitForFutures) {
  run(2, [](const World& world) {
    shm_order::check_callback_that_waits(world, [](Pending& later) { later.future()->wait(); });
  });
}

TEST(ShmAbsence, OfALateRankIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_late_rank(world);
    shm_refusals::check_timeout_of_call(world);
  });
}

TEST(ShmAbsence, OfARankThatLeftIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_rank_that_leaves(world, [](const GroupPtr&) { return at::Tensor(); });
    shm_refusals::check_rank_that_leaves_in_a_call(world);
  });
}

TEST(ShmAbsence, OfARankThatLeftButKeptATensorIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_rank_that_leaves(
        world, [](const GroupPtr& group) { return shm_promises::shared_copy(group, at::ones({100})); });
  });
}

// A call that nobody has collected keeps what it ran on.
TEST(ShmAbsence, OfARankThatLeftButKeptAWorkIsNamed) {
  run(4, [](const World& world) {
    shm_refusals::check_rank_that_leaves(world, [](const GroupPtr& group) {
      std::vector<at::Tensor> tensors = {at::ones({4})};
      const auto work = group->getBackend(at::kCPU)->allreduce(tensors);
      work->wait();
      return work;
    });
  });
}

/// Survivors end with this once they were told; the victim ends with it or by a signal.
constexpr int kSawIt = 42;

/// Rank 2 meets its doom between two calls.
void expect_gone(const std::function<void()>& doom) {
  const auto report = testing::run_processes_from_gtest(
      {.world_size = 4, .backend = "shm", .timeout = 60s, .expected_exit_code = kSawIt}, [&](const World& world) {
        shm_refusals::expect_works(world.group());
        if (world.rank() == 2) doom();
        const auto start = std::chrono::steady_clock::now();
        const auto message =
            shm_refusals::message_of<c10::DistBackendError>(shm_refusals::all_reduce_call({70'000}), world.group());
        EXPECT_THAT(message, ::testing::HasSubstr("rank 2 is gone"));
        EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
        if (!::testing::Test::HasFailure()) std::_Exit(kSawIt);
      });
  if (testing::is_rank_process()) return;
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(report.ranks[rank].kind, testing::RankOutcome::Kind::kPassed) << report.describe();
  }
}

TEST(ShmAbsence, OfARankThatExitedIsNamed) {
  expect_gone([] { std::_Exit(kSawIt); });
}

TEST(ShmAbsence, OfARankThatWasKilledIsNamed) {
  expect_gone([] { ::raise(SIGKILL); });
}

// ---- Memory

TEST(ShmMemory, IsReusedAfterItsTensors) {
  run(2, [](const World& world) {
    const auto backend = shm_promises::cpu_backend(world.group());
    constexpr int64_t kMiB = 1 << 20;
    std::set<void*> seen;
    for (int i = 0; i < 1000; ++i) {
      const auto tensor = backend->allocateTensor(kMiB, at::TensorOptions(at::kByte));
      tensor[kMiB - 1] = 1;
      seen.insert(tensor.data_ptr());
    }
    EXPECT_EQ(seen.size(), 1u);
    // While a call has it, it is not given to the next tensor.
    for (int i = 0; i < 50; ++i) {
      const auto tensor = shm_promises::shared_copy(world.group(), at::full({20'000}, 1.0F + i));
      std::ignore = launch_all_reduce(tensor, world.group());
    }
    const auto last = shm_promises::shared_copy(world.group(), at::full({20'000}, 7.0F));
    barrier(world.group());
    EXPECT_TRUE(at::equal(last, at::full({20'000}, 7.0F)));
  });
}

/// What allocating `bytes` says.
std::string refusal_of(const GroupPtr& group, std::size_t bytes) {
  try {
    std::ignore =
        shm_promises::cpu_backend(group)->allocateTensor(static_cast<int64_t>(bytes), at::TensorOptions(at::kByte));
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "it was given";
}

TEST(ShmMemory, OfATensorThatGrowsAfterThePoolIsGoneIsOrdinary) {
  testing::run_processes_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    auto group = new_group(world.group(), {0, 1}, {.backend = "shm"});
    const auto tensor = group->getBackend(at::kCPU)->allocateTensor(0, at::kFloat);
    barrier(group);
    group.reset();
    tensor.resize_({100'000}).fill_(1);
    all_reduce(tensor, world.group());
    EXPECT_EQ(tensor[99'999].item<float>(), 2);
  });
}

TEST(ShmMemory, OutOfItIsAClearError) {
  run(2, [](const World& world) {
    const auto total = shm::total_memory();
    EXPECT_THAT(refusal_of(world.group(), 3 * total),
                ::testing::AllOf(::testing::HasSubstr(shm::readable_bytes(3 * total) + " do not fit into the "),
                                 ::testing::HasSubstr("Raise LOCKSTEP_SHM_RESERVE_BYTES")));
    shm_refusals::expect_works(world.group());

    ::setenv("LOCKSTEP_SHM_RESERVE_BYTES", std::to_string(4 * total).c_str(), 1);
    const auto large = new_group(world.group(), shm_promises::all_ranks(world));
    EXPECT_THAT(refusal_of(large, 2 * total),
                ::testing::AllOf(::testing::HasSubstr(shm::readable_bytes(2 * total) + " of shared memory are wanted"),
                                 ::testing::HasSubstr("iB are free here")));
    shm_refusals::expect_works(large);
    all_reduce(shm_promises::shared_copy(large, at::ones({70'000})), large);
  });
}

TEST(ShmMemory, MayBeReservedDifferentlyOnEachRank) {
  run(3, [](const World& world) {
    constexpr std::size_t kMiB = 1 << 20;
    // Rank 0 has none at all.
    ::setenv("LOCKSTEP_SHM_RESERVE_BYTES", std::to_string(world.rank() * kMiB).c_str(), 1);
    const auto group = new_group(world.group(), shm_promises::all_ranks(world));
    EXPECT_THAT(refusal_of(group, 3 * kMiB),
                ::testing::HasSubstr("3.0 MiB do not fit into the " +
                                     shm::readable_bytes(static_cast<std::size_t>(world.rank()) * kMiB) + " reserved"));
    const auto ones = at::ones({200'000});
    const auto tensor = world.rank() == 0 ? ones : shm_promises::shared_copy(group, ones);
    all_reduce(tensor, group);
    EXPECT_TRUE(at::equal(tensor, at::full({200'000}, 3.0F)));
    shm_refusals::expect_works(group);
  });
}

}  // namespace
}  // namespace lockstep::shm_promises_test
