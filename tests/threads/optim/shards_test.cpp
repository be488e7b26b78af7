// Clipping and scaling of gradients that are divided among ranks: equal to one process that holds all.
#include <torch/torch.h>

#include "lockstep/comm/group.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using testing::expect_error;

/// Seven gradients, the same on every rank.
std::vector<at::Tensor> all_gradients() {
  std::vector<at::Tensor> gradients;
  for (int64_t i = 1; i <= 7; ++i) gradients.push_back(at::arange(i * 5, at::kFloat).sin() * static_cast<double>(i));
  return gradients;
}

std::vector<at::Tensor> parameters_with(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    parameters.push_back(at::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient.clone();
  }
  return parameters;
}

/// Each rank has every world_size-th; the last rank none.
std::vector<at::Tensor> my_share(const std::vector<at::Tensor>& tensors, const World& world) {
  std::vector<at::Tensor> share;
  const auto owners = static_cast<std::size_t>(world.world_size() - 1);
  for (auto i = static_cast<std::size_t>(world.rank()); i < tensors.size(); i += owners) {
    if (static_cast<std::size_t>(world.rank()) < owners) share.push_back(tensors[i]);
  }
  return share;
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ClipGradShards, ClipsByTheNormOfTheWhole, 3) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity, -kInfinity, 0.0}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, norm_type);
    const auto whole = parameters_with(all_gradients());
    const auto expected = clip_grad_norm_(whole, 2.5, {.norm_type = norm_type});
    const auto mine = parameters_with(my_share(all_gradients(), world));
    const auto norm = clip_grad_norm_(mine, 2.5, {.norm_type = norm_type, .process_group = world.group()});
    EXPECT_TRUE(at::allclose(norm, expected, 1e-6)) << norm << expected;
    const auto expected_share = my_share(whole, world);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(mine[i].grad(), expected_share[i].grad(), 1e-6));
    }
  }
}

LOCKSTEP_THREAD_TEST(ClipGradShards, InDoubleHasTheSameBitsHoweverTheyAreDivided, 3) {
  for (int64_t seed = 0; seed < 50; ++seed) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
    std::vector<at::Tensor> gradients;
    for (int64_t i = 1; i <= 7; ++i) gradients.push_back(at::randn({i * 111}, generator, at::kFloat));
    for (const bool foreach : {false, true}) {
      const auto expected = get_total_norm(gradients, {.foreach = foreach, .dtype = at::kDouble});
      const auto norm = get_total_norm(my_share(gradients, world),
                                       {.foreach = foreach, .process_group = world.group(), .dtype = at::kDouble});
      EXPECT_EQ(norm.scalar_type(), at::kFloat);
      EXPECT_TRUE(norm.equal(expected)) << norm << expected;
    }
  }
}

// ZERO-72: parameters may be split anywhere
LOCKSTEP_THREAD_TEST(ClipGradShards, ClipsSlicesOfOneFlatBuffer, 4) {
  const auto whole = parameters_with({at::arange(1000, at::kFloat).cos()});
  const auto expected = clip_grad_norm_(whole, 1.0);
  const auto flat = at::arange(1000, at::kFloat).cos();
  const auto begin = 250 * world.rank();
  const auto mine = parameters_with({flat.narrow(0, begin, 250)});
  const auto norm = clip_grad_norm_(mine, 1.0, {.process_group = world.group()});
  EXPECT_TRUE(at::allclose(norm, expected, 1e-6));
  EXPECT_TRUE(at::allclose(mine[0].grad(), whole[0].grad().narrow(0, begin, 250), 1e-6));
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ClipGradShards, RefusesOnAllRanksWhatIsNotFiniteOnOne, 3) {
  const auto value = world.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
  const auto parameters = parameters_with({at::full({2}, value)});
  expect_error([&] { clip_grad_norm_(parameters, 1, {.error_if_nonfinite = true, .process_group = world.group()}); },
               {"norm of order 2", "nan"});
}

// The sum of the ranks' squares does not fit a float.
LOCKSTEP_THREAD_TEST(ClipGradShards, SurvivesLargeNorms, 2) {
  const auto norm = get_total_norm({at::full({4}, 8e18)}, {.process_group = world.group()});
  EXPECT_TRUE(at::allclose(norm, at::full({}, 8e18 * std::sqrt(8.0)), 1e-5)) << norm;
}

// ZERO-72: one rank's overflow is every rank's, before anybody steps
LOCKSTEP_THREAD_TEST(GradScalerShards, AgreesOnStepsToLeaveOut, 3) {
  GradScaler scaler({.device = at::kCPU, .init_scale = 16, .growth_interval = 100, .process_group = world.group()});
  const auto parameter = at::ones({2}).requires_grad_();
  optim::SGD optimizer({parameter}, {.lr = 0.25});
  for (int step = 0; step < 4; ++step) {
    const bool overflows = step == 2 && world.rank() == 1;
    optimizer.zero_grad();
    // The last rank has no gradient, as one with an empty shard.
    auto loss = scaler.scale((parameter * (overflows ? std::numeric_limits<double>::infinity() : 1.0)).sum());
    if (world.rank() != 2) loss.backward();
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(parameter[0].item<float>(), world.rank() == 2 ? 1 : 0.25);
}

/// As a sharded model on a mesh of two axes would be: one gradient that every rank has, one divided along the first
/// axis, one along the second, one along both. Each rank keeps its shards in .grad.
class OnMesh final : public torch::optim::SGD, public ShardedGradients {
 public:
  OnMesh(const World& world, const std::vector<at::Tensor>& gradients)
      : SGD(std::vector<torch::optim::OptimizerParamGroup>(), torch::optim::SGDOptions(1)) {
    const int row = world.rank() / 2;
    const int column = world.rank() % 2;
    const auto rows = new_subgroups(world.group(), {{0, 1}, {2, 3}});
    const auto columns = new_subgroups(world.group(), {{0, 2}, {1, 3}});
    groups_ = {{}, {rows}, {columns}, {rows, columns}};
    begins_ = {0, 6 * column, 6 * row, 6 * row + 3 * column};
    sizes_ = {12, 6, 6, 3};
    std::vector<at::Tensor> parameters;
    for (std::size_t i = 0; i < 4; ++i) {
      parameters.push_back(at::zeros({sizes_[i]}).requires_grad_());
      parameters.back().mutable_grad() = gradients[i].narrow(0, begins_[i], sizes_[i]).clone();
    }
    add_param_group(torch::optim::OptimizerParamGroup(parameters));
  }

  const at::Tensor& gradient(std::size_t i) { return param_groups()[0].params()[i].mutable_grad(); }
  /// This rank's shard of a whole gradient.
  at::Tensor shard(const at::Tensor& whole, std::size_t i) const { return whole.narrow(0, begins_[i], sizes_[i]); }

  std::vector<GradientShard> own_gradients() override {
    std::vector<GradientShard> shards;
    for (std::size_t i = 0; i < 4; ++i) shards.push_back({.gradients = {gradient(i)}, .groups = groups_[i]});
    return shards;
  }
  void discard_gradients() override { ++discarded; }
  c10::Device gradient_device() const override { return at::kCPU; }

  int discarded = 0;

 private:
  std::vector<std::vector<GroupPtr>> groups_;
  std::vector<int64_t> begins_;
  std::vector<int64_t> sizes_;
};

std::vector<at::Tensor> four_gradients() {
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < 4; ++i) gradients.push_back((at::arange(12, at::kFloat) + 1.0 + i).sin() * (1.0 + i));
  return gradients;
}

// ZERO-72: norms per group, what is replicated counted once
LOCKSTEP_THREAD_TEST(ShardedGradientsOnAMesh, AreClippedByTheNormOfTheWhole, 4) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double norm_type : {2.0, 1.0, 3.0, kInfinity, -kInfinity}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, norm_type);
    const auto whole = parameters_with(four_gradients());
    const auto expected = clip_grad_norm_(whole, 0.25, {.norm_type = norm_type});
    OnMesh optimizer(world, four_gradients());
    const auto norm = clip_grad_norm_(optimizer, 0.25, {.norm_type = norm_type});
    EXPECT_TRUE(at::allclose(norm, expected, 1e-6)) << norm << expected;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::allclose(optimizer.gradient(i), optimizer.shard(whole[i].grad(), i), 1e-6)) << i;
    }
  }
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ShardedGradientsOnAMesh, AreClippedByValue, 4) {
  const auto whole = parameters_with(four_gradients());
  clip_grad_value_(whole, 0.75);
  OnMesh optimizer(world, four_gradients());
  clip_grad_value_(optimizer, 0.75);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(at::equal(optimizer.gradient(i), optimizer.shard(whole[i].grad(), i))) << i;
  }
}

// ZERO-72
LOCKSTEP_THREAD_TEST(ShardedGradientsOnAMesh, KnowTheirGroups, 4) {
  OnMesh optimizer(world, four_gradients());
  const testing::Recorder recorder;
  expect_error([&] { clip_grad_norm_(optimizer, 1, {.process_group = world.group()}); }, {"Leave", "process_group"});
  EXPECT_TRUE(recorder.events("launch").empty());
}

// ZERO-72: nobody names the group to the scaler, and the overflow of rank 3 reaches rank 0 through two groups
LOCKSTEP_THREAD_TEST(ShardedGradientsOnAMesh, LeaveOutAStepTogether, 4) {
  OnMesh optimizer(world, four_gradients());
  GradScaler scaler({.device = at::kCPU, .init_scale = 16});
  scaler.scale(at::ones({1}));
  if (world.rank() == 3) optimizer.gradient(3)[1] = std::numeric_limits<double>::infinity();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(optimizer.discarded, 1);
  EXPECT_EQ(optimizer.param_groups()[0].params()[0].abs().sum().item<float>(), 0) << "not stepped";
}

LOCKSTEP_THREAD_TEST(ClipGradShards, RefusesAGroupThisRankIsNotIn, 2) {
  const auto first = new_group(world.group(), {0});
  if (first) return;
  const auto parameters = parameters_with(all_gradients());
  expect_error([&] { clip_grad_norm_(parameters, 1, {.process_group = first}); }, {"null", "not part of it"});
  expect_error([&] { GradScaler({.device = at::kCPU, .process_group = first}); }, {"null", "not part of it"});
}

}  // namespace
}  // namespace lockstep
