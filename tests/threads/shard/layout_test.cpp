// Layouts on meshes of real ranks: what they say holds for tensors that are cut and put together again.
#include "lockstep/shard/layout.h"

#include <atomic>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/shard/gather.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;
using Sizes = std::vector<int64_t>;

DeviceMesh square() {
  return init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
}

// TP-14, TP-15, TP-16: the parts of all ranks, gathered, are the tensor
LOCKSTEP_RANK_TEST(LayoutRanks, PutsPartsTogetherAgain, 4) {
  const auto mesh = square();
  const auto whole = at::arange(7 * 5, at::kFloat).view({7, 5});
  const std::vector<Placements> cases = {
      {Shard(0), Replicate()}, {Replicate(), Shard(1)},    {Shard(0), Shard(1)},           {Shard(0), Shard(0)},
      {Shard(1), Shard(0)},    {Replicate(), Replicate()}, {StridedShard(0, 2), Shard(0)}, {Shard(-1), Shard(-1)}};
  for (const auto& placements : cases) {
    const Layout layout(mesh, placements, {7, 5});
    const auto mine = layout.cut(whole).contiguous();
    EXPECT_EQ(mine.sizes(), at::IntArrayRef(layout.local_sizes()));
    // Parts differ in size: each rank's travels in a frame that holds any.
    const auto frame = at::zeros({35});
    frame.narrow(0, 0, mine.numel()).copy_(mine.view({-1}));
    const auto frames = at::empty({4 * 35});
    all_gather_into_tensor(frames, frame, world.group());
    const auto result = at::full({7, 5}, -1.F);
    for (int rank = 0; rank < 4; ++rank) {
      const auto part = layout.part_of(rank);
      const auto local = frames.narrow(0, 35 * rank, part.numel()).view(part.sizes());
      for (const auto& box : part.boxes()) {
        auto from = local;
        auto to = result;
        for (int64_t dim = 0; dim < 2; ++dim) {
          from = from.narrow(dim, box.local_offsets[dim], box.sizes[dim]);
          to = to.narrow(dim, box.offsets[dim], box.sizes[dim]);
        }
        to.copy_(from);
      }
    }
    check_equal(to_string(placements), result, whole);
  }
}

// TP-56: along one axis or several, whatever the order in which they have cut
LOCKSTEP_RANK_TEST(LayoutRanks, GathersTheWholeOfSeveralAxes, 6) {
  const auto mesh = init_device_mesh("cpu", {3, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const std::vector<Placements> cases = {{Shard(0), Replicate()},        {Replicate(), Shard(1)},
                                         {Shard(0), Shard(1)},           {Shard(1), Shard(0)},
                                         {Shard(0), Shard(0)},           {StridedShard(0, 2), Shard(0)},
                                         {StridedShard(1, 2), Shard(1)}, {RaggedShard(0, {0, 5, 2}), Shard(1)},
                                         {Replicate(), Replicate()}};
  for (const auto& sizes : {Sizes{7, 5}, Sizes{7, 1}, Sizes{7, 0}}) {
    const auto whole = at::arange(sizes[0] * sizes[1], at::kFloat).view(sizes);
    for (const auto& placements : cases) {
      const Layout layout(mesh, placements, sizes);
      check_equal(to_string(placements), gather_whole(layout.cut(whole), layout), whole);
    }
  }
  expect_error([&] { gather_whole(at::ones({2, 2}), Layout(mesh, {Partial(), Shard(0)}, {4, 2})); },
               {"Partial(sum)", "Reduce them first"});
}

LOCKSTEP_THREAD_TEST(LayoutRanks, KnowsWhoHoldsTheSame, 4) {
  const auto mesh = square();
  const int other = (world.rank() + 2) % 4;  // along dp
  const int neighbour = world.rank() ^ 1;    // along tp
  for (const auto& layout : {Layout(mesh["tp"], {Shard(0)}, {4}), Layout(mesh, {Replicate(), Shard(0)}, {4})}) {
    EXPECT_TRUE(layout.is_same_on({world.rank(), other}));
    EXPECT_FALSE(layout.is_same_on({world.rank(), neighbour}));
    EXPECT_FALSE(layout.is_same_on({(other ^ 1)})) << "neither along dp nor along tp";
    EXPECT_FALSE(layout.is_same_on({17})) << "outside of the root mesh";
  }
  EXPECT_TRUE(Layout(mesh["tp"], {Replicate()}, {4}).is_same_on({0, 1, 2, 3}));
  EXPECT_FALSE(Layout(mesh["tp"], {Partial()}, {4}).is_same_on({0, 1}));
}

// TP-14: any rank's part is known to every rank, and nothing is sent
LOCKSTEP_THREAD_TEST(LayoutRanks, KnowsAllPartsWithoutAMessage, 4) {
  const auto mesh = square();
  const testing::Recorder recorder;
  const Layout layout(mesh, {Shard(0), Shard(0)}, {5, 2});
  const Sizes sizes = {2, 1, 1, 1};
  const Sizes offsets = {0, 2, 3, 4};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(layout.part_of(rank).sizes(), (Sizes{sizes[rank], 2}));
    EXPECT_EQ(layout.part_of(rank).offsets(), (Sizes{offsets[rank], 0}));
  }
  EXPECT_EQ(layout.local_sizes(), layout.part_of(world.rank()).sizes());
  EXPECT_TRUE(recorder.events().empty());
}

// TP-6, TP-14: ranks outside hold an empty tensor; slices count in their own ranks
LOCKSTEP_THREAD_TEST(LayoutRanks, HoldNothingOutsideOfTheMesh, 4) {
  const auto mesh = DeviceMesh::from_ranks("cpu", {.ranks = {3, 1}});
  const Layout layout(mesh, {Shard(0)}, {5, 2});
  const bool is_member = world.rank() % 2 == 1;
  const auto wanted = !is_member ? Sizes{0} : world.rank() == 3 ? Sizes{3, 2} : Sizes{2, 2};
  EXPECT_EQ(layout.local_sizes(), wanted);
  EXPECT_EQ(layout.offsets(), (!is_member ? Sizes{} : world.rank() == 3 ? Sizes{0, 0} : Sizes{3, 0}));
  EXPECT_EQ(layout.cut(at::ones({5, 2})).sizes(), at::IntArrayRef(wanted));
  EXPECT_EQ(layout.part_of(1).offsets(), (Sizes{3, 0})) << "rank 1 is the second of the mesh";
  expect_error([&] { layout.part_of(0); }, {"rank 0 is outside"});
  const auto tensor = at::empty(wanted);
  set_layout(tensor, layout);
  EXPECT_EQ(*layout_of(tensor), layout);
  const Layout of_slice(square()["dp"], {Shard(0)}, {5});
  EXPECT_EQ(of_slice.local_sizes(), Sizes{world.rank() < 2 ? 3 : 2});
}

// Ranks in one process carry layouts of their own meshes, set and asked at the same time.
LOCKSTEP_THREAD_TEST(LayoutOfRanks, BelongsToTheRanksOwnTensors, 4) {
  const auto mesh = square();
  for (int i = 0; i < 50; ++i) {
    std::vector<at::Tensor> parameters;
    for (int64_t rows = 1; rows < 8; ++rows) {
      const Layout layout(mesh, {Shard(0), Replicate()}, {rows, 2});
      parameters.push_back(at::ones(layout.local_sizes()).requires_grad_());
      set_layout(parameters.back(), layout);
    }
    for (int64_t rows = 1; rows < 8; ++rows) {
      const auto& parameter = parameters[rows - 1];
      parameter.set_data(at::zeros_like(parameter));
      parameter.sum().backward();
      ASSERT_NE(layout_of(parameter), nullptr);
      EXPECT_EQ(layout_of(parameter)->sizes(), (Sizes{rows, 2}));
      EXPECT_EQ(layout_of(parameter)->mesh().get_rank(), world.rank());
    }
  }
}

}  // namespace
}  // namespace lockstep
