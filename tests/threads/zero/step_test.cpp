// Steps: as those of an optimizer that is not sharded, bit by bit, whatever the division, backend and options.
#include "lockstep/testing/recorder.h"
#include "tests/ddp_models.h"
#include "tests/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;

const std::vector<std::vector<int64_t>> kShapes = {{7, 5}, {5}, {3, 4, 2}, {1}, {}, {0}, {13}};

template <class Optim>
void expect_as_unsharded(const World& world, const typename ZeroRedundancyOptimizer<Optim>::LocalOptions& options) {
  for (const auto& [name, zero] : ways(world.group())) {
    SCOPED_TRACE(c10::demangle_type<Optim>() + (", " + name));
    const bool is_fused = detail::is_one_of<Optim, optim::Adam, optim::AdamW, optim::SGD, optim::Adagrad>;
    const auto within = is_fused && zero.partition == ZeroPartition::kElements ? kFusedSlices : Within{};
    const auto expected = parameters_of(kShapes);
    const auto parameters = copies_of(expected);
    Optim plain(std::vector<torch::optim::OptimizerParamGroup>{{expected}}, options);
    ZeroRedundancyOptimizer<Optim> optimizer(parameters, options, zero);
    for (int step = 0; step < 5; ++step) {
      set_gradients(expected, step);
      set_gradients(parameters, step);
      plain.step();
      optimizer.step();
      expect_same(parameters, expected, "step " + std::to_string(step), within);
    }
    for (int to = 0; to < world.world_size(); ++to) {
      optimizer.consolidate_state_dict(to);
      if (world.rank() == to) expect_same_state(optimizer.state_dict(), state_dict_of(plain), within);
    }
  }
}

// ZERO-26, ZERO-10, ZERO-24, ZERO-66, ZERO-68
TEST(ZeroStep, EqualsTheUnshardedOptimizerBitByBit) {
  on_ranks([](const World& world) {
    expect_as_unsharded<torch::optim::Adam>(world, {});
    expect_as_unsharded<torch::optim::AdamW>(world, torch::optim::AdamWOptions(0.01).amsgrad(true));
    expect_as_unsharded<torch::optim::SGD>(world, {0.1});
    expect_as_unsharded<torch::optim::SGD>(world, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
    expect_as_unsharded<torch::optim::Adagrad>(world, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
    expect_as_unsharded<torch::optim::RMSprop>(world, torch::optim::RMSpropOptions(0.1).centered(true).momentum(0.5));
    expect_as_unsharded<optim::Adam>(world, {.lr = 0.01, .maximize = true});
    expect_as_unsharded<optim::AdamW>(world, {.lr = 0.01, .weight_decay = 0.1});
    expect_as_unsharded<optim::SGD>(world, {.lr = 0.1, .momentum = 0.9, .maximize = true});
    expect_as_unsharded<optim::Adagrad>(world, {.initial_accumulator_value = 0.5});
    expect_as_unsharded<optim::Adadelta>(world, {});
    expect_as_unsharded<optim::Adamax>(world, {});
    expect_as_unsharded<optim::RMSprop>(world, {.momentum = 0.5});
    expect_as_unsharded<optim::Rprop>(world, {});
  });
}

}  // namespace
}  // namespace lockstep
