// What a rank holds of a tensor, from sizes alone.
#include "lockstep/shard/layout.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;
using Sizes = std::vector<int64_t>;
using Ranges = std::vector<ElementRange>;

DeviceMesh line_of(int ranks, int rank = 0) {
  return DeviceMesh::from_group(make_fake_group(rank, ranks).group, "cpu", {.mesh_dim_names = {"tp"}});
}

std::vector<std::vector<int>> coordinates_of(const Sizes& mesh) {
  int64_t count = 1;
  for (const auto size : mesh) count *= size;
  std::vector<std::vector<int>> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(unravel(i, mesh));
  return all;
}

/// How often each element of a tensor of `sizes` is held.
at::Tensor counts(const Sizes& mesh, const Placements& placements, const Sizes& sizes) {
  auto held = at::zeros(sizes, at::kLong);
  for (const auto& coordinate : coordinates_of(mesh)) {
    const auto part = part_at(coordinate, mesh, placements, sizes);
    int64_t elements = 0;
    for (const auto& box : part.boxes()) {
      auto view = held;
      int64_t product = 1;
      for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
        view = view.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
        product *= box.sizes[dim];
      }
      view.add_(1);
      elements += product;
    }
    EXPECT_EQ(elements, part.numel());
  }
  return held;
}

// TP-14: 5 on 4
TEST(Layout, FollowsTheChunkRule) {
  const Sizes wanted_sizes = {2, 2, 1, 0};
  const Sizes wanted_offsets = {0, 2, 4, 5};
  const Layout layout(line_of(4), {Shard(1)}, {3, 5});
  for (int rank = 0; rank < 4; ++rank) {
    const auto part = layout.part_of(rank);
    EXPECT_EQ(part.sizes(), (Sizes{3, wanted_sizes[rank]}));
    EXPECT_EQ(part.offsets(), (Sizes{0, wanted_offsets[rank]}));
    EXPECT_EQ(part.boxes().size(), wanted_sizes[rank] == 0 ? 0U : 1U);
  }
}

// TP-14: no rank is asked
TEST(Layout, NeedsNoCommunication) {
  const auto fake = make_fake_group(2, 4);
  const Layout layout(DeviceMesh::from_group(fake.group, "cpu"), {Shard(0)}, {5});
  EXPECT_EQ(layout.local_sizes(), Sizes{1});
  EXPECT_EQ(layout.offsets(), Sizes{4});
  EXPECT_EQ(layout.part_of(3).sizes(), Sizes{0});
  EXPECT_TRUE(fake.backend->calls().empty());
}

// TP-14: the other dims are kept, and sizes of 0 and 1 have parts
TEST(Layout, KeepsOtherDimsOfEmptyParts) {
  const Layout layout(line_of(3), {Shard(0)}, {1, 7, 0});
  EXPECT_EQ(layout.part_of(0).sizes(), (Sizes{1, 7, 0}));
  EXPECT_EQ(layout.part_of(2).sizes(), (Sizes{0, 7, 0}));
  EXPECT_EQ(layout.part_of(2).offsets(), (Sizes{1, 0, 0}));
  EXPECT_EQ(Layout(line_of(3), {Shard(0)}, {0}).part_of(1).offsets(), Sizes{0});
}

// TP-15
TEST(Layout, SplitsOneDimByTheLeftAxisFirst) {
  const Placements both = {Shard(0), Shard(0)};
  const std::vector<ElementRange> wanted = {{0, 2}, {2, 4}, {4, 6}, {6, 8}};
  const auto all = coordinates_of({2, 2});
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(part_at(all[i], {2, 2}, both, {8}).ranges(), std::vector<Ranges>{{wanted[i]}});
  }
  // 5 rows: the left axis has 3 and 2, each of which the right one divides.
  const Sizes sizes = {2, 1, 1, 1};
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(part_at(all[i], {2, 2}, both, {5}).sizes(), Sizes{sizes[i]});
}

// TP-16: 8 rows on (2,2): rank 1 holds part 2, rank 2 holds part 1
TEST(Layout, SplitsAStridedDimByTheRightAxisFirst) {
  const Placements both = {StridedShard(0, 2), Shard(0)};
  const std::vector<ElementRange> wanted = {{0, 2}, {4, 6}, {2, 4}, {6, 8}};
  const auto all = coordinates_of({2, 2});
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(part_at(all[i], {2, 2}, both, {8}).ranges(), std::vector<Ranges>{{wanted[i]}});
  }
  // Alone it holds a chunk of each of the chunks there would be.
  EXPECT_EQ(part_at({1}, {2}, {StridedShard(0, 2)}, {8}).ranges(), (std::vector<Ranges>{{{2, 4}, {6, 8}}}));
}

// FSDP-99
TEST(Layout, CutsRaggedlyByCounts) {
  const Placements placements = {RaggedShard(-1, {2, 0, 3})};
  const Layout layout(line_of(3), placements, {2, 5});
  EXPECT_EQ(layout.placements().front(), Placement(RaggedShard(1, {2, 0, 3})));
  EXPECT_EQ(layout.part_of(0).sizes(), (Sizes{2, 2}));
  EXPECT_EQ(layout.part_of(1).sizes(), (Sizes{2, 0}));
  EXPECT_EQ(layout.part_of(2).offsets(), (Sizes{0, 2}));
  EXPECT_TRUE(layout.cut(at::arange(10).view({2, 5}), 2).equal(at::tensor({2, 3, 4, 7, 8, 9}).view({2, 3})));
  EXPECT_EQ(layout.dividing_axes(), Sizes{0});
  EXPECT_THAT(layout.to_string(), ::testing::HasSubstr("RaggedShard(dim=1, 2+0+3)"));
  expect_error([] { Layout(line_of(3), {RaggedShard(0, {2, 3})}, {5}); }, {"one count for each rank", "together 5"});
  expect_error([] { Layout(line_of(2), {RaggedShard(0, {2, 2})}, {5}); }, {"together 5"});
  expect_error([] { Layout(line_of(2), {RaggedShard(0, {6, -1})}, {5}); }, {"together 5"});
}

// TP-14, TP-15, TP-16: every element is on as many ranks as hold replicas of it
TEST(Layout, PartsCoverTheTensor) {
  const std::vector<Sizes> meshes = {{1}, {2}, {3}, {4}, {2, 2}, {2, 3}, {4, 2}, {2, 2, 2}};
  const std::vector<Sizes> tensors = {{1}, {5}, {8}, {13}, {0}, {7, 3}, {4, 9}, {2, 1, 5}};
  const std::vector<Placement> choices = {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 3)};
  for (const auto& mesh : meshes) {
    for (const auto& sizes : tensors) {
      int64_t combinations = 1;
      for (std::size_t i = 0; i < mesh.size(); ++i) combinations *= static_cast<int64_t>(choices.size());
      for (int64_t which = 0; which < combinations; ++which) {
        Placements placements;
        int64_t replicas = 1;
        bool fits = true;
        int64_t rest = which;
        for (const auto size : mesh) {
          placements.push_back(choices[rest % choices.size()]);
          rest /= static_cast<int64_t>(choices.size());
          const auto dim = sharded_dim(placements.back());
          if (!dim) replicas *= size;
          fits = fits && (!dim || *dim < static_cast<int64_t>(sizes.size()));
        }
        if (!fits) continue;
        const auto held = counts(mesh, placements, sizes);
        EXPECT_TRUE(held.eq(replicas).all().item<bool>())
            << to_string(placements) << " of [" << join(sizes, ",") << "] on (" << join(mesh, ",") << ")";
      }
    }
  }
}

TEST(Layout, CutsTensors) {
  const auto whole = at::arange(24).view({6, 4}).to(at::kFloat).requires_grad_();
  const Layout layout(line_of(4, 1), {Shard(-2)}, {6, 4});
  check_equal("own", layout.cut(whole), whole.narrow(0, 2, 2));
  EXPECT_TRUE(layout.cut(whole).is_alias_of(whole)) << "a view";
  EXPECT_EQ(layout.cut(whole, 3).sizes(), (Sizes{0, 4}));
  const Layout strided(line_of(3), {StridedShard(0, 2)}, {6, 4});
  check_equal("rows 1 and 4", strided.cut(whole, 1), whole.index_select(0, at::tensor({1, 4})));
  strided.cut(whole, 1).sum().backward();
  check_equal("differentiable", whole.grad().sum(1), at::tensor({0.F, 4.F, 0.F, 0.F, 4.F, 0.F}));
  expect_error([&] { layout.cut(at::ones({6})); }, {"[lockstep/shard] rank 1", "[6]", "[6, 4]"});
}

TEST(Layout, SaysWhatItIs) {
  const Layout layout(line_of(4), {Shard(-1)}, {3, 5});
  EXPECT_EQ(layout.placements(), Placements{Shard(1)}) << "dims count from the front";
  EXPECT_EQ(layout.numel(), 15);
  EXPECT_EQ(str(layout), "Layout([3, 5], (Shard(dim=1),), DeviceMesh((tp=4), 'cpu', stride=(1,)))");
  EXPECT_FALSE(layout.is_replicated());
  EXPECT_TRUE(Layout(line_of(4), {Replicate()}, {3}).is_replicated());
  EXPECT_TRUE(Layout(line_of(4), {Partial()}, {3}).has_partial());
  EXPECT_FALSE(Layout(line_of(4), {Partial()}, {3}).is_replicated());
  EXPECT_EQ(Layout(line_of(4), {Partial()}, {3}).local_sizes(), Sizes{3});
}

TEST(Layout, ComparesMeshPlacementsAndSizes) {
  const auto mesh = line_of(4);
  const Layout layout(mesh, {Shard(0)}, {3, 5});
  EXPECT_EQ(layout, Layout(mesh, {Shard(-2)}, {3, 5}));
  EXPECT_NE(layout, Layout(mesh, {Shard(1)}, {3, 5}));
  EXPECT_NE(layout, Layout(mesh, {Shard(0)}, {3, 4}));
  EXPECT_NE(layout, Layout(line_of(2), {Shard(0)}, {3, 5}));
}

// TP-17
TEST(Layout, RefusesAnotherNumberOfPlacements) {
  const auto mesh = init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { Layout(mesh, {Shard(0)}, {4}); },
               {"[lockstep/shard] rank 0", "1 placements", "(Shard(dim=0),)", "2 mesh dims", "dp=1, tp=1"});
  expect_error([&] { Layout(mesh, {Shard(0), Shard(0), Shard(0)}, {4}); }, {"3 placements", "2 mesh dims"});
}

// TP-13, TP-17: dims may be negative, but must exist
TEST(Layout, RefusesADimTheTensorDoesNotHave) {
  const auto mesh = init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { Layout(mesh, {Replicate(), Shard(2)}, {8, 4}); },
               {"[lockstep/shard] rank 0", "Shard(dim=2)", "mesh dim 1 ('tp', size 1)", "2 dims", "[8, 4]", "-2 to 1"});
  expect_error([&] { Layout(mesh, {StridedShard(-3, 2), Replicate()}, {8, 4}); }, {"dim -3", "mesh dim 0 ('dp'"});
  expect_error([&] { Layout(mesh, {Shard(0), Replicate()}, {}); }, {"dim 0", "0 dims", "Use Replicate"});
  EXPECT_EQ(Layout(mesh, {Replicate(), Shard(-2)}, {8, 4}).placements()[1], Placement(Shard(0)));
}

// TP-15: sum and avg may mix, nothing else
TEST(Layout, RefusesReductionsThatCannotMix) {
  const auto mesh = init_device_mesh("cpu", {1, 1}, {.mesh_dim_names = {"dp", "tp"}});
  expect_error([&] { Layout(mesh, {Partial(), Partial(ReduceOp::MAX)}, {4}); },
               {"[lockstep/shard] rank 0", "Partial(sum)", "'dp'", "Partial(max)", "'tp'", "Use one reduction"});
  EXPECT_NO_THROW(Layout(mesh, {Partial(), Partial(ReduceOp::AVG)}, {4}));
  EXPECT_NO_THROW(Layout(mesh, {Partial(ReduceOp::MIN), Partial(ReduceOp::MIN)}, {4}));
  expect_error([&] { Layout(mesh, {Partial(ReduceOp::PREMUL_SUM), Replicate()}, {4}); }, {"premul_sum", "cannot"});
}

// TP-16
TEST(Layout, RefusesToSplitByLessThanOne) {
  expect_error([] { Layout(line_of(2), {StridedShard(0, 0)}, {4}); },
               {"split_factor=0", "mesh dim 0 ('tp', size 2)", "at least 1"});
  expect_error([] { Layout(line_of(2), {Shard(0)}, {-1}); }, {"no tensor of sizes [-1]"});
}

TEST(Layout, RefusesRanksOutside) {
  const Layout layout(line_of(2), {Shard(0)}, {4});
  expect_error([&] { layout.part_of(2); }, {"[lockstep/shard] rank 0", "rank 2 is outside", "0, 1"});
}

}  // namespace
}  // namespace lockstep
