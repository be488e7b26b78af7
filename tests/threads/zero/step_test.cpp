// Steps: as those of an optimizer that is not sharded, bit by bit, whatever the division, backend and options.
#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/join/join.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/ddp_models.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::step_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;

const std::vector<std::vector<int64_t>> kShapes = {{7, 5}, {5}, {3, 4, 2}, {1}, {}, {0}, {13}};

template <class Optim>
void expect_as_unsharded(const World& world, const typename ZeroRedundancyOptimizer<Optim>::LocalOptions& options) {
  for (const auto& [name, zero] : ways(world.group())) {
    SCOPED_TRACE(c10::demangle_type<Optim>() + (", " + name));
    const bool is_fused = detail::kIsOneOf<Optim, optim::Adam, optim::AdamW, optim::SGD, optim::Adagrad>;
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

template <class Optim>
void expect_as_plain_with_ddp(const World& world, const typename ZeroRedundancyOptimizer<Optim>::LocalOptions& options,
                              Within within = {}) {
  for (const auto& [name, zero] : ways(world.group())) {
    SCOPED_TRACE(c10::demangle_type<Optim>() + (", " + name));
    const auto plain_model = ddp_models::mlp({4, 6, 3});
    const auto model = ddp_models::mlp({4, 6, 3});
    const DdpOptions ddp_options{.process_group = world.group(), .find_unused_parameters = true};
    DistributedDataParallel plain_ddp(plain_model, ddp_options);
    DistributedDataParallel ddp(model, ddp_options);
    Optim plain(std::vector<torch::optim::OptimizerParamGroup>{{plain_model->parameters()}}, options);
    ZeroRedundancyOptimizer<Optim> optimizer(model->parameters(), options, zero);
    for (int batch = 0; batch < 20; ++batch) {
      if (batch >= 10) {
        for (const auto& each : {plain_model, model}) each->parameters()[0].requires_grad_(batch % 2 == 0);
      }
      const auto input = ddp_models::random_batch(3, 4, 10 * batch + world.rank());
      plain.zero_grad();
      optimizer.zero_grad();
      const auto plain_loss = plain_ddp(input).pow(2).mean();
      const auto loss = ddp(input).pow(2).mean();
      plain_loss.backward();
      loss.backward();
      plain.step();
      optimizer.step();
      EXPECT_TRUE(agree(loss, plain_loss, within)) << batch;
      expect_same(model->parameters(), plain_model->parameters(), std::to_string(batch), within);
    }
  }
}

// ZERO-26
TEST(ZeroStep, TrainsAsDdpWithThePlainOptimizerWhileAParameterIsFrozen) {
  on_ranks(
      [](const World& world) {
        expect_as_plain_with_ddp<torch::optim::Adam>(world, {0.01});
        expect_as_plain_with_ddp<torch::optim::AdamW>(world, {0.01});
        expect_as_plain_with_ddp<torch::optim::SGD>(world, torch::optim::SGDOptions(0.01).momentum(0.9));
        // libtorch's have no maximize.
        expect_as_plain_with_ddp<optim::Adam>(world, {.lr = 0.01, .maximize = true}, kFusedSlices);
        expect_as_plain_with_ddp<optim::AdamW>(world, {.lr = 0.01, .maximize = true}, kFusedSlices);
        expect_as_plain_with_ddp<optim::SGD>(world, {.lr = 0.01, .momentum = 0.5, .maximize = true}, kFusedSlices);
      },
      {2, 3}, {"threads"});
}

// ZERO-26
TEST(ZeroStep, TakesGradientsReducedByHand) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto whole = ddp_models::random_batch(12, 4, 1);
      auto model = ddp_models::mlp({4, 3});
      auto expected = ddp_models::mlp({4, 3});
      torch::optim::SGD plain(expected->parameters(), 0.1);
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model->parameters(), {0.1}, zero);
      for (int step = 0; step < 3; ++step) {
        plain.zero_grad();
        optimizer.zero_grad();
        expected(whole).pow(2).mean().backward();
        model(ddp_models::my_rows(whole, world)).pow(2).mean().backward();
        for (const auto& parameter : model->parameters()) {
          all_reduce(parameter.grad(), world.group());
          parameter.grad().div_(world.world_size());
        }
        plain.step();
        optimizer.step();
        ddp_models::expect_close(model->parameters(), expected->parameters());
      }
    }
  });
}

// ZERO-21
TEST(ZeroStep, RunsTheClosureOnceAndReturnsItsLoss) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      // The weight is stepped by rank 0, where the input is 1.
      const auto input = at::full({1, 1}, world.rank() + 1.0);
      const auto weight = at::full({1, 1}, 1.0).requires_grad_();
      const auto bias = at::full({1}, 2.0).requires_grad_();
      const auto target = (at::linear(input, weight, bias) + 1).detach();
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer({weight, bias}, {0.1}, zero);
      int calls = 0;
      const auto loss = optimizer.step([&] {
        ++calls;
        EXPECT_TRUE(at::GradMode::is_enabled());
        optimizer.zero_grad();
        auto distance = (target - at::linear(input, weight, bias)).abs().mean();
        distance.backward();
        return distance;
      });
      EXPECT_EQ(calls, 1);
      EXPECT_FLOAT_EQ(loss.item<float>(), 1) << name;
      EXPECT_FLOAT_EQ(weight.item<float>(), 1.1F) << name;
      EXPECT_FLOAT_EQ(bias.item<float>(), 2.1F) << name;
      EXPECT_FALSE(optimizer.step().defined()) << "no closure, no loss";
    }
  });
}

/// Notes what its options were in a step, and changes them.
struct Watching : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    events.push_back(str("step with lr ", param_groups()[0].options().get_lr(), closure ? ", closure" : ""));
    const auto loss = SGD::step(closure);
    param_groups()[0].options().set_lr(0.5);
    return loss;
  }
  std::vector<std::string> events;
};

// ZERO-20
TEST(ZeroStep, GoesFromOptionsToTheLocalStepToOptionsToParameters) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{3}, {4}});
    ZeroRedundancyOptimizer<Watching> optimizer(parameters, {0.1}, world.group());
    optimizer.step();  // in the first one ranks compare what they list
    optimizer.param_groups()[0].options().set_lr(0.25);
    parameters[0].requires_grad_(false);
    auto& events = optimizer.local_optimizer().events;
    events.clear();
    const ddp_models::Warnings warnings;
    const Recorder recorder;
    const auto loss = optimizer.step([&] {
      EXPECT_EQ(warnings.count("frozen or are trainable"), 1) << "trainability comes first";
      EXPECT_TRUE(recorder.events().empty());
      events.emplace_back("closure");
      return at::full({}, 7);
    });
    EXPECT_EQ(loss.item<float>(), 7);
    EXPECT_THAT(events, ::testing::ElementsAre("step with lr 0.25, closure", "closure"));
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5) << "what the step changed shows";
    EXPECT_EQ(recorder.events("launch").size(), world.world_size() == 1 ? 0U : 1U);
    optimizer.step();
    EXPECT_EQ(events.back(), "step with lr 0.5") << "no closure was given";
  });
}

// ZERO-20, JOIN-15
TEST(ZeroStep, BeginsWithTheControlMessageOfAJoinScope) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{3}, {4}});
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters, {0.1}, world.group());
    optimizer.step();  // in the first one ranks compare what they list
    const auto values = copies_of(parameters);
    const bool has_more = world.rank() > 0;
    const ddp_models::Warnings warnings;
    const auto train = [&] {
      Join({&optimizer}, {.throw_on_early_termination = true}).run([&] {
        const Recorder recorder;
        optimizer.step([&] {
          EXPECT_EQ(recorder.events("launch").size(), 1U) << "the message, and no parameter yet";
          return at::ones({});
        });
        // All ranks stop here, where this one has not yet looked at its parameters.
        parameters[0].requires_grad_(false);
        if (has_more) optimizer.step();
      });
    };
    if (world.world_size() == 1) {
      train();
    } else {
      expect_error(train, {"rank 0 ran out of inputs"});
    }
    EXPECT_EQ(warnings.count("frozen or are trainable"), 0);
    expect_same(parameters, values);
  });
}

// ZERO-27
TEST(ZeroStep, IsRefusedIfTheLocalOptimizerHasOtherGroups) {
  on_ranks(
      [](const World& world) {
        ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters_of({{3}}), {0.1}, world.group());
        optimizer.local_optimizer().param_groups().pop_back();
        expect_error([&] { optimizer.step(); }, {"INTERNAL ASSERT", "1 parameter groups on one side, 0 on the other"});
      },
      {1}, {"threads"});
}

std::vector<std::string> launches(const Recorder& recorder) {
  std::vector<std::string> kinds;
  for (const auto& event : recorder.events("launch")) kinds.push_back(event.kind);
  return kinds;
}

// ZERO-23
TEST(ZeroStep, SendsBucketsRankByRankAndSmallParametersTogether) {
  on_ranks(
      [](const World& world) {
        const auto ranks = static_cast<std::size_t>(world.world_size());
        const auto small = parameters_of({{7, 5}, {5}, {3}, {4, 4}, {9}});
        const auto count = [&](const std::vector<at::Tensor>& parameters, const ZeroOptions& zero) {
          ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters, {0.1}, zero);
          set_gradients(parameters, 1);
          optimizer.step();  // in the first one ranks compare what they list
          const Recorder recorder;
          optimizer.step();
          return launches(recorder);
        };
        const auto all = ways(world.group());
        EXPECT_EQ(count(small, all[0].second), std::vector<std::string>(1, "all_gather_into_tensor"));
        EXPECT_EQ(count(small, all[1].second), std::vector<std::string>(ranks, "broadcast"));
        EXPECT_EQ(count(small, all[2].second), std::vector<std::string>(1, "all_gather_into_tensor"));
        // Large ones go as they are, from where they lie.
        std::vector<at::Tensor> large = {at::zeros({200, 1000}).requires_grad_()};
        while (large.size() < ranks) large.push_back(at::zeros({400, 1000}).requires_grad_());
        EXPECT_EQ(count(large, all[0].second), std::vector<std::string>(ranks, "broadcast"));
        large.push_back(at::zeros({3}).requires_grad_());
        EXPECT_THAT(count(large, all[0].second), ::testing::Contains("all_gather_into_tensor").Times(1));
        // All that is not large is on one rank: padding it for all would cost more than it saves.
        large.back() = at::zeros({100, 1000}).requires_grad_();
        EXPECT_EQ(count(large, all[0].second), std::vector<std::string>(ranks + 1, "broadcast"));
      },
      {3, 4});
}

// ZERO-23
TEST(ZeroStep, SendsBucketsInTheOrderOfTheRanks) {
  on_ranks([](const World& world) {
    // Rank 0 has 90 elements, rank 1 has 60, rank 2 has 30, rank 3 none.
    const auto parameters = parameters_of({{90}, {60}, {30}});
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
        parameters, {0.1}, {.process_group = world.group(), .parameters_as_bucket_view = true});
    std::vector<std::size_t> expected;
    for (const auto& groups : optimizer.partition().partition()) {
      std::size_t elements = 0;
      for (const auto& parameter : groups[0].params()) elements += parameter.numel();
      expected.push_back(4 * std::max<std::size_t>(elements, 1));
    }
    set_gradients(parameters, 1);
    optimizer.step();  // in the first one ranks compare what they list
    const Recorder recorder;
    optimizer.step();
    std::vector<std::size_t> sent;
    for (const auto& event : recorder.events("launch")) sent.push_back(event.bytes);
    EXPECT_EQ(sent, expected);
  });
}

// ZERO-24
TEST(ZeroStep, ReplacesWhatOtherRanksHaveByTheOwnersValues) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      if (zero.partition == ZeroPartition::kElements) continue;
      const auto parameters = parameters_of({{7, 5}, {5}, {400, 400}, {1}, {}, {13}});
      parameters[1].requires_grad_(false);
      const auto values = copies_of(parameters);
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters, {0.1}, zero);
      const auto& owners = optimizer.partition().param_to_rank();
      for (const auto& parameter : parameters) {
        if (owners.at(parameter.unsafeGetTensorImpl()) != world.rank()) parameter.detach().fill_(world.rank());
      }
      optimizer.step();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        // Buckets hold trainable parameters only.
        if (i != 1 || name == "parameters") expect_same({parameters[i]}, {values[i]}, name);
      }
    }
  });
}

// ZERO-24
TEST(ZeroStep, LeavesParametersWithoutGradientAndStillSendsThem) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of(kShapes);
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(parameters, {}, zero);
      torch::optim::Adam plain(expected);
      for (int step = 0; step < 6; ++step) {
        set_gradients(parameters, step);
        set_gradients(expected, step);
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          if ((i + step) % 3 != 0) continue;
          parameters[i].mutable_grad() = at::Tensor();
          expected[i].mutable_grad() = at::Tensor();
        }
        optimizer.step();
        plain.step();
        expect_same(parameters, expected, name);
        for (const auto& parameter : parameters) EXPECT_FALSE(parameter.grad_fn());
      }
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
      optimizer.zero_grad();
      for (const auto& parameter : parameters) EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

/// Throws in the step of one rank.
struct Doomed : torch::optim::SGD {
  static constexpr bool kIsElementwise = true;
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    TORCH_CHECK(!is_doomed, "the gradient is odd");
    return SGD::step(closure);
  }
  bool is_doomed = false;
};

/// Rank 1 throws in its step; all learn of it, and soon.
void expect_all_told(ZeroRedundancyOptimizer<Doomed>& optimizer, const World& world, const std::string& what) {
  optimizer.local_optimizer().is_doomed = world.rank() == 1;
  const auto start = std::chrono::steady_clock::now();
  // expect_error() leaves errors of woken ranks to the harness.
  std::string error;
  try {
    optimizer.step();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  EXPECT_THAT(error, ::testing::HasSubstr(world.rank() == 1 ? "the gradient is odd"
                                                            : "rank 1 left by an exception: the gradient is odd"))
      << what;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10)) << what;
}

// ZERO-25
TEST(ZeroStep, ThatThrowsTellsTheOthers) {
  on_ranks(
      [](const World& world) {
        const auto spare = [&] { return new_group(world.group(), global_ranks(world.group()), {.name = "spare"}); };
        for (std::size_t way = 0; way < 3; ++way) {
          const auto [name, zero] = ways(spare())[way];
          const auto parameters = parameters_of({{4, 3}, {5}, {6}});
          ZeroRedundancyOptimizer<Doomed> optimizer(parameters, {0.1}, zero);
          set_gradients(parameters, 1);
          optimizer.step();
          expect_all_told(optimizer, world, name);
        }
        DistributedDataParallel ddp(ddp_models::mlp(kSizes), spare());
        ZeroRedundancyOptimizer<Doomed> optimizer(ddp.parameters(), {0.1},
                                                  {.stage = ZeroStage::kGradients, .ddp = ddp});
        for (int step = 0; step < 2; ++step) {
          loss_of(ddp, world, step).backward();
          if (step == 0) optimizer.step();
        }
        expect_all_told(optimizer, world, "sharded gradients");
      },
      {2, 3}, {"threads", "shm"});
}

}  // namespace
}  // namespace lockstep::step_test
