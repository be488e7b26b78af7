// Clipping by one norm of several optimizers, and of lists of parameters that are divided differently.
#include <torch/optim/sgd.h>

#include <limits>

#include "lockstep/comm/collectives.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/zero_dtype_fixtures.h"

namespace lockstep::clip_together_test {
namespace {

using namespace ddp_models;
using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;
using torch::optim::SGD;
using Zero = ZeroRedundancyOptimizer<SGD>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> joined(std::vector<at::Tensor> one, const std::vector<at::Tensor>& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

std::vector<at::Tensor> gradients_in(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& each : parameters) gradients.push_back(each.grad());
  return gradients;
}

// ZERO-72: Z-17: two divided in their own ways and a plain one, whose parameters all ranks have
TEST(ClipTogether, SeveralOptimizersByOneNorm) {
  on_ranks(
      [](const World& world) {
        for (const double norm_type : {2.0, 1.0, kInfinity}) {
          const auto first = parameters_of({{7, 5}, {5}, {13}}, 1);
          const auto second = parameters_of({{4, 4}, {9}}, 2);
          const auto replicated = parameters_of({{3, 3}, {2}}, 3);
          const auto all = joined(joined(first, second), replicated);
          const auto expected = copies_of(all);
          set_gradients(all, 5);
          set_gradients(expected, 5);
          Zero by_parameters(first, {0.1}, world.group());
          Zero by_elements(second, {0.1}, {.process_group = world.group(), .partition = ZeroPartition::kElements});
          SGD plain(replicated, {0.1});
          const auto norm = clip_grad_norm_({by_parameters, by_elements, plain}, 0.5, {.norm_type = norm_type});
          const auto one_process = clip_grad_norm_(expected, 0.5, {.norm_type = norm_type});
          EXPECT_TRUE(at::allclose(norm, one_process, 1e-6)) << norm << one_process;
          expect_same(gradients_in(all), gradients_in(expected), "", {1e-6});
          clip_grad_value_(OptimizerList{by_parameters, by_elements, plain}, 0.01);
          clip_grad_value_(expected, 0.01);
          expect_same(gradients_in(all), gradients_in(expected), "", {1e-6});
        }
      },
      {1, 2, 3, 4}, {"threads"});
}

// ZERO-72: in every stage, trained on
TEST(ClipTogether, OptimizersOfTwoModulesInEveryStage) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](auto& one_ddp, auto& other_ddp, auto& one, auto& other, const auto& clip) {
          for (int step = 0; step < 3; ++step) {
            one.zero_grad();
            other.zero_grad();
            (loss_of(one_ddp, world, step) * 10).backward();
            loss_of(other_ddp, world, 30 + step).backward();
            clip();
            one.step();
            other.step();
          }
        };
        DistributedDataParallel plain_one(mlp(kSizes), small_buckets());
        DistributedDataParallel plain_other(mlp(kSizes, 9), small_buckets());
        SGD one(plain_one.parameters(), {0.5});
        SGD other(plain_other.parameters(), {0.5});
        const auto both = joined(plain_one.parameters(), plain_other.parameters());
        train(plain_one, plain_other, one, other, [&] { clip_grad_norm_(both, 0.05); });
        for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel one_ddp(mlp(kSizes), small_buckets());
          DistributedDataParallel other_ddp(mlp(kSizes, 9), small_buckets());
          Zero zero(one_ddp.parameters(), {0.5}, {.stage = stage, .ddp = one_ddp});
          SGD plain(other_ddp.parameters(), {0.5});
          train(one_ddp, other_ddp, zero, plain, [&] { clip_grad_norm_({zero, plain}, 0.05); });
          const auto name = std::to_string(static_cast<int>(stage));
          expect_same(one_ddp.parameters(), plain_one.parameters(), name, {1e-5});
          expect_same(other_ddp.parameters(), plain_other.parameters(), name, {1e-5});
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-72: one list of parameters, of which some gradients are whole and others divided
TEST(ClipTogether, WholeGradientsBesideDividedOnes) {
  on_ranks(
      [](const World& world) {
        for (const double norm_type : {2.0, 1.0, kInfinity}) {
          DistributedDataParallel plain_ddp(mlp(kSizes), small_buckets());
          DistributedDataParallel ddp(mlp(kSizes), small_buckets());
          Zero zero(ddp.parameters(), {0.5}, {.stage = ZeroStage::kGradients, .ddp = ddp});
          SGD plain(plain_ddp.parameters(), {0.5});
          // Large enough that the norm, of either part alone, would be another one.
          const auto replicated = parameters_of({{3, 3}, {2}}, 3);
          const auto expected = copies_of(replicated);
          set_gradients(replicated, 5);
          set_gradients(expected, 5);
          loss_of(ddp, world, 0).mul(10).backward();
          loss_of(plain_ddp, world, 0).mul(10).backward();
          const auto all = joined(ddp.parameters(), replicated);
          const auto one_process =
              clip_grad_norm_(joined(plain_ddp.parameters(), expected), 0.05, {.norm_type = norm_type});
          EXPECT_TRUE(at::allclose(get_total_norm(gradients_in(all), {.norm_type = norm_type}), one_process, 1e-5));
          const auto norm = clip_grad_norm_(all, 0.05, {.norm_type = norm_type});
          EXPECT_TRUE(at::allclose(norm, one_process, 1e-5)) << norm << one_process;
          expect_same(gradients_in(replicated), gradients_in(expected), "", {1e-5});
          zero.step();
          plain.step();
          expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-5});
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-72: experts on the ranks of one group, others over another, the rest on all
LOCKSTEP_THREAD_TEST(ClipTogether, ListsWithTheirGroups, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"data", "expert"}});
  const auto data = mesh.get_group("data");
  const auto expert = mesh.get_group("expert");
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity, -kInfinity}) {
    const auto experts = parameters_of({{4, 3}, {4, 2}}, 1);  // one on each rank of "expert", the same along "data"
    const auto everywhere = parameters_of({{8}, {6}, {5}, {3}}, 2);  // one on each rank of the world
    const auto replicated = parameters_of({{3, 3}}, 3);
    const auto all = joined(joined(experts, everywhere), replicated);
    const auto expected = copies_of(all);
    set_gradients(all, 5);
    set_gradients(expected, 5);
    const auto& mine = experts[expert->getRank()];
    const auto& own = everywhere[world.rank()];
    const Recorder recorder;
    // What comes twice counts once.
    const auto norm = clip_grad_norm_({ParameterShard{{mine}, {expert}}, ParameterShard{{own}, {data, expert}},
                                       ParameterShard{replicated}, ParameterShard{replicated}},
                                      0.5, {.norm_type = norm_type});
    EXPECT_EQ(recorder.events("launch").size(), 3U);
    const auto one_process = clip_grad_norm_(expected, 0.5, {.norm_type = norm_type});
    EXPECT_TRUE(at::allclose(norm, one_process, 1e-6)) << norm << one_process;
    expect_same({mine.grad(), own.grad(), replicated[0].grad()},
                {expected[expert->getRank()].grad(), expected[2 + world.rank()].grad(), expected[6].grad()}, "",
                {1e-6});
  }
}

// ZERO-72: a rank may have nothing of a list
LOCKSTEP_THREAD_TEST(ClipTogether, RanksWithoutGradientsTakePart, 3) {
  const auto parameters = parameters_of({{5}, {4}}, 1);
  const auto expected = copies_of(parameters);
  set_gradients(parameters, 5);
  set_gradients(expected, 5);
  std::vector<at::Tensor> mine;
  if (world.rank() < 2) mine = {parameters[world.rank()]};
  const auto norm = clip_grad_norm_({ParameterShard{mine, {world.group()}}}, 0.5);
  EXPECT_TRUE(at::allclose(norm, clip_grad_norm_(expected, 0.5), 1e-6));
  if (world.rank() < 2) expect_same({mine[0].grad()}, {expected[world.rank()].grad()}, "", {1e-6});
}

// ZERO-72, ZERO-73: ranks whose gradients are of different dtypes clip by one factor
TEST(ClipTogether, SeveralDtypesByOneFactor) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = zero_dtype_fixtures::mixed_parameters({at::kBFloat16, at::kFloat});
          const auto expected = copies_of(parameters);
          set_gradients(parameters, 5);
          set_gradients(expected, 5);
          Zero optimizer(parameters, {0.1}, zero);
          const auto norm = clip_grad_norm_(optimizer, 0.5, {.dtype = at::kDouble});
          const auto one_process = clip_grad_norm_(expected, 0.5, {.dtype = at::kDouble});
          EXPECT_EQ(norm.scalar_type(), at::kFloat) << name;
          EXPECT_TRUE(norm.equal(one_process)) << name << norm << one_process;
          expect_same(gradients_in(parameters), gradients_in(expected), name);
          const auto of_all = at::empty({world.world_size()});
          all_gather_into_tensor(of_all, norm.view({1}), world.group());
          EXPECT_TRUE(of_all.eq(norm).all().item<bool>()) << name << of_all;
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ClipTogether, RefusesGroupsThatAreKnownOrMissing, 2) {
  DistributedDataParallel ddp(mlp(kSizes), world.group());
  Zero zero(ddp.parameters(), {0.1}, {.stage = ZeroStage::kGradients, .ddp = ddp});
  loss_of(ddp, world, 0).backward();
  const Recorder recorder;
  expect_error([&] { clip_grad_norm_({zero}, 1, {.process_group = world.group()}); }, {"Leave", "process_group"});
  expect_error([&] { clip_grad_norm_({ParameterShard{ddp.parameters(), {world.group()}}}, 1); },
               {"groups of their own", "ParameterShard::groups"});
  expect_error([&] { clip_grad_norm_({ParameterShard{ddp.parameters(), {GroupPtr()}}}, 1); }, {"the group is null"});
  EXPECT_TRUE(recorder.events("launch").empty());
  // Stand-ins know theirs.
  EXPECT_TRUE(at::allclose(clip_grad_norm_({ParameterShard{ddp.parameters()}}, 1e3), clip_grad_norm_(zero, 1e3), 1e-6));
}

}  // namespace
}  // namespace lockstep::clip_together_test
