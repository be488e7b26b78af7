// What a backend cannot do, launch() makes up for; how a backend says so; and that our own get a Call as it is.
#include "lockstep/comm/backend_traits.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/group_state.h"
#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;

/// Rank 1 of a pretended world of 2 on the backend that `factory` makes.
World join(const std::string& name, std::optional<BackendTraits> traits, c10::intrusive_ptr<FakeBackend>& made) {
  register_backend(
      name, {c10::kCPU},
      [&made](const BackendRequest& request) -> BackendPtr {
        made = c10::make_intrusive<FakeBackend>(request.rank, request.size, request.timeout);
        return made;
      },
      traits);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("world/1/check_in/0", std::vector<uint8_t>{1});
  return init({.backend = name, .rank = 1, .world_size = 2, .store = store});
}

TEST(BackendTraits, ABackendThatOnlySumsIsAskedForSums) {
  c10::intrusive_ptr<FakeBackend> backend;
  const auto world = join("sums", BackendTraits{.averages = false}, backend);
  const auto tensor = at::full({3}, 6.F);
  all_reduce(tensor, world.group(), ReduceOp::AVG);
  check_equal("halves", tensor, at::full({3}, 3.F));  // a fake sum leaves the tensor as it is
  EXPECT_EQ(backend->calls().at(0).op, ReduceOp::SUM);
  const auto elsewhere = at::full({3}, 6.F);
  reduce(elsewhere, 0, world.group(), ReduceOp::AVG);
  check_equal("only the root divides", elsewhere, at::full({3}, 6.F));
  auto future = launch_all_reduce(tensor, world.group(), ReduceOp::AVG).future();
  future->wait();
  check_equal("through a future", future->value().toTensorVector().at(0), at::full({3}, 1.5F));
}

TEST(BackendTraits, ABackendThatTakesOneTensorIsAskedOncePerTensor) {
  c10::intrusive_ptr<FakeBackend> backend;
  const auto world = join("singly", BackendTraits{.coalesces = false}, backend);
  all_reduce_coalesced({at::ones({1}), at::ones({2}), at::ones({3})}, world.group(), ReduceOp::AVG);
  ASSERT_EQ(backend->calls().size(), 3U);
  EXPECT_EQ(backend->calls()[2].describe(), "all_reduce(avg, Float[3])");
}

TEST(BackendTraits, WithoutAWordABackendCanDoEverything) {
  c10::intrusive_ptr<FakeBackend> backend;
  const auto world = join("able", std::nullopt, backend);
  all_reduce_coalesced({at::ones({1}), at::ones({2})}, world.group(), ReduceOp::AVG);
  ASSERT_EQ(backend->calls().size(), 1U);
  EXPECT_EQ(backend->calls()[0].op, ReduceOp::AVG);
}

TEST(BackendTraits, BuiltInOnesAreKnownByName) {
  const auto gloo = registered_traits("gloo").value();
  EXPECT_FALSE(gloo.averages || gloo.coalesces || gloo.names_missing_ranks || gloo.starts_concurrently);
  EXPECT_FALSE(registered_traits("shm"));  // it becomes one of several backends, each of which knows its own
  EXPECT_FALSE(registered_traits("unheard of"));
  EXPECT_TRUE(traits_of(FakeBackend(0, 2)).averages);
}

// A call reaches a backend of ours as it was made: no copies of tensors, no flattening, no options of c10d between.
TEST(CallBackend, ReceivesTheCallAsItIs) {
  const auto [group, backend] = make_fake_group(1, 2);
  const auto output = at::empty({4, 3});
  const auto input = at::ones({2, 3});
  all_gather_into_tensor(output, input, group);
  const auto call = backend->calls().at(0);
  EXPECT_TRUE(call.inputs[0].is_same(input));
  EXPECT_TRUE(call.outputs[0].is_same(output));
  check_equal("gathered", output, at::ones({4, 3}));
  EXPECT_EQ(call.timeout, group_timeout(group));
  EXPECT_FALSE(call.is_async);
}

// What c10d's own functions refuse, launch() refuses too.
TEST(CallBackend, IsNotAskedForMalformedCalls) {
  const auto [group, backend] = make_fake_group(0, 2);
  const auto two = std::vector{at::ones({1}), at::ones({1})};
  const auto refused = [&, &g = group](const Call& call, const std::string& text) {
    expect_error([&] { static_cast<void>(launch(call, g)); }, {"[lockstep/comm] rank 0", name_of(call.kind), text});
  };
  refused({.kind = CallKind::kReduce, .inputs = two}, "takes one tensor, got 2");
  refused({.kind = CallKind::kBroadcast}, "takes one tensor, got 0");
  refused({.kind = CallKind::kGather, .inputs = two, .outputs = two}, "takes one input, got 2");
  refused({.kind = CallKind::kScatter, .inputs = two, .outputs = two}, "takes one output, got 2");
  refused({.kind = CallKind::kAllToAllSingle, .inputs = {at::ones({2})}}, "takes one output, got 0");
  EXPECT_TRUE(backend->calls().empty());
}

// A group that is left out is the default one, and there has to be one.
TEST(DefaultGroup, IsMissingBeforeInit) {
  expect_error([] { all_reduce(at::ones({1})); }, {"there is no default group", "call lockstep::init() first"});
  expect_error([] { barrier(); }, {"there is no default group"});
  expect_error([] { all_reduce(at::ones({1}), GroupPtr()); }, {"the group is null: this rank is not part of it"});
}

}  // namespace
}  // namespace lockstep
