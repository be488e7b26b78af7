// The fake group: records, delays and fails calls of a world that is not there.
#include "lockstep/comm/fake/fake_backend.h"

#include <gtest/gtest.h>

#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;

// TEST-20: fixed rank and size, a finished future, worlds of any size.
TEST(FakeGroup, PretendsALargeWorld) {
  const auto [group, backend] = make_fake_group(1000, 1024);
  EXPECT_EQ(group->getRank(), 1000);
  EXPECT_EQ(group->getSize(), 1024);
  auto tensor = at::ones({3});
  auto pending = launch_all_reduce(tensor, group);
  EXPECT_TRUE(pending.is_completed());
  EXPECT_TRUE(pending.future()->completed());
  EXPECT_EQ(pending.future()->value().toTensorVector().size(), 1U);
  pending.wait();
  check_equal("unchanged", tensor, at::ones({3}));
}

TEST(FakeGroup, RecordsCallsInOrder) {
  const auto [group, backend] = make_fake_group(1, 4);
  all_reduce(at::ones({3}), group, ReduceOp::MAX);
  auto gathered = at::empty({8});
  all_gather_into_tensor(gathered, at::ones({2}), group);
  check_equal("gathered", gathered, at::ones({8}));
  auto share = at::empty({2});
  reduce_scatter_tensor(share, at::arange(8, at::kFloat), group);
  check_equal("share", share, at::tensor({2.F, 3.F}));
  barrier(group);
  const auto calls = backend->calls();
  ASSERT_EQ(calls.size(), 4U);
  EXPECT_EQ(calls[0].describe(), "all_reduce(max, Float[3])");
  EXPECT_EQ(calls[1].kind, CallKind::kAllGatherSingle);
  EXPECT_EQ(calls[2].bytes(), 32U);
  EXPECT_EQ(calls[3].kind, CallKind::kBarrier);
  backend->clear_calls();
  EXPECT_TRUE(backend->calls().empty());
}

TEST(FakeGroup, FailsAndDelaysTheNthCall) {
  const auto [group, backend] = make_fake_group(0, 2);
  backend->fail_call(1, "the cable was pulled");
  backend->delay_call(2, std::chrono::milliseconds(30));
  all_reduce(at::ones({1}), group);
  auto pending = launch_all_reduce(at::ones({1}), group);
  expect_error([&] { pending.wait(); }, {"the cable was pulled"});
  expect_error([&] { pending.wait(); }, {"the cable was pulled"});
  const auto start = std::chrono::steady_clock::now();
  all_reduce(at::ones({1}), group);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(30));
}

// Bytes go to the root alone: the others neither receive nor hold them.
TEST(Objects, AreGatheredOnTheRootOnly) {
  const auto [group, backend] = make_fake_group(1, 4);
  EXPECT_TRUE(gather_object("mine", 2, group).empty());
  ASSERT_EQ(backend->calls().size(), 2U);
  EXPECT_EQ(backend->calls()[1].kind, CallKind::kGather);
  EXPECT_EQ(backend->calls()[1].bytes(), 4U);
  EXPECT_EQ(gather_object("mine", 1, group), (std::vector<std::string>{"mine", "mine", "mine", "mine"}));
  expect_error([&, &g = group] { gather_object("mine", 4, g); }, {"gather_object", "root 4", "group of 4"});
}

TEST(Collectives, RefuseMalformedCallsWithRankAndOperation) {
  const auto [group, backend] = make_fake_group(1, 2);
  const auto& g = group;
  expect_error([&] { all_reduce(at::Tensor(), g); }, {"rank 1", "all_reduce", "undefined"});
  expect_error([&] { all_reduce(at::ones({2, 2}).to_sparse(), g); }, {"all_reduce", "not dense"});
  expect_error([&] { broadcast(at::ones({1}), 2, g); }, {"broadcast", "root 2", "group of 2"});
  expect_error([&] { all_gather({at::ones({1})}, at::ones({1}), g); }, {"all_gather", "expected 2 outputs", "got 1"});
  expect_error([&] { all_gather_into_tensor(at::ones({3}), at::ones({2}), g); },
               {"Float[3] must hold 2 times", "Float[2]"});
  expect_error([&] { reduce_scatter_tensor(at::ones({3}), at::ones({2}), g); }, {"reduce_scatter_tensor", "2 times"});
  expect_error([&] { gather(at::ones({1}), {at::ones({1}), at::ones({1})}, 0, g); }, {"gather", "not the root"});
  expect_error([&] { scatter(at::ones({1}), {at::ones({1}), at::ones({1})}, 0, g); }, {"scatter", "not the root"});
  expect_error([&] { all_to_all_single(at::ones({3}), at::ones({3}), g); }, {"all_to_all_single", "give the splits"});
  expect_error([&] { all_to_all_single(at::ones({3}), at::ones({3}), g, {1, 1}, {2, 1}); }, {"splits 1, 1"});
  expect_error([&] { all_to_all({at::ones({3})}, {at::ones({3})}, g); }, {"all_to_all", "one per rank"});
  expect_error([&] { all_reduce_coalesced({at::ones({1}), at::ones({1}, at::kDouble)}, g); },
               {"share dtype and device", "Float[1]", "Double[1]"});
  expect_error([&] { all_reduce(at::ones({1}), GroupPtr()); }, {"group is null"});
  EXPECT_TRUE(backend->calls().empty());
}

}  // namespace
}  // namespace lockstep
