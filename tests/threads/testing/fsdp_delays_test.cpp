// Delays wherever training can be late: results stay as they are, and are not if a wait is missing.
#include "lockstep/testing/fsdp/delay_models.h"
#include "lockstep/testing/fsdp/parity.h"
#include "lockstep/testing/fsdp/states.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::fsdp_delays_test {

using namespace testing;
using namespace std::chrono_literals;

struct Trained {
  at::Tensor loss;
  ModuleState params;
};

Trained train(const World& world, const ModelDelays& delays, const FullyShardOptions& fsdp = {}) {
  const TestModelOptions recursive{.fsdp_init_mode = FsdpInitMode::kRecursive, .fsdp = fsdp, .deterministic = true};
  const auto model = NestedWrappedModuleWithDelay::init(world.group(), recursive, delays);
  fully_shard(*model, with_mesh(fsdp, world.group()));
  auto loss = train_for_several_steps(*model, 3);
  return {std::move(loss), get_full_params(*model)};
}

void expect_same(const Trained& actual, const Trained& expected) {
  check_equal("loss", actual.loss, expected.loss);
  for (const auto& [name, tensor] : expected.params) check_equal(name, actual.params.at(name), tensor);
}

// TEST-60
TEST(FsdpDelays, ChangeNothingWhereverTheyAre) {
  const std::vector<std::pair<std::string, std::function<ModelDelays(std::chrono::milliseconds)>>> places{
      {"after the loss", [](auto time) { return ModelDelays{.after_loss = time}; }},
      {"before reduce-scatter", [](auto time) { return ModelDelays{.before_reduction = time}; }},
      {"before reshard", [](auto time) { return ModelDelays{.before_reshard = time}; }},
      {"before the optimizer", [](auto time) { return ModelDelays{.before_step = time}; }},
  };
  for (const auto& [place, delays_of] : places) {
    SCOPED_TRACE(place);
    run_threads_in_gtest({.world_size = 3, .completes_late = true}, [&delays_of = delays_of](const World& world) {
      const auto expected = train(world, {});
      const auto start = std::chrono::steady_clock::now();
      expect_same(train(world, delays_of(std::chrono::milliseconds(1 + world.rank()))), expected);
      EXPECT_GE(std::chrono::steady_clock::now() - start, 3 * (1ms + 1ms * world.rank()));
    });
  }
}

// TEST-60: every wait of the library is needed.
TEST(FsdpDelays, ShowAMissingWait) {
  for (const auto kind : {CallKind::kAllGatherSingle, CallKind::kReduceScatterSingle, CallKind::kAllReduce}) {
    for (const bool waits : {true, false}) {
      const auto report = run_threads({.world_size = 4, .completes_late = true}, [&](const World& world) {
        const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
        const auto expected = train(world, {}, {.mesh = mesh});
        const auto forgets = waits ? delay_calls(kind, 0ms) : forget_waits(kind);
        const ModelDelays delays{.after_loss = 1ms, .before_reduction = 1ms, .before_reshard = 1ms, .before_step = 1ms};
        expect_same(train(world, delays, {.mesh = mesh}), expected);
      });
      EXPECT_EQ(report.has_passed(), waits) << name_of(kind) << "\n" << report.describe();
    }
  }
}

}  // namespace lockstep::fsdp_delays_test
