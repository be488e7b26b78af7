// Groups, objects and agreement: what works the same over every backend, on rank threads and, where marked, on
// processes.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/base/rank_local.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;

LOCKSTEP_RANK_TEST(Groups, AreMadeFromRankLists, 4) {
  const auto odd = new_group(world.group(), {3, 1}, {.name = "odd"});
  if (world.rank() % 2 == 0) {
    EXPECT_FALSE(odd);
  } else {
    EXPECT_EQ(odd->getRank(), world.rank() == 3 ? 0 : 1);
    EXPECT_EQ(global_ranks(odd), (std::vector<int>{3, 1}));
    EXPECT_EQ(group_name(odd), "odd");
    auto tensor = at::full({1}, world.rank());
    broadcast(tensor, 0, odd);
    EXPECT_EQ(tensor.item<int>(), 3);
    const auto alone = new_group(odd, {1});
    if (world.rank() == 1) {
      EXPECT_EQ(global_ranks(alone), std::vector<int>{1});
      all_reduce(tensor, alone);
    }
  }
  const auto halves = new_subgroups(world.group(), {{0, 1}, {2, 3}});
  auto sum = at::full({1}, world.rank());
  all_reduce(sum, halves);
  EXPECT_EQ(sum.item<int>(), world.rank() < 2 ? 1 : 5);
}

LOCKSTEP_THREAD_TEST(Groups, AreRefusedByRanksOutsideOfThem, 2) {
  const auto first = new_group(world.group(), {0});
  if (world.rank() == 0) return;
  const std::vector<std::string> message = {"the group is null", "not part of it"};
  expect_error([&] { all_gather_object("a", first); }, message);
  expect_error([&] { gather_object("a", 0, first); }, message);
  expect_error([&] { broadcast_object("a", 0, first); }, message);
  expect_error([&] { broadcast_value(1, 0, first, at::kCPU); }, message);
  expect_error([&] { host_numbers(first); }, message);
  expect_error([&] { check_same_on_all_ranks("this", "a", first); }, message);
}

LOCKSTEP_THREAD_TEST(Groups, RefuseBadRankLists, 2) {
  expect_error([&] { new_group(world.group(), {}); }, {"rank " + std::to_string(world.rank()), "at least one rank"});
  expect_error([&] { new_group(world.group(), {0, 2}); }, {"rank 2 is not in group 'world' of 2"});
  expect_error([&] { new_group(world.group(), {0, 0}); }, {"rank 0 is named twice"});
  expect_error([&] { new_subgroups(world.group(), {{0, 1}, {1}}); }, {"rank 1 is named twice"});
  // Rank 1 would not be a member, and refuses all the same.
  expect_error([&] { new_group(world.group(), {0}, {.backend = "none"}); }, {"no backend 'none'"});
  barrier(world.group());
}

LOCKSTEP_RANK_TEST(Groups, AreMadeByHost, 3) {
  // All ranks are on this machine.
  EXPECT_EQ(host_numbers(world.group()), (std::vector<int>{0, 0, 0}));
  const auto host = new_host_group(world.group());
  EXPECT_EQ(host->getSize(), 3);
}

LOCKSTEP_PROCESS_TEST(Groups, FollowTheHostIdentity, 4) {
  ::setenv("LOCKSTEP_HOST_ID", world.rank() == 0 || world.rank() == 3 ? "east" : "west", 1);
  EXPECT_EQ(host_numbers(world.group()), (std::vector<int>{0, 1, 1, 0}));
  const auto host = new_host_group(world.group());
  EXPECT_EQ(global_ranks(host),
            (world.rank() == 0 || world.rank() == 3 ? std::vector<int>{0, 3} : std::vector<int>{1, 2}));
}

LOCKSTEP_RANK_TEST(Objects, TravelWhateverTheirLength, 3) {
  const std::string mine(world.rank() * 1000, static_cast<char>('a' + world.rank()));
  const auto all = all_gather_object(mine, world.group());
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0], "");
  EXPECT_EQ(all[1], std::string(1000, 'b'));
  EXPECT_EQ(all[2], std::string(2000, 'c'));
  EXPECT_EQ(gather_object(mine, 1, world.group()).size(), world.rank() == 1 ? 3U : 0U);
  EXPECT_EQ(broadcast_object(mine, 2, world.group()), std::string(2000, 'c'));
  EXPECT_EQ(broadcast_object(mine, 0, world.group()), "");
  const std::string with_zero("a\0b", 3);
  EXPECT_EQ(broadcast_object(world.rank() == 1 ? with_zero : "", 1, world.group()), with_zero);
}

LOCKSTEP_RANK_TEST(Agreement, GivesEveryRankTheSameErrorWithBothSides, 3) {
  check_same_on_all_ranks("the shape", "2x3", world.group());
  const auto message =
      expect_error([&] { check_same_on_all_ranks("the shape", world.rank() == 1 ? "4x4" : "2x3", world.group()); },
                   {"disagree on the shape", "ranks 0, 2: '2x3'", "rank 1: '4x4'"});
  const auto messages = all_gather_object(message, world.group());
  EXPECT_EQ(messages[0], messages[1]);
  EXPECT_EQ(messages[0], messages[2]);
}

LOCKSTEP_THREAD_TEST(Agreement, NamesTheFirstFactThatDiffers, 2) {
  const auto check = [&](const Facts& facts, const std::vector<std::string>& words) {
    expect_error([&] { check_same_on_all_ranks("parameters", facts, world.group()); }, words);
  };
  const bool first = world.rank() == 0;
  check({{"a", "1"}, {"b", first ? "2" : "3"}, {"c", "4"}},
        {"disagree on parameters: b", "rank 0: '2'", "rank 1: '3'"});
  check(first ? Facts{{"a", "1"}} : Facts{{"a", "1"}, {"b", "2"}}, {"rank 0: 1 entries", "rank 1: 2 entries"});
  check({{first ? "x" : "y", "1"}}, {"x = '1'", "y = '1'"});
  // A difference beyond what is shown is still a difference.
  check({{"long", std::string(500, 'a') + (first ? "b" : "c")}}, {"disagree on parameters: long", "501 characters"});
  barrier(world.group());
}

// D-18: long facts travel only if they differ.
LOCKSTEP_THREAD_TEST(Agreement, GathersNoTextsThatAreTheSame, 2) {
  Facts facts;
  for (int i = 0; i < 300; ++i) facts.emplace_back("parameter " + std::to_string(i), "Float[1024, 1024]");
  const auto bytes_of = [&](const auto& check) {
    testing::Recorder recorder;
    check();
    std::size_t bytes = 0;
    for (const auto& event : recorder.events("launch")) bytes += event.bytes;
    return bytes;
  };
  EXPECT_LT(bytes_of([&] { check_same_on_all_ranks("parameters", facts, world.group()); }), 1024U);
  if (world.rank() == 1) facts[299].second = "Float[1024, 1025]";
  EXPECT_GT(bytes_of([&] {
              expect_error([&] { check_same_on_all_ranks("parameters", facts, world.group()); },
                           {"parameter 299", "1025"});
            }),
            4096U);
}

// A group c10d made itself, without our help, is taken as well.
LOCKSTEP_THREAD_TEST(Groups, MadeByOthersAreTaken, 2) {
  const auto backend =
      c10::make_intrusive<ThreadBackend>("foreign-hub", world.rank(), 2, "foreign", std::chrono::seconds(20));
  GroupPtr group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), world.rank(), 2);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  auto tensor = at::ones({1});
  all_reduce(tensor, group);
  EXPECT_EQ(tensor.item<float>(), 2);
  EXPECT_EQ(global_ranks(group), (std::vector<int>{0, 1}));
  barrier(world.group());
}

// The future's callback and the waiter finish the same result; neither may hold what the other needs.
LOCKSTEP_RANK_TEST(Pending, CanBeWaitedForWhileItsFutureCompletes, 2) {
  for (int i = 0; i < 200; ++i) {
    std::vector<at::Tensor> tensors = {at::full({50}, world.rank() + 1.0), at::full({7}, world.rank() + 1.0)};
    auto pending = launch_all_reduce_coalesced(tensors, world.group(), ReduceOp::AVG);
    const auto future = pending.future();
    pending.wait();
    ASSERT_EQ(tensors[0][49].item<double>(), 1.5);
    ASSERT_EQ(tensors[1][6].item<double>(), 1.5);
    future->wait();
    ASSERT_EQ(tensors[0][0].item<double>(), 1.5);
  }
}

LOCKSTEP_RANK_TEST(Pending, LetsTheCallerComputeMeanwhile, 2) {
  std::vector<at::Tensor> tensors;
  std::vector<Pending> pending;
  for (int i = 0; i < 5; ++i) {
    tensors.push_back(at::full({100}, world.rank() + i));
    pending.push_back(launch_all_reduce(tensors.back(), world.group()));
  }
  for (int i = 4; i >= 0; --i) {
    pending[i].wait();
    pending[i].wait();
    EXPECT_TRUE(pending[i].is_completed());
    EXPECT_EQ(tensors[i][0].item<int>(), 2 * i + 1);
  }
  auto average = at::full({3}, world.rank() + 1.0);
  auto last = launch_all_reduce(average, world.group(), ReduceOp::AVG);
  const auto future = last.future();
  future->wait();
  EXPECT_EQ(average[0].item<double>(), 1.5);
  last.wait();
  EXPECT_EQ(average[0].item<double>(), 1.5);
}

// The threads backend cannot join processes, and says what can.
LOCKSTEP_THREAD_TEST(Threads, RefuseProcesses, 1) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("world/1/check_in/0", std::vector<uint8_t>{1});
  const std::string elsewhere = "hub-1-0";  // process 1 is not us
  store->set("world/1/threads/hub", std::vector<uint8_t>(elsewhere.begin(), elsewhere.end()));
  RankScope scope;
  const EnterRank enter(scope);
  expect_error([&] { static_cast<void>(init({.backend = "threads", .rank = 1, .world_size = 2, .store = store})); },
               {"threads of one process", "Use gloo"});
}

}  // namespace
}  // namespace lockstep
