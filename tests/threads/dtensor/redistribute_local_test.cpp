// Local tensors from placements to placements among ranks, against the whole tensor.
#include "lockstep/dtensor/redistribute_local.h"

#include <algorithm>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/redistribute_limit.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::redistribute_local_test {
namespace {

using detail::launch_redistribute_local;
using detail::redistribute_local;
using testing::check_equal;
using testing::expect_error;
using testing::Recorder;
using Sizes = std::vector<int64_t>;

constexpr PlanOptions kInternal = {.allow_partial_target = true};

/// Divisible by 2, 3 and 4, so that terms are exact.
at::Tensor whole_of(const Sizes& sizes, at::ScalarType dtype = at::kFloat) {
  int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return (at::arange(count, at::kLong) * 12 - 60).view(sizes).to(dtype);
}

/// The term of the `index`-th of `count` ranks: together they make `value`.
at::Tensor term_of(const at::Tensor& value, ReduceOp op, int index, int64_t count) {
  if (op == ReduceOp::SUM) return index == 0 ? value - 5 * count * (count - 1) : at::full_like(value, 10 * index);
  if (op == ReduceOp::AVG) return value + (2 * index - (count - 1));
  return index == count - 1 ? value : value - 1 - index;  // max
}

at::Tensor local_of(const at::Tensor& whole, const Layout& layout) {
  const auto& mesh = layout.mesh();
  auto value = whole;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const auto* partial = std::get_if<Partial>(&layout.placements()[axis]);
    if (partial != nullptr) value = term_of(value, partial->op, (*mesh.get_coordinate())[axis], mesh.size(axis));
  }
  return layout.cut(value).contiguous();
}

/// The library's collectives that a plan promises.
std::vector<std::string> collectives_of(const RedistributePlan& plan) {
  std::vector<std::string> names;
  for (const auto& step : plan.steps) {
    const auto sizes = step.sizes;
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) continue;
    if (step.move == Move::kAllGather) names.emplace_back("all_gather_into_tensor");
    if (step.move == Move::kAllReduce) names.emplace_back("all_reduce");
    if (step.move == Move::kReduceScatter) names.emplace_back("reduce_scatter_tensor");
    if (step.move == Move::kAllToAll) names.emplace_back("all_to_all_single");
  }
  return names;
}

bool is_refused(const Layout& from, const Placements& to) {
  return redistribute_bytes(from, to, at::kFloat, kInternal) == kNoWay;
}

/// Values, sizes, memory, and the collectives that were made.
void check_redistribute(const at::Tensor& whole, const Layout& from, const Placements& to) {
  const auto what = str(from, " to ", to_string(to));
  const Layout target(from.mesh(), to, from.sizes());
  const auto local = local_of(whole, from);
  const auto before = local.clone();
  const auto plan = plan_redistribute(from, to, whole.scalar_type(), kInternal);
  at::Tensor result;
  {
    const Recorder recorder;
    result = redistribute_local(local, from, to, kInternal);
    testing::expect_exact_order(recorder.events("launch"), collectives_of(plan));
  }
  check_equal("input of " + what, local, before);
  ASSERT_EQ(result.sizes(), at::IntArrayRef(target.local_sizes())) << what;
  EXPECT_TRUE(result.is_contiguous()) << what;
  auto pending = launch_redistribute_local(local, from, to, kInternal);
  ASSERT_EQ(pending.tensor().sizes(), result.sizes()) << what;
  const auto memory = pending.tensor().data_ptr();
  check_equal("launched " + what, pending.wait(), result);
  EXPECT_EQ(pending.wait().data_ptr(), memory) << what;
  if (target.has_partial()) {
    const Placements all(to.size(), Replicate());
    check_equal("reduced " + what, redistribute_local(result, target, all), whole);
  } else {
    check_equal(what, result, target.cut(whole).contiguous());
  }
}

/// All combinations of `choices` on so many axes that a layout of `sizes` may have.
std::vector<Placements> combinations(const DeviceMesh& mesh, const Placements& choices, const Sizes& sizes) {
  std::vector<Placements> all = {{}};
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    std::vector<Placements> longer;
    for (const auto& begun : all) {
      for (const auto& choice : choices) {
        longer.push_back(begun);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  std::erase_if(all, [&](const Placements& placements) {
    try {
      const Layout layout(mesh, placements, sizes);
      return false;
    } catch (const c10::Error&) {
      return true;  // reductions that do not mix
    }
  });
  return all;
}

const Placements kChoices = {
    Replicate(), Shard(0), Shard(1), StridedShard(0, 2), Partial(), Partial(ReduceOp::AVG), Partial(ReduceOp::MAX)};

void check_all_pairs(const DeviceMesh& mesh, const Placements& choices, const Sizes& sizes) {
  const auto whole = whole_of(sizes);
  const auto all = combinations(mesh, choices, sizes);
  for (const auto& from : all) {
    const Layout layout(mesh, from, sizes);
    for (const auto& to : all) {
      if (is_refused(layout, to)) continue;
      check_redistribute(whole, layout, to);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

void check_all_pairs_on_a_line(const World& world) {
  const auto mesh = init_device_mesh("cpu", {world.world_size()});
  for (const auto& sizes : std::vector<Sizes>{{12, 24}, {7, 5}, {5, 2}, {1, 3}, {3, 1}, {0, 4}, {4, 0}, {1, 7, 3}}) {
    check_all_pairs(mesh, kChoices, sizes);
  }
}

// TP-23 to TP-29: every pair, even, uneven and empty
LOCKSTEP_THREAD_TEST(RedistributeLocal, AllPairsOnOneRank, 1) {
  check_all_pairs_on_a_line(world);
}

// TP-23 to TP-29
LOCKSTEP_RANK_TEST(RedistributeLocal, AllPairsOnTwoRanks, 2) {
  check_all_pairs_on_a_line(world);
}

// TP-23 to TP-29
LOCKSTEP_RANK_TEST(RedistributeLocal, AllPairsOnThreeRanks, 3) {
  check_all_pairs_on_a_line(world);
}

// TP-23 to TP-29
LOCKSTEP_THREAD_TEST(RedistributeLocal, AllPairsOnFourRanks, 4) {
  check_all_pairs_on_a_line(world);
}

// TP-30
LOCKSTEP_THREAD_TEST(RedistributeLocal, AllPairsOnASquare, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  for (const auto& sizes : std::vector<Sizes>{{8, 4}, {7, 5}, {1, 3}}) check_all_pairs(mesh, kChoices, sizes);
}

// TP-30: sizes that only some ranks have a part of, and none
LOCKSTEP_THREAD_TEST(RedistributeLocal, EmptyPartsOnASquare, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const Placements choices = {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), Partial()};
  for (const auto& sizes : std::vector<Sizes>{{5, 1}, {3, 2}, {2, 0}, {0, 3}}) check_all_pairs(mesh, choices, sizes);
}

void check_random_pairs(const DeviceMesh& mesh, const Sizes& most, int count) {
  const Placements choices = {Replicate(), Replicate(),        Shard(0),           Shard(0),           Shard(1),
                              Shard(2),    StridedShard(0, 2), StridedShard(0, 4), StridedShard(1, 2), Partial()};
  std::mt19937 random(7);  // the same on all ranks
  const auto draw = [&] {
    Placements placements;
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) placements.push_back(choices[random() % choices.size()]);
    return placements;
  };
  for (int i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    Sizes sizes;
    for (const auto size : most)
      sizes.push_back(static_cast<int64_t>(random() % 3 == 0 ? size : random() % (size + 1)));
    const Layout layout(mesh, draw(), sizes);
    const auto to = draw();
    if (!is_refused(layout, to)) check_redistribute(whole_of(sizes), layout, to);
  }
}

// TP-30: three axes
LOCKSTEP_THREAD_TEST(RedistributeLocal, RandomPairsOnACube, 8) {
  check_random_pairs(init_device_mesh("cpu", {2, 2, 2}), {16, 8, 5}, 400);
}

// TP-30: axes of different sizes, and of one rank
LOCKSTEP_THREAD_TEST(RedistributeLocal, RandomPairsOnUnequalAxes, 6) {
  check_random_pairs(init_device_mesh("cpu", {3, 2}), {12, 8, 5}, 400);
  check_random_pairs(init_device_mesh("cpu", {2, 1, 3}), {12, 7, 3}, 400);
}

// TP-29: ragged shards go through Replicate
LOCKSTEP_RANK_TEST(RedistributeLocal, RaggedShards, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const Placements choices = {
      Replicate(), Shard(0),          RaggedShard(0, {4, 0, 3}), RaggedShard(0, {0, 7, 0}), RaggedShard(1, {1, 2, 2}),
      Partial(),   StridedShard(1, 2)};
  check_all_pairs(mesh, choices, {7, 5});
}

void check_moves_of(const DeviceMesh& mesh, const at::Tensor& whole) {
  const auto sizes = whole.sizes().vec();
  const Placements moving = {Replicate(), Shard(0), Shard(1), StridedShard(1, 2)};
  for (const auto& from : moving) {
    const Layout layout(mesh, {from}, sizes);
    const auto part = layout.cut(whole);
    const auto strided = part.is_conj() ? part : part.t().contiguous().t();
    for (const auto& to : moving) {
      if (from == to) continue;
      const auto expected = Layout(mesh, {to}, sizes).cut(whole).resolve_conj();
      check_equal(str(from, " to ", to), redistribute_local(strided, layout, {to}), expected);
    }
  }
}

// Whatever the strides of the input, and whatever the dtype where data only moves.
LOCKSTEP_RANK_TEST(RedistributeLocal, TakesAnyStridesAndDtypes, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  for (const auto& sizes : std::vector<Sizes>{{6, 3}, {7, 5}}) {
    check_moves_of(mesh, whole_of(sizes).remainder(24).to(at::kBool));
    for (const auto dtype : {at::kByte, at::kLong, at::kHalf, at::kBFloat16, at::kDouble}) {
      check_moves_of(mesh, whole_of(sizes, dtype));
    }
  }
  const auto whole = whole_of({7, 5}, at::kLong);
  for (const Placement& to : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
    const Layout layout(mesh, {Partial()}, {7, 5});
    const auto strided = local_of(whole, layout).t().contiguous().t();
    check_equal("reduced", redistribute_local(strided, layout, {to}), Layout(mesh, {to}, {7, 5}).cut(whole));
  }
}

// gloo takes no complex numbers, the others do: also lazily conjugated ones.
LOCKSTEP_THREAD_TEST(RedistributeLocal, TakesComplexNumbers, 3) {
  const auto mesh = init_device_mesh("cpu", {3});
  const auto whole = whole_of({7, 5}, at::kComplexFloat) * c10::complex<float>(1, 2);
  check_moves_of(mesh, whole);
  check_moves_of(mesh, whole.conj());
}

// TP-28: integers that do not divide come back whole
LOCKSTEP_THREAD_TEST(RedistributeLocal, MakesTermsOfIntegers, 3) {
  const Layout layout(init_device_mesh("cpu", {3}), {Replicate()}, {4});
  const auto value = at::arange(4, at::kLong);
  const auto term = redistribute_local(value, layout, {Partial()}, kInternal);
  check_equal("sum", redistribute_local(term, Layout(layout.mesh(), {Partial()}, {4}), {Replicate()}), value);
}

// TP-24: a copy, which is free of the rest
LOCKSTEP_THREAD_TEST(RedistributeLocal, CopiesASlice, 2) {
  const Layout layout(init_device_mesh("cpu", {2}), {Replicate()}, {4, 2});
  const auto local = at::ones({4, 2});
  const Recorder recorder;
  const auto part = redistribute_local(local, layout, {Shard(0)});
  EXPECT_FALSE(part.is_alias_of(local));
  EXPECT_EQ(part.storage().nbytes(), 4 * sizeof(float));
  EXPECT_TRUE(recorder.events().empty());
}

// TP-29: the same tensor
LOCKSTEP_THREAD_TEST(RedistributeLocal, GivesBackWhatDoesNotMove, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const Recorder recorder;
  const auto local = at::ones({2, 2});
  for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(-2))}) {
    EXPECT_TRUE(redistribute_local(local, Layout(mesh, {Shard(0)}, {4, 2}), {placement}).is_same(local));
    EXPECT_TRUE(launch_redistribute_local(local, Layout(mesh, {Shard(0)}, {4, 2}), {placement}).wait().is_same(local));
  }
  EXPECT_TRUE(recorder.events().empty());
}

// TP-6: ranks outside call nothing and get nothing
LOCKSTEP_THREAD_TEST(RedistributeLocal, LeavesOutRanksOutsideOfTheMesh, 4) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {3, 1}});
  const Layout layout(mesh, {Shard(0)}, {5});
  const auto whole = whole_of({5});
  const Recorder recorder;
  const auto result = redistribute_local(layout.cut(whole), layout, {Replicate()});
  EXPECT_EQ(recorder.events("launch").size(), mesh.is_member() ? 1U : 0U);
  check_equal("result", result, mesh.is_member() ? whole : at::empty({0}));
  expect_error([&] { redistribute_local(layout.cut(whole), layout, {Partial()}); }, {"Shard(dim=0) to Partial(sum)"});
  EXPECT_EQ(plan_redistribute(layout, {Replicate()}, at::kFloat).bytes(), world.rank() == 3   ? 8
                                                                          : world.rank() == 1 ? 12
                                                                                              : 0);
}

// TP-59: uneven parts, and all ranks refuse alike
LOCKSTEP_THREAD_TEST(RedistributeLocal, IsLimitedAlikeOnAllRanks, 3) {
  const Layout layout(init_device_mesh("cpu", {3}), {Shard(0)}, {4});
  const auto local = layout.cut(whole_of({4})).contiguous();
  const RedistributeLimit limit(8);
  const Recorder recorder;
  expect_error([&] { redistribute_local(local, layout, {Replicate()}); }, {"brings 16 bytes", "all_gather"});
  EXPECT_TRUE(recorder.events().empty());
}

// Autograd knows nothing of it, whatever it knows of the input.
LOCKSTEP_THREAD_TEST(RedistributeLocal, IsNotRecorded, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto leaf = at::ones({2, 2}).requires_grad_();
  for (const Placement& from : {Placement(Shard(0)), Placement(Shard(1)), Placement(Partial())}) {
    for (const Placement& to : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      if (from == to) continue;
      const Sizes sizes = from == Placement(Shard(0))   ? Sizes{4, 2}
                          : from == Placement(Shard(1)) ? Sizes{2, 4}
                                                        : Sizes{2, 2};
      const auto result = redistribute_local(leaf, Layout(mesh, {from}, sizes), {to});
      EXPECT_FALSE(result.requires_grad());
      EXPECT_FALSE(result.is_view());
    }
  }
}

// Values come in wait() and not before; what follows a collective is done then.
TEST(RedistributeLocal, IsLaunchedAndWaitedFor) {
  testing::run_threads_in_gtest({.world_size = 3, .completes_late = true}, [](const World&) {
    const auto mesh = init_device_mesh("cpu", {3});
    for (const auto& sizes : std::vector<Sizes>{{6, 3}, {7, 5}}) {
      const auto whole = whole_of(sizes);
      for (const auto& from : kChoices) {
        const Layout layout(mesh, {from}, sizes);
        for (const auto& to : kChoices) {
          if (std::holds_alternative<Partial>(to)) continue;
          auto pending = launch_redistribute_local(local_of(whole, layout), layout, {to});
          const auto tensor = pending.tensor();
          pending.wait();
          check_equal(str(from, " to ", to), tensor, Layout(mesh, {to}, sizes).cut(whole).contiguous());
          EXPECT_TRUE(pending.is_completed());
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::redistribute_local_test
