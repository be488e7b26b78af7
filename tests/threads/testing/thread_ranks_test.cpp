// Ranks as threads: what the harness promises.
#include <c10/core/AutogradState.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/chaos.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/interpose.h"
#include "lockstep/testing/seeds.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::RankOutcome;
using testing::run_threads;
using testing::RunReport;
using namespace std::chrono_literals;

// TEST-10: one thread per rank of one process, with a world of its own; four ranks by default without GPUs.
TEST(ThreadRanks, RunTheBodyOncePerRankInThisProcess) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::set<int> ranks;
  const auto pid = ::getpid();
  const auto report = run_threads({}, [&](const World& world) {
    EXPECT_EQ(::getpid(), pid);
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    ranks.insert(world.rank());
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
  const int expected = testing::device_count() > 0 ? std::min(8, testing::device_count()) : 4;
  EXPECT_EQ(static_cast<int>(ranks.size()), expected);
  EXPECT_EQ(threads.size(), ranks.size());
}

// TEST-10: set-up and tear-down run on every rank's thread, tear-down also after a failure; nothing opens a socket.
TEST(ThreadRanks, RunSetUpAndTearDownPerRankWithoutSockets) {
  const auto count_sockets = [] {
    int sockets = 0;
    for (int fd = 0; fd < 256; ++fd) {
      struct stat status = {};
      if (::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) ++sockets;
    }
    return sockets;
  };
  const int before = count_sockets();
  std::mutex mutex;
  std::map<std::thread::id, std::string> steps;
  const auto step = [&](const char* name) {
    return [&, name](const World&) {
      const std::lock_guard lock(mutex);
      steps[std::this_thread::get_id()] += name;
    };
  };
  for (const bool fails : {false, true}) {
    steps.clear();
    run_threads({.world_size = 3, .set_up = step("s"), .tear_down = step("t")}, [&](const World& world) {
      all_reduce(at::ones({1}), world.group());
      EXPECT_EQ(count_sockets(), before);
      step("b")(world);
      if (fails) throw std::runtime_error("no");
    });
    ASSERT_EQ(steps.size(), 3U);
    for (const auto& [thread, text] : steps) EXPECT_EQ(text, "sbt");
  }
}

// TEST-11: default groups and subgroups of different rank threads do not mix.
LOCKSTEP_THREAD_TEST(ThreadRanks, HaveTheirOwnDefaultGroupAndSubgroups, 4) {
  EXPECT_EQ(default_group().get(), world.group().get());
  EXPECT_EQ(default_group()->getRank(), world.rank());
  const auto row = new_subgroups(world.group(), {{0, 1}, {2, 3}});
  const auto column = new_subgroups(world.group(), {{0, 2}, {1, 3}});
  auto rows = at::full({1}, world.rank());
  auto columns = at::full({1}, world.rank());
  all_reduce(rows, row);
  all_reduce(columns, column);
  EXPECT_EQ(rows.item<float>(), world.rank() < 2 ? 1 : 5);
  EXPECT_EQ(columns.item<float>(), world.rank() % 2 == 0 ? 2 : 4);
  EXPECT_NE(group_name(row), group_name(column));
}

// TEST-12: what threads cannot do is refused by name.
LOCKSTEP_THREAD_TEST(ThreadRanks, RefuseOtherOperationsByName, 2) {
  std::vector<at::Tensor> tensors = {at::ones({1})};
  const auto backend = world.group()->getBackend(at::kCPU);
  testing::expect_error([&] { backend->send(tensors, 1 - world.rank(), 0); }, {"threads", "send"});
  testing::expect_error([&] { backend->recv(tensors, 1 - world.rank(), 0); }, {"threads", "recv"});
  testing::expect_error([&] { backend->allreduce_sparse(tensors); }, {"threads", "sparse"});
}

// TEST-12: bitwise reductions, and the list form of all-to-all that only the backend has.
LOCKSTEP_THREAD_TEST(ThreadRanks, ReduceBitsAndExchangeLists, 3) {
  const int64_t bits[] = {0b1101, 0b0111, 0b1110};
  const auto reduced = [&](ReduceOp op) {
    auto tensor = at::full({2}, bits[world.rank()], at::kLong);
    all_reduce(tensor, world.group(), op);
    return tensor[1].item<int64_t>();
  };
  EXPECT_EQ(reduced(ReduceOp::BAND), 0b0100);
  EXPECT_EQ(reduced(ReduceOp::BOR), 0b1111);
  EXPECT_EQ(reduced(ReduceOp::BXOR), 0b0100);
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int other = 0; other < 3; ++other) {
    sent.push_back(at::full({other + 1}, 10 * world.rank() + other));
    received.push_back(at::zeros({world.rank() + 1}, at::kLong));
  }
  world.group()->getBackend(at::kCPU)->alltoall(received, sent, {})->wait();
  for (int other = 0; other < 3; ++other) EXPECT_EQ(received[other][0].item<int>(), 10 * other + world.rank());
}

// TEST-13: sums in rank order whatever the order of arrival: large and small values make the order visible in the bits.
TEST(ThreadRanks, ReduceInRankOrder) {
  std::set<float> results;
  const float values[] = {1e8F, 1.0F, -1e8F, 3e-3F};
  float expected = 0;
  for (const float value : values) expected += value;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto report = run_threads({.world_size = 4, .chaos_seed = seed}, [&](const World& world) {
      auto tensor = at::full({1}, values[world.rank()]);
      all_reduce(tensor, world.group());
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      results.insert(tensor.item<float>());
    });
    ASSERT_TRUE(report.has_passed()) << report.describe();
  }
  EXPECT_EQ(results, std::set<float>{expected});
}

// TEST-13: outputs may be leaves that require grad, and their version does not change.
LOCKSTEP_THREAD_TEST(ThreadRanks, WriteOutputsWithoutTouchingAutograd, 2) {
  auto parameter = at::full({3}, world.rank() + 1.0).requires_grad_();
  const auto version = parameter._version();
  broadcast(parameter, 0, world.group());
  EXPECT_EQ(parameter._version(), version);
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_TRUE(parameter.requires_grad());
  EXPECT_EQ(parameter[0].item<double>(), 1.0);
}

// TEST-14: backward runs on the rank's own thread, so a hook may communicate.
LOCKSTEP_THREAD_TEST(ThreadRanks, RunBackwardOnTheirOwnThread, 3) {
  // On the CPU backward runs here in any case; this is what makes it so on a GPU.
  EXPECT_FALSE(c10::AutogradState::get_tls_state().get_multithreading_enabled());
  auto weight = torch::ones({2}, torch::TensorOptions(world.device()).requires_grad(true));
  std::thread::id hook_thread;
  weight.register_hook([&](at::Tensor grad) {
    hook_thread = std::this_thread::get_id();
    grad = grad.clone();
    all_reduce(grad, world.group());
    return grad;
  });
  (weight * (world.rank() + 1)).sum().backward();
  EXPECT_EQ(hook_thread, std::this_thread::get_id());
  EXPECT_EQ(weight.grad()[0].item<float>(), 6);
}

// TEST-16: a rank that throws wakes the others, and only its error is reported.
TEST(ThreadRanks, ReportOnlyTheRankThatThrew) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = run_threads({.world_size = 3}, [](const World& world) {
    if (world.rank() == 1) throw std::runtime_error("the disk is full");
    auto tensor = at::ones({1});
    all_reduce(tensor, world.group());
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  EXPECT_FALSE(report.has_passed());
  EXPECT_EQ(report.ranks[1].kind, RankOutcome::Kind::kFailed);
  EXPECT_EQ(report.ranks[1].text, "the disk is full");
  EXPECT_EQ(report.ranks[0].kind, RankOutcome::Kind::kStopped);
  EXPECT_EQ(report.ranks[2].kind, RankOutcome::Kind::kStopped);
  EXPECT_THAT(report.ranks[0].text, HasSubstr("rank 1 failed: the disk is full"));
}

// TEST-16: ranks that wait for a group to be made are woken too.
TEST(ThreadRanks, WakeRanksThatWaitForAGroup) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = run_threads({.world_size = 2}, [](const World& world) {
    if (world.rank() == 1) throw std::runtime_error("no group for me");
    new_group(world.group(), {0, 1});
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  EXPECT_EQ(report.ranks[0].kind, RankOutcome::Kind::kStopped);
}

// TEST-16: a rank that waits for a future is woken as well.
TEST(ThreadRanks, WakeRanksThatWaitForAFuture) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = run_threads({.world_size = 2}, [](const World& world) {
    if (world.rank() == 1) throw std::runtime_error("not coming");
    auto tensor = at::ones({1});
    launch_all_reduce(tensor, world.group()).future()->waitAndThrow();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  EXPECT_EQ(report.ranks[1].text, "not coming");
  EXPECT_NE(report.ranks[0].kind, RankOutcome::Kind::kPassed);
}

// TEST-16: skips are passed on.
TEST(ThreadRanks, PassSkipsOn) {
  const auto report =
      run_threads({.world_size = 2}, [](const World& world) { testing::skip_if_world_smaller_than(world, 3); });
  ASSERT_TRUE(report.skipped().has_value()) << report.describe();
  EXPECT_EQ(*report.skipped(), "needs 3 ranks, the world has 2");
}

// TEST-6, TEST-22: all ranks must skip, or none.
TEST(ThreadRanks, FailWhenOnlySomeSkip) {
  const auto report = run_threads({.world_size = 2}, [](const World& world) {
    if (world.rank() == 0) throw testing::Skip{testing::SkipCode::kFeatureMissing, "not today"};
  });
  EXPECT_FALSE(report.has_passed());
  EXPECT_THAT(report.describe(), HasSubstr("did not end alike"));
}

struct Disagreement {
  const char* name;
  std::function<void(const World&)> call;
  std::vector<std::string> words;
};

class ThreadMismatch : public ::testing::TestWithParam<Disagreement> {};

// TEST-17: every rank gets the same error, naming both calls; the group can still be used.
TEST_P(ThreadMismatch, ThrowsOnAllRanksAndNamesBoth) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    const auto message = testing::expect_error([&] { GetParam().call(world); }, GetParam().words);
    check_same_on_all_ranks("the message", message, world.group());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, ThreadMismatch,
    ::testing::Values(
        Disagreement{"Operation",
                     [](const World& world) {
                       auto tensor = at::ones({2});
                       if (world.rank() == 2) {
                         broadcast(tensor, 0, world.group());
                       } else {
                         all_reduce(tensor, world.group());
                       }
                     },
                     {"different operations", "all_reduce(sum, Float[2])", "broadcast(Float[2], root 0)"}},
        Disagreement{"Size",
                     [](const World& world) { all_reduce(at::ones({world.rank() == 1 ? 3 : 2}), world.group()); },
                     {"different sizes", "Float[2]", "Float[3]"}},
        Disagreement{"Dtype",
                     [](const World& world) {
                       all_reduce(at::ones({2}, world.rank() == 0 ? at::kDouble : at::kFloat), world.group());
                     },
                     {"different dtypes", "Double[2]", "Float[2]"}},
        Disagreement{"Reduction",
                     [](const World& world) {
                       all_reduce(at::ones({2}), world.group(), world.rank() == 0 ? ReduceOp::MAX : ReduceOp::SUM);
                     },
                     {"different reductions", "max", "sum"}},
        Disagreement{"Root",
                     [](const World& world) { broadcast(at::ones({2}), world.rank() == 0 ? 0 : 1, world.group()); },
                     {"different roots", "root 0", "root 1"}},
        Disagreement{"Splits",
                     [](const World& world) {
                       const std::vector<int64_t> sent =
                           world.rank() == 0 ? std::vector<int64_t>{2, 0, 1} : std::vector<int64_t>{1, 1, 1};
                       all_to_all_single(at::empty({3}), at::ones({3}), world.group(), {1, 1, 1}, sent);
                     },
                     {"rank 0 sends Float[2] to rank 0, which expects Float[1]"}},
        Disagreement{"GatheredSize",
                     [](const World& world) {
                       std::vector<at::Tensor> outputs;
                       for (int i = 0; i < 3; ++i) outputs.push_back(at::zeros({2}));
                       all_gather(outputs, at::ones({world.rank() == 1 ? 3 : 2}), world.group());
                     },
                     {"rank 1 gives Float[3], but rank 0 expects Float[2] from it"}}),
    [](const auto& info) { return std::string(info.param.name); });

// TEST-18: with late completion, reading before waiting gives garbage, so a missing wait is caught.
TEST(ThreadRanks, CatchAMissingWait) {
  const auto read_early = [](bool waits) {
    return run_threads({.world_size = 2, .completes_late = true}, [waits](const World& world) {
      auto tensor = at::ones({4});
      auto output = at::zeros({8});
      auto reduced = launch_all_reduce(tensor, world.group());
      auto gathered = launch_all_gather_into_tensor(output, at::ones({4}), world.group());
      if (waits) {
        reduced.wait();
        gathered.wait();
      }
      testing::check_equal("sum", tensor, at::full({4}, 2.0));
      testing::check_equal("gathered", output, at::ones({8}));
      if (!waits) {
        reduced.wait();
        gathered.wait();
      }
    });
  };
  EXPECT_TRUE(read_early(true).has_passed()) << read_early(true).describe();
  EXPECT_FALSE(read_early(false).has_passed());
}

// TEST-18: a future delivers before it completes.
TEST(ThreadRanks, DeliverLateResultsThroughFutures) {
  testing::run_threads_in_gtest({.world_size = 2, .completes_late = true}, [](const World& world) {
    auto tensor = at::full({2}, world.rank() + 1.0);
    auto pending = launch_all_reduce(tensor, world.group());
    const auto future = pending.future();
    future->wait();
    EXPECT_EQ(tensor[0].item<double>(), 3.0);
  });
}

// TEST-7, TEST-61: the report of a hang says who hung, what each rank did last, and where it is.
TEST(ThreadRanks, SayWhoHangsAndWhere) {
  const auto report =
      run_threads({.world_size = 2, .timeout = 1500ms, .collective_timeout = 60s}, [](const World& world) {
        all_reduce(at::ones({1}), world.group());
        if (world.rank() == 0) {
          all_reduce(at::ones({7}), world.group());
        } else {
          std::this_thread::sleep_for(4s);
        }
      });
  EXPECT_FALSE(report.has_passed());
  const auto text = report.describe();
  EXPECT_THAT(text, HasSubstr("rank 0, 1 still ran"));
  EXPECT_THAT(text, HasSubstr("collective #1, all_reduce(sum, Float[7]): waiting for rank 1"));
  EXPECT_THAT(text, HasSubstr("rank 0 did last:"));
  EXPECT_THAT(text, HasSubstr("launch all_reduce, 28 bytes Float"));
  EXPECT_THAT(text, HasSubstr("rank 1 is at:"));
  EXPECT_THAT(text, HasSubstr("sleep"));
}

// TEST-61: a collective whose deadline passes fails the test and shows where the missing rank is.
TEST(ThreadRanks, ShowTheMissingRankWhenACollectiveTimesOut) {
  const auto report = run_threads({.world_size = 3, .collective_timeout = 300ms}, [](const World& world) {
    if (world.rank() == 2) {
      std::this_thread::sleep_for(2s);
      return;
    }
    all_reduce(at::ones({5}), world.group());
  });
  EXPECT_FALSE(report.has_passed());
  const auto text = report.describe();
  EXPECT_THAT(text, HasSubstr("all_reduce(sum, Float[5])"));
  EXPECT_THAT(text, HasSubstr("rank 2 did not take part within 300 ms"));
  EXPECT_THAT(text, HasSubstr("rank 2 is at:"));
}

// A rank that comes after the others gave up is told so, instead of waiting for them.
TEST(ThreadRanks, TellALateRankThatTheOthersGaveUp) {
  std::string late_message;
  run_threads({.world_size = 2, .collective_timeout = 200ms}, [&](const World& world) {
    if (world.rank() == 1) {
      std::this_thread::sleep_for(1s);
      late_message = testing::expect_error([&] { all_reduce(at::ones({1}), world.group()); }, {});
    } else {
      testing::expect_error([&] { all_reduce(at::ones({1}), world.group()); }, {"rank 1", "200 ms"});
    }
  });
  EXPECT_THAT(late_message, HasSubstr("rank 1 did not take part within 200 ms"));
}

// TEST-26: words on the ranks that should fail, nobody waits for them.
LOCKSTEP_THREAD_TEST(ExpectError, ChecksEveryWordOnTheRanksThatShouldFail, 3) {
  testing::expect_error_on_ranks(world, {1},
                                 [&] { TORCH_CHECK(world.rank() != 1, "parameter 'w' on rank 1 has size 3"); },
                                 {"'w'", "rank 1", "3"});
  // The ranks that do not fail go on to a collective; the one that failed meets them there.
  all_reduce(at::ones({1}), world.group());
  testing::expect_error([] { testing::expect_error([] { TORCH_CHECK(false, "something else"); }, {"this word"}); },
                        {"does not mention 'this word'", "something else"});
  testing::expect_error([] { testing::expect_error([] {}, {"anything"}); }, {"there was none"});
  testing::expect_error([&] { testing::expect_error_on_ranks(world, {0, 1, 2}, [] {}, {"x"}); }, {"there was none"});
}

// TEST-63: a schedule depends on its seed alone, so a failing one can be replayed.
TEST(ChaosSchedule, RepeatsItselfFromTheSeed) {
  const auto decisions_of = [](uint64_t seed) {
    testing::ChaosSchedule schedule(seed, 2);
    for (int i = 0; i < 50; ++i) {
      schedule.pause(0);
      schedule.completes_late(0);
      schedule.pause(1);
    }
    return std::pair{schedule.decisions(0), schedule.decisions(1)};
  };
  EXPECT_EQ(decisions_of(7), decisions_of(7));
  EXPECT_NE(decisions_of(7), decisions_of(8));
  EXPECT_NE(decisions_of(7).first, decisions_of(7).second);
}

// TEST-63: ranks of different subgroups decide for themselves, though their group ranks are equal.
TEST(ChaosSchedule, KeepsRanksOfDifferentGroupsApart) {
  for (uint64_t seed = 0; seed < 5; ++seed) {
    testing::run_threads_in_gtest({.world_size = 4, .chaos_seed = seed}, [](const World& world) {
      const auto pair = new_subgroups(world.group(), {{0, 1}, {2, 3}});
      for (int i = 0; i < 50; ++i) {
        auto tensor = at::full({3}, world.rank());
        all_reduce(tensor, pair);
        ASSERT_EQ(tensor[0].item<int>(), world.rank() < 2 ? 1 : 5);
      }
    });
  }
}

// TEST-63: a race that needs an unlucky order is found by some seed, named in the report, and found again from it.
TEST(ChaosSchedule, FindsAMissingWaitAndNamesTheSeed) {
  const auto racy = [](const World& world) {
    auto tensor = at::ones({2});
    auto pending = launch_all_reduce(tensor, world.group());
    testing::check_equal("sum", tensor * 1, at::full({2}, 2.0));  // read without wait
    pending.wait();
  };
  std::optional<uint64_t> failing;
  for (uint64_t seed = 0; seed < 10 && !failing; ++seed) {
    const auto report = run_threads({.world_size = 2, .chaos_seed = seed}, racy);
    if (report.has_passed()) continue;
    failing = seed;
    EXPECT_THAT(report.describe(), HasSubstr("LOCKSTEP_CHAOS_SEED=" + std::to_string(seed)));
  }
  ASSERT_TRUE(failing.has_value());
  EXPECT_FALSE(run_threads({.world_size = 2, .chaos_seed = failing}, racy).has_passed());
}

}  // namespace
}  // namespace lockstep
