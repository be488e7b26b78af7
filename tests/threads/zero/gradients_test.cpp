// Clipping and scaling of gradients, and memory.
#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::gradients_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using torch::optim::Adam;
using Zero = ZeroRedundancyOptimizer<Adam>;

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

// ZERO-72
TEST(ZeroGradients, AreClippedByTheNormOfTheWhole) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        for (const double max_norm : {0.5, 1e4}) {
          const auto parameters = parameters_of({{7, 5}, {5}, {3, 4, 2}, {1}, {13}});
          const auto expected = copies_of(parameters);
          Zero optimizer(parameters, {}, zero);
          set_gradients(parameters, 1);
          set_gradients(expected, 1);
          const auto norm = optimizer.clip_grad_norm_(max_norm, norm_type);
          const auto expected_norm = clip_grad_norm_(expected, max_norm, {.norm_type = norm_type});
          EXPECT_TRUE(at::allclose(norm, expected_norm, 1e-6)) << name << norm << expected_norm;
          expect_same(gradients_of(parameters), gradients_of(expected), name, {1e-6});
          const auto norms = all_gather_object(str(norm.item<double>()), world.group());
          for (const auto& each : norms) EXPECT_EQ(each, norms[0]) << "the same bits everywhere";
        }
      }
    }
  });
}

// ZERO-72
TEST(ZeroGradients, WithoutAFiniteNormAreRefusedOnAllRanks) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{7, 5}, {5}});
      Zero optimizer(parameters, {}, zero);
      set_gradients(parameters, 1);
      parameters[1].grad()[2] = std::numeric_limits<float>::infinity();
      const auto before = parameters[0].grad().clone();
      expect_error([&] { optimizer.clip_grad_norm_(1, 2, /*error_if_nonfinite=*/true); }, {"cannot be clipped"});
      EXPECT_TRUE(at::equal(parameters[0].grad(), before));
      // All gradients may be missing.
      optimizer.zero_grad();
      EXPECT_EQ(optimizer.clip_grad_norm_(1).item<float>(), 0);
    }
  });
}

// ZERO-72
TEST(ZeroGradients, ThatOverflowOnOneRankLeaveOutTheStepOnAll) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{7, 5}, {5}, {3}});
      const auto expected = copies_of(parameters);
      Zero optimizer(parameters, {}, zero);
      Adam plain(expected);
      GradScalerOptions options{.device = at::kCPU, .init_scale = 8, .growth_interval = 2};
      GradScaler plain_scaler(options);
      options.process_group = world.group();
      GradScaler scaler(options);
      for (int step = 0; step < 6; ++step) {
        for (const auto* each : {&parameters, &expected}) {
          set_gradients(*each, step);
          for (const auto& parameter : *each)
            parameter.grad().mul_(each == &parameters ? scaler.get_scale() : plain_scaler.get_scale());
        }
        // Only one rank sees it: its gradients are not reduced, or are a shard.
        if (step == 2) {
          expected[0].grad()[0][0] = std::numeric_limits<float>::infinity();
          if (world.rank() + 1 == world.world_size())
            parameters[0].grad()[0][0] = std::numeric_limits<float>::quiet_NaN();
        }
        scaler.scale(at::ones({1}));
        plain_scaler.scale(at::ones({1}));
        scaler.step(optimizer);
        plain_scaler.step(plain);
        scaler.update();
        plain_scaler.update();
        expect_same(parameters, expected, name + std::to_string(step));
        EXPECT_EQ(scaler.get_scale(), plain_scaler.get_scale());
      }
    }
  });
}

// ZERO-74
TEST(ZeroGradients, StateTakesItsShareOfMemoryOnly) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          std::vector<std::vector<int64_t>> shapes(12, {100, 20});
          const auto parameters = parameters_of(shapes);
          Zero optimizer(parameters, {}, zero);
          EXPECT_EQ(optimizer.memory_report().state, 0);
          set_gradients(parameters, 1);
          optimizer.step();
          const auto report = optimizer.memory_report();
          const int64_t parameter_bytes = 12 * 2000 * sizeof(float);
          EXPECT_EQ(report.parameters, parameter_bytes);
          EXPECT_EQ(report.state, 2 * parameter_bytes / world.world_size()) << name;
          EXPECT_EQ(report.buckets, name == "parameters" ? 0 : parameter_bytes) << name;
          const auto temporaries = name == "bucket views"    ? 0
                                   : name == "elements"      ? parameter_bytes / world.world_size()
                                   : world.world_size() == 1 ? 0
                                                             : parameter_bytes;
          EXPECT_EQ(report.temporaries, temporaries) << name;
        }
      },
      {1, 2, 3, 4}, {"threads"});
}

}  // namespace
}  // namespace lockstep::gradients_test
