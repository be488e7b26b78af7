// Division by elements: equal slices, whatever the sizes of parameters are.
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::elements_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;
using torch::optim::Adam;
using Zero = ZeroRedundancyOptimizer<Adam>;

ZeroOptions elements(const World& world) {
  return {.process_group = world.group(), .partition = ZeroPartition::kElements};
}

int64_t local_elements(Zero& optimizer) {
  int64_t count = 0;
  for (const auto& group : optimizer.local_optimizer().param_groups()) {
    for (const auto& parameter : group.params()) count += parameter.numel();
  }
  return count;
}

// ZERO-66, ZERO-74
TEST(ZeroElements, AreDividedEvenlyEvenIfOneParameterIsHuge) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{3}, {1000, 41}, {7}, {2, 2}});
    const auto expected = copies_of(parameters);
    Zero optimizer(parameters, {}, elements(world));
    Adam plain(expected);
    for (int step = 0; step < 3; ++step) {
      set_gradients(parameters, step);
      set_gradients(expected, step);
      const Recorder recorder;
      optimizer.step();
      plain.step();
      expect_same(parameters, expected);
      const auto compared = step == 0 ? 1U : 0U;  // once, whether ranks list the same
      EXPECT_EQ(recorder.events("launch").size(), world.world_size() == 1 ? 0U : 1U + compared) << "one all-gather";
    }
    constexpr int64_t kTotal = 3 + 41000 + 7 + 4;
    constexpr int64_t kAlignment = 64 / sizeof(float);
    const auto mean = (kTotal + world.world_size() - 1) / world.world_size();
    EXPECT_LE(local_elements(optimizer), mean + kAlignment - 1);
    EXPECT_EQ(optimizer.local_optimizer().param_groups()[0].params().size(), 1U) << "one run";
    const auto report = optimizer.memory_report();
    EXPECT_EQ(report.parameters, kTotal * 4);
    EXPECT_LE(report.state, 2 * 4 * (mean + kAlignment - 1));
    EXPECT_LE(report.temporaries, 4 * (mean + kAlignment - 1));
    EXPECT_GE(report.buckets, kTotal * 4);
  });
}

// ZERO-74: a small gradient does not cost the memory of a large one, which is used where it lies
TEST(ZeroElements, KeepCopiesOfSmallGradientsOnly) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{500, 900}, {5}});
        Zero optimizer(parameters, {}, elements(world));
        set_gradients(parameters, 1);
        optimizer.step();
        EXPECT_LE(optimizer.memory_report().temporaries, 4 * (5 + 16));
      },
      {1, 2, 3, 4}, {"threads"});
}

// ZERO-74: from 64 Ki elements on, on this rank
TEST(ZeroElements, UseTheSmallestLargeGradientInPlace) {
  on_ranks(
      [](const World& world) {
        constexpr int64_t kLarge = 64 << 10;
        const auto temporaries_of = [&](int64_t elements_of_rank) {
          const auto parameters = parameters_of({{world.world_size() * elements_of_rank}});
          Zero optimizer(parameters, {}, elements(world));
          set_gradients(parameters, 1);
          optimizer.step();
          EXPECT_EQ(local_elements(optimizer), elements_of_rank);
          return optimizer.memory_report().temporaries;
        };
        EXPECT_EQ(temporaries_of(kLarge), 0);
        constexpr int64_t kAlignment = 64 / sizeof(float);
        EXPECT_EQ(temporaries_of(kLarge - kAlignment), (kLarge - kAlignment) * 4);
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-74: construction has the parameters once more, for as long as the old memory is not freed
TEST(ZeroElements, TakeTheMemoryOfOneBufferToBeMade) {
  on_ranks(
      [](const World& world) {
        auto parameters = parameters_of({{300, 300}, {200, 100}, {7}, {50000}});
        int64_t all = 0;
        for (const auto& parameter : parameters) all += static_cast<int64_t>(parameter.nbytes());
        const testing::MemoryProbe probe;
        const Zero optimizer(std::move(parameters), {}, elements(world));
        constexpr int64_t kAlignment = 4 * 64;
        EXPECT_LE(probe.total().peak_bytes, all + world.world_size() * kAlignment);
        EXPECT_GE(probe.total().peak_bytes, all);
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-66
TEST(ZeroElements, SeeGradientsWhereverTheyLie) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{6, 50}, {300, 300}, {5}, {500, 900}, {3}});
    const auto expected = copies_of(parameters);
    Zero optimizer(parameters, {}, elements(world));
    Adam plain(expected);
    for (int step = 0; step < 3; ++step) {
      set_gradients(expected, step);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        // Laid out otherwise than the parameter, and expanded.
        auto gradient = expected[i].grad().clone();
        if (gradient.dim() == 2 && i < 2) gradient = gradient.t().contiguous().t();
        if (i == 2) {
          gradient = at::full({}, 0.5).expand({5});
          expected[i].mutable_grad() = gradient.clone();
        }
        parameters[i].mutable_grad() = gradient;
      }
      optimizer.step();
      plain.step();
      expect_same(parameters, expected);
    }
  });
}

// ZERO-66
TEST(ZeroElements, KeepNoGradientBeyondTheStep) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{600, 300}});
    Zero optimizer(parameters, {}, elements(world));
    set_gradients(parameters, 1);
    const auto gradient = parameters[0].grad();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(gradient.storage().use_count(), 1U);
  });
}

// ZERO-66
TEST(ZeroElements, AreCutOnlyWhereStateDiffers) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{40}, {40}, {40}, {40}});
        Zero optimizer(parameters, {}, elements(world));
        const auto runs = [&] { return optimizer.local_optimizer().param_groups()[0].params().size(); };
        set_gradients(parameters, 1);
        optimizer.step();
        EXPECT_EQ(runs(), 1U);
        parameters[1].mutable_grad() = at::Tensor();
        optimizer.step();
        EXPECT_LE(runs(), 3U);
        EXPECT_GE(runs(), world.rank() == 0 ? 2U : 1U);
        // Loading state that is the same throughout makes them one again.
        set_gradients(parameters, 1);
        optimizer.consolidate_state_dict();
        OptimizerStateDict dict;
        dict.param_groups = {{.params = {0, 1, 2, 3}}};
        optimizer.load_state_dict(dict);
        EXPECT_EQ(runs(), 1U);
        optimizer.step();
      },
      {1, 2, 3});
}

// ZERO-39
TEST(ZeroElements, AreCutAsBeforeIfStateIsRefused) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{40}, {40}, {40}, {40}});
        const auto expected = copies_of(parameters);
        Zero optimizer(parameters, {}, elements(world));
        Adam plain(expected);
        const auto step = [&](int number) {
          set_gradients(parameters, number);
          set_gradients(expected, number);
          if (number == 1) parameters[1].mutable_grad() = expected[1].mutable_grad() = at::Tensor();
          optimizer.step();
          plain.step();
        };
        for (int number = 0; number < 2; ++number) step(number);
        // The same for all parameters, so that less would have to be cut, and something is missing.
        auto bad = state_dict_of(plain);
        bad.state[1] = bad.state[0];
        for (auto& [index, values] : bad.state) values.erase("step");
        expect_error([&] { optimizer.load_state_dict(bad); }, {});
        optimizer.consolidate_state_dict();
        if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
        step(2);
        expect_same(parameters, expected);
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-66
TEST(ZeroElements, RefuseSparseGradientsOnTheRankThatHasThem) {
  const auto refused = [](const World& world) {
    const auto parameters = parameters_of({{4, 3}});
    Zero optimizer(parameters, {}, elements(world));
    parameters[0].mutable_grad() = at::ones({4, 3}).to_sparse();
    expect_error([&] { optimizer.step(); }, {"gradient of parameter 0 is sparse", "kParameters"});
    EXPECT_EQ(world.world_size(), 1);
  };
  on_ranks(refused, {1});
}

// ZERO-66
TEST(ZeroElements, KeepDoublesAndHalves) {
  on_ranks([](const World& world) {
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      std::vector<at::Tensor> parameters;
      for (const auto& each : parameters_of({{9, 5}, {11}}))
        parameters.push_back(each.detach().to(dtype).requires_grad_());
      const auto expected = copies_of(parameters);
      Zero optimizer(parameters, {}, elements(world));
      Adam plain(expected);
      expect_same_steps(optimizer, plain, parameters, expected, 3);
    }
  });
}

}  // namespace
}  // namespace lockstep::elements_test
