// Every function that takes a group works on the default one if the group is left out.
#include "lockstep/lockstep.h"
#include "lockstep/testing/gtest.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;

at::Tensor mine(const World& world, int64_t elements = 2) {
  return at::full({elements}, static_cast<float>(world.rank() + 1));
}

LOCKSTEP_RANK_TEST(DefaultGroup, ServesCollectivesWithoutAGroup, 2) {
  auto tensor = mine(world);
  all_reduce(tensor);
  check_equal("all_reduce", tensor, at::full({2}, 3.F));
  launch_all_reduce(tensor).wait();
  check_equal("launch_all_reduce", tensor, at::full({2}, 6.F));
  all_reduce_coalesced({tensor});
  launch_all_reduce_coalesced({tensor}).wait();
  check_equal("all_reduce_coalesced", tensor, at::full({2}, 24.F));

  tensor = mine(world);
  reduce(tensor, 1);
  if (world.rank() == 1) check_equal("reduce", tensor, at::full({2}, 3.F));
  tensor = mine(world);
  launch_reduce(tensor, 0).wait();
  tensor = mine(world);
  broadcast(tensor, 1);
  launch_broadcast(tensor, 1).wait();
  check_equal("broadcast", tensor, at::full({2}, 2.F));

  const auto both = at::tensor({1.F, 1.F, 2.F, 2.F});
  std::vector<at::Tensor> list = {at::zeros({2}), at::zeros({2})};
  all_gather(list, mine(world));
  launch_all_gather(list, mine(world)).wait();
  check_equal("all_gather", at::cat(list), both);
  auto table = at::zeros({4});
  all_gather_into_tensor(table, mine(world));
  launch_all_gather_into_tensor(table, mine(world)).wait();
  check_equal("all_gather_into_tensor", table, both);
  all_gather_into_tensor_coalesced({table}, {mine(world)});
  launch_all_gather_into_tensor_coalesced({table}, {mine(world)}).wait();

  auto share = at::zeros({2});
  reduce_scatter(share, {mine(world), mine(world)});
  launch_reduce_scatter(share, {mine(world), mine(world)}).wait();
  check_equal("reduce_scatter", share, at::full({2}, 3.F));
  reduce_scatter_tensor(share, mine(world, 4));
  launch_reduce_scatter_tensor(share, mine(world, 4)).wait();
  reduce_scatter_tensor_coalesced({share}, {mine(world, 4)});
  launch_reduce_scatter_tensor_coalesced({share}, {mine(world, 4)}).wait();
  check_equal("reduce_scatter_tensor", share, at::full({2}, 3.F));

  const bool is_root = world.rank() == 0;
  const auto on_root = [&](const std::vector<at::Tensor>& tensors) {
    return is_root ? tensors : std::vector<at::Tensor>{};
  };
  gather(mine(world), on_root(list), 0);
  launch_gather(mine(world), on_root(list), 0).wait();
  if (is_root) check_equal("gather", at::cat(list), both);
  scatter(share, on_root({at::full({2}, 8.F), at::full({2}, 9.F)}), 0);
  launch_scatter(share, on_root({at::full({2}, 8.F), at::full({2}, 9.F)}), 0).wait();
  check_equal("scatter", share, at::full({2}, is_root ? 8.F : 9.F));

  all_to_all(list, {mine(world), mine(world)});
  check_equal("all_to_all", at::cat(list), both);
  all_to_all_single(table, mine(world, 4));
  launch_all_to_all_single(table, mine(world, 4)).wait();
  check_equal("all_to_all_single", table, both);
}

LOCKSTEP_RANK_TEST(DefaultGroup, ServesEverythingElse, 2) {
  barrier();
  const auto name = std::to_string(world.rank());
  EXPECT_EQ(all_gather_object(name), (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(gather_object(name, 1).size(), world.rank() == 1 ? 2U : 0U);
  EXPECT_EQ(broadcast_object(name, 1), "1");
  check_same_on_all_ranks("the weather", "fine");
  EXPECT_EQ(global_ranks(), (std::vector<int>{0, 1}));
  EXPECT_EQ(group_name(), "world");
  EXPECT_EQ(backend_spec(), backend_spec(world.group()));
  EXPECT_EQ(group_timeout(), group_timeout(world.group()));
  EXPECT_EQ(host_numbers(), (std::vector<int>{0, 0}));
  EXPECT_EQ(new_host_group()->getSize(), 2);
  const auto second = new_group({1});
  EXPECT_EQ(static_cast<bool>(second), world.rank() == 1);
  // Null is not "left out": it is what a rank has of a group it is not in, and must not join the world's collectives.
  if (!second) {
    expect_error([&] { all_reduce(at::ones({1}), second); }, {"the group is null: this rank is not part of it"});
  }
}

// Both labels are in the message, so that a reader sees which code of which rank is out of step.
void disagree(const World& world) {
  const LabelScope label(world.rank() == 0 ? CallLabel{"Join's control message"} : CallLabel{"DDP bucket", 0});
  expect_error([&] { all_reduce(at::ones({world.rank() + 1}), world.group()); },
               {"sizes", "loat[1]) of Join's control message", "loat[2]) of DDP bucket 0"});
}

TEST(CallLabel, OfBothRanksIsShownIfTheyDisagreeAsThreads) {
  testing::run_threads_in_gtest({.world_size = 2}, disagree);
}

TEST(CallLabel, OfBothRanksIsShownIfTheyDisagreeInSharedMemory) {
  testing::run_processes_in_gtest({.world_size = 2, .backend = "shm"}, disagree);
}

}  // namespace
}  // namespace lockstep
