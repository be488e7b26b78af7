// One pool serves all groups of a process: tensors made for one group are zero-copy in every other one of the same
// ranks. For ranks as threads and as processes.
#pragma once

#include <gtest/gtest.h>

#include "lockstep/comm/shm/shm_backend.h"
#include "lockstep/lockstep.h"
#include "tests/support/shm_promises.h"

namespace lockstep::shm_groups {

using reduction_model::have_same_bits;
using reduction_model::input_of;
using reduction_model::model_of;
using shm_promises::shared_copy;

inline const shm::Team& team_of(const GroupPtr& group) {
  return *dynamic_cast<const detail::ShmBackend&>(*group->getBackend(at::kCPU)).team();
}

/// Steps of this rank's ring that `call` takes: one if all who give are read in place, as the header needs one too.
template <class Call>
std::uint32_t steps_of(const GroupPtr& group, const Call& call) {
  const auto& team = team_of(group);
  const auto& ready = team.lane(team.rank()).ready.value;
  const auto before = ready.load();
  call();
  return ready.load() - before;
}

// Several chunks, and not a whole number of them.
constexpr int64_t kSize = 300'007;

/// Collectives of `group`, whose ranks are `ranks` of the world, on tensors from memory of `owner`'s.
inline void check_zero_copy_in(const GroupPtr& group, const std::vector<int>& ranks, const GroupPtr& owner) {
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, "group " + group_name(group) + " of " + group_name(owner));
  const auto count = static_cast<int64_t>(ranks.size());
  std::vector<at::Tensor> inputs;
  for (const int rank : ranks) inputs.push_back(input_of(rank, kSize, at::kFloat));
  const auto mine = inputs[group->getRank()];

  const auto sum = shared_copy(owner, mine);
  EXPECT_EQ(steps_of(group, [&] { all_reduce(sum, group); }), 1U);
  EXPECT_TRUE(have_same_bits(sum, model_of(inputs, ReduceOp::SUM)));

  const auto given = shared_copy(owner, mine);
  const auto all = at::zeros({count * kSize});
  EXPECT_EQ(steps_of(group, [&] { all_gather_into_tensor(all, given, group); }), 1U);
  EXPECT_TRUE(have_same_bits(all, at::cat(inputs)));

  const auto pieces = shared_copy(owner, mine.repeat({count}));
  const auto share = at::zeros({kSize});
  EXPECT_EQ(steps_of(group, [&] { reduce_scatter_tensor(share, pieces, group); }), 1U);
  EXPECT_TRUE(have_same_bits(share, model_of(inputs, ReduceOp::SUM)));

  const auto word = shared_copy(owner, mine);
  EXPECT_EQ(steps_of(group, [&] { broadcast(word, 0, group); }), 1U);
  EXPECT_TRUE(have_same_bits(word, inputs[0]));

  // The proof proves something: ordinary memory of processes goes through the ring, with the same bits.
  const auto ordinary = mine.clone();
  const auto steps = steps_of(group, [&] { all_reduce(ordinary, group); });
  EXPECT_TRUE(team_of(group).shares_address_space() || steps > 1) << steps;
  EXPECT_TRUE(have_same_bits(ordinary, model_of(inputs, ReduceOp::SUM)));
}

/// Sub-groups that overlap, in orders of their own.
inline void check_sub_groups(const World& world) {
  const auto lists = world.world_size() == 3
                         ? std::vector<std::vector<int>>{{0, 1}, {1, 2}, {2, 0}, {0, 1, 2}, {2, 1, 0}}
                         : std::vector<std::vector<int>>{{0, 1}, {2, 3}, {1, 2, 3}, {3, 0}, {0, 2}, {3, 2, 1, 0}};
  std::vector<GroupPtr> groups;
  for (const auto& ranks : lists) groups.push_back(new_group(world.group(), ranks));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i]) continue;
    check_zero_copy_in(groups[i], lists[i], world.group());
    check_zero_copy_in(groups[i], lists[i], groups[i]);
  }
  // A group's end is its own affair.
  const auto kept = shared_copy(world.group(), at::ones({kSize}));
  groups.clear();
  EXPECT_EQ(steps_of(world.group(), [&] { all_reduce(kept, world.group()); }), 1U);
  EXPECT_TRUE(at::equal(kept, at::full({kSize}, static_cast<float>(world.world_size()))));
}

/// What a sub-group allocated is zero-copy in the world, whose ranks know every process.
inline void check_upwards(const World& world) {
  const bool is_low = world.rank() < 2;
  const auto low = new_group(world.group(), {0, 1});
  const auto high = new_group(world.group(), world.world_size() == 3 ? std::vector{2, 1} : std::vector{2, 3});
  check_zero_copy_in(world.group(), shm_promises::all_ranks(world), is_low ? low : high);
}

inline void check_mesh(const World& world) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  const int row = world.rank() / 2;
  const int column = world.rank() % 2;
  check_zero_copy_in(mesh.get_group("tp"), {2 * row, 2 * row + 1}, world.group());
  check_zero_copy_in(mesh.get_group("dp"), {column, column + 2}, world.group());
  // One tensor, in one axis after the other, and in the world.
  const auto tensor = shared_copy(world.group(), at::full({kSize}, world.rank() + 1.0F));
  EXPECT_EQ(steps_of(mesh.get_group("tp"), [&] { all_reduce(tensor, mesh.get_group("tp")); }), 1U);
  EXPECT_EQ(steps_of(mesh.get_group("dp"), [&] { all_reduce(tensor, mesh.get_group("dp")); }), 1U);
  EXPECT_TRUE(at::equal(tensor, at::full({kSize}, 10.0F)));
  EXPECT_EQ(steps_of(world.group(), [&] { all_reduce(tensor, world.group()); }), 1U);
  EXPECT_TRUE(at::equal(tensor, at::full({kSize}, 40.0F)));
}

}  // namespace lockstep::shm_groups
