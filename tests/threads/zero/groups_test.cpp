// Options and parameter groups, those that are there and those that are added.
#include <torch/optim/schedulers/step_lr.h>

#include "tests/support/ddp_models.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using ddp_models::Warnings;
using testing::expect_error;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

template <class Optimizer>
void train(Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int steps, int first = 0) {
  for (int step = 0; step < steps; ++step) {
    set_gradients(parameters, first + step);
    optimizer.step();
  }
}

// ZERO-27
TEST(ZeroGroups, FollowALearningRateSchedule) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {2}});
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters, {0.5}, zero);
      torch::optim::SGD plain(expected, 0.5);
      torch::optim::StepLR schedule(optimizer, 1, 0.5);
      torch::optim::StepLR plain_schedule(plain, 1, 0.5);
      for (int i = 0; i < 5; ++i) {
        train(optimizer, parameters, 1, i);
        train(plain, expected, 1, i);
        schedule.step();
        plain_schedule.step();
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), plain.param_groups()[0].options().get_lr());
        expect_same(parameters, expected, name);
      }
    }
  });
}

// ZERO-27
TEST(ZeroGroups, KeepOptionsThatWereSetBeforeAnotherIsAdded) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = parameters_of({{4, 3}, {5}});
          ZeroRedundancyOptimizer<torch::optim::SGD> optimizer({parameters[0]}, {0.5}, zero);
          optimizer.param_groups()[0].options().set_lr(0.125);
          optimizer.add_param_group(OptimizerParamGroup({parameters[1]}));
          EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125) << name;
          EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.5) << name;
        }
      },
      {1, 2}, {"threads"});
}

// ZERO-27
TEST(ZeroGroups, AreSavedWithTheOptionsTheyHaveNow) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}});
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(parameters, {0.5}, zero);
      train(optimizer, parameters, 1);
      optimizer.param_groups()[0].options().set_lr(0.125);
      optimizer.consolidate_state_dict();
      EXPECT_EQ(optimizer.local_optimizer().param_groups()[0].options().get_lr(), 0.125) << name;
      if (world.rank() == 0) {
        EXPECT_EQ(optimizer.state_dict().param_groups[0].options.at("lr").toDouble(), 0.125);
      }
    }
  });
}

/// Weights without decay, biases with; on top of the defaults.
Groups weights_and_biases(const std::vector<at::Tensor>& parameters) {
  auto decayed = std::make_unique<AdamWOptions>(AdamWOptions());
  decayed->weight_decay(0.3);
  Groups groups;
  groups.emplace_back(std::vector<at::Tensor>{parameters[0], parameters[2]});
  groups.emplace_back(std::vector<at::Tensor>{parameters[1], parameters[3]}, std::move(decayed));
  return groups;
}

// ZERO-28
TEST(ZeroGroups, HaveOptionsOfTheirOwnAboveTheDefaults) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {6, 2}, {3}});
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<AdamW> optimizer(weights_and_biases(parameters), AdamWOptions(0.1).weight_decay(0), zero);
      AdamW plain(weights_and_biases(expected), AdamWOptions(0.1).weight_decay(0));
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(static_cast<AdamWOptions&>(optimizer.param_groups()[i].options()),
                  static_cast<AdamWOptions&>(plain.param_groups()[i].options()));
      }
      train(optimizer, parameters, 4);
      train(plain, expected, 4);
      expect_same(parameters, expected, name);
    }
    const auto parameters = parameters_of({{4, 3}, {5}});
    Groups groups;
    groups.emplace_back(std::vector<at::Tensor>{parameters[0]});
    groups.emplace_back(std::vector<at::Tensor>{parameters[1]}, optim::group_options(optim::AdamWOptions{.lr = 7}));
    const ZeroRedundancyOptimizer<optim::AdamW> ours(groups, {.lr = 0.5}, world.group());
    EXPECT_EQ(ours.param_groups()[0].options().get_lr(), 0.5);
    EXPECT_EQ(ours.param_groups()[1].options().get_lr(), 7);
  });
}

// ZERO-29
TEST(ZeroGroups, ThatAreAddedLeaveTheOthersWhereTheyAre) {
  on_ranks([](const World& world) {
    const auto size = static_cast<std::size_t>(world.world_size());
    std::vector<std::vector<int64_t>> shapes;
    for (std::size_t i = 0; i < size; ++i) shapes.insert(shapes.end(), {{9}, {7}, {5}, {3}});
    const auto all = parameters_of(shapes);
    for (const bool as_view : {false, true}) {
      const std::vector<at::Tensor> first(all.begin(), all.end() - 1);
      ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
          first, {}, {.process_group = world.group(), .parameters_as_bucket_view = as_view});
      train(optimizer, first, 2);
      const auto before = optimizer.partition().param_to_rank();
      const auto states = optimizer.local_optimizer().state().size();
      optimizer.add_param_group(OptimizerParamGroup({all.back()}));
      for (const auto& [parameter, rank] : before) EXPECT_EQ(optimizer.partition().param_to_rank().at(parameter), rank);
      EXPECT_EQ(optimizer.local_optimizer().param_groups().size(), 2U) << "also where the part is empty";
      EXPECT_EQ(optimizer.local_optimizer().state().size(), states);
      for (const auto& groups : optimizer.partition().partition()) {
        int64_t load = 0;
        for (const auto& group : groups) {
          for (const auto& parameter : group.params()) load += parameter.numel();
        }
        EXPECT_EQ(load, 24);
      }
      train(optimizer, all, 1);
    }
  });
}

// ZERO-29
TEST(ZeroGroups, ThatAreAddedReachAllRanksIfTheLargestParameterIsFrozen) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{100}, {4}, {3}});
      parameters[0].requires_grad_(false);
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<AdamW> optimizer({parameters[0], parameters[1]}, {}, zero);
      AdamW plain(std::vector<at::Tensor>{expected[0], expected[1]});
      optimizer.add_param_group(OptimizerParamGroup({parameters[2]}));
      plain.add_param_group(OptimizerParamGroup({expected[2]}));
      EXPECT_EQ(optimizer.param_groups().size(), 2U) << name;
      EXPECT_EQ(optimizer.local_optimizer().param_groups().size(), 2U) << name;
      train(optimizer, parameters, 2);
      train(plain, expected, 2);
      expect_same(parameters, expected, name);
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) {
        EXPECT_EQ(optimizer.state_dict().state.count(0), 0U) << "no gradient, no state";
        expect_same_state(optimizer.state_dict(), state_dict_of(plain));
      }
    }
  });
}

// ZERO-33
TEST(ZeroGroups, AddedLaterEqualThoseThatWereThereFromTheStart) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const std::vector<std::vector<int64_t>> shapes = {{4, 3}, {5}, {6, 2}, {3}};
      const auto upfront = parameters_of(shapes);
      const auto later = parameters_of(shapes);
      const auto plain = parameters_of(shapes);
      ZeroRedundancyOptimizer<AdamW> one(weights_and_biases(upfront), {0.1}, zero);
      ZeroRedundancyOptimizer<AdamW> two(Groups{weights_and_biases(later)[0]}, {0.1}, zero);
      two.add_param_group(weights_and_biases(later)[1]);
      AdamW three(weights_and_biases(plain), AdamWOptions(0.1));
      train(one, upfront, 3);
      train(two, later, 3);
      train(three, plain, 3);
      expect_same(upfront, plain, name);
      expect_same(later, plain, name);
    }
  });
}

// ZERO-29, ZERO-33
TEST(ZeroGroups, CanBeAddedBetweenSteps) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const std::vector<std::vector<int64_t>> shapes = {{4, 3}, {5}, {6, 2}, {3}};
      const auto parameters = parameters_of(shapes);
      const auto expected = parameters_of(shapes);
      ZeroRedundancyOptimizer<AdamW> optimizer(Groups{weights_and_biases(parameters)[0]}, {0.1}, zero);
      AdamW plain(Groups{weights_and_biases(expected)[0]}, AdamWOptions(0.1));
      train(optimizer, parameters, 2);
      train(plain, expected, 2);
      optimizer.add_param_group(weights_and_biases(parameters)[1]);
      plain.add_param_group(weights_and_biases(expected)[1]);
      train(optimizer, parameters, 3, 2);
      train(plain, expected, 3, 2);
      expect_same(parameters, expected, name);
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
    }
  });
}

// ZERO-30
TEST(ZeroGroups, AddedOnSomeRanksOnlyAreNoticedIfAskedFor) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{4}, {5}});
        ZeroRedundancyOptimizer<AdamW> optimizer({parameters[0]}, {},
                                                 {.process_group = world.group(), .check_same_on_all_ranks = true});
        train(optimizer, {parameters[0]}, 1);
        if (world.rank() == 1) optimizer.add_param_group(OptimizerParamGroup({parameters[1]}));
        expect_error([&] { optimizer.step(); }, {"number of parameter groups", "rank 1: '2'"});
      },
      {2, 3});
}

// ZERO-31
TEST(ZeroGroups, ThatAreAddedAreCheckedAndWatched) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4}, {5}, {6}});
      ZeroRedundancyOptimizer<AdamW> optimizer({parameters[0]}, {}, zero);
      const auto refuses = [&](const std::vector<at::Tensor>& group, const std::string& words) {
        expect_error([&] { optimizer.add_param_group(OptimizerParamGroup(group)); }, {words});
        EXPECT_EQ(optimizer.param_groups().size(), 1U);
      };
      refuses({at::eye(2).to_sparse().requires_grad_()}, "parameter 0 of group 1 is sparse Float");
      refuses({parameters[1] * 2}, "is not a leaf");
      refuses({parameters[1], parameters[0]}, "parameter 0 of group 0 and parameter 1 of group 1 are the same");
      refuses({at::Tensor()}, "is undefined");
      train(optimizer, {parameters[0]}, 1);
      optimizer.add_param_group(OptimizerParamGroup({parameters[1], parameters[2]}));
      const Warnings warnings;
      train(optimizer, parameters, 1);
      EXPECT_EQ(warnings.count("frozen"), 0);
      parameters[2].requires_grad_(false);
      train(optimizer, parameters, 1);
      EXPECT_EQ(warnings.count("frozen"), 1);
    }
  });
}

// ZERO-31
TEST(ZeroGroups, WithBadOptionsLeaveNothingBehind) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4}, {5}});
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<optim::SGD> optimizer({parameters[0]}, {.lr = 0.1}, zero);
      optim::SGD plain(std::vector<at::Tensor>{expected[0]}, {.lr = 0.1});
      expect_error(
          [&] {
            optimizer.add_param_group(
                OptimizerParamGroup({parameters[1]}, optim::group_options(optim::SGDOptions{.lr = -1})));
          },
          {"Invalid learning rate"});
      EXPECT_EQ(optimizer.param_groups().size(), 1U);
      train(optimizer, parameters, 2);
      train(plain, expected, 2);
      ddp_models::expect_close({parameters[0].detach()}, {expected[0].detach()});
    }
  });
}

// ZERO-32
TEST(ZeroGroups, AddedThroughTheBaseClassAreNoticedWhenStateIsCollectedOrLoaded) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {6}});
      ZeroRedundancyOptimizer<AdamW> optimizer({parameters[0]}, {}, zero);
      train(optimizer, {parameters[0]}, 1);
      torch::optim::Optimizer& base = optimizer;
      base.add_param_group(OptimizerParamGroup({parameters[1]}));
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) {
        EXPECT_EQ(optimizer.state_dict().param_groups.size(), 2U) << name;
      }
      base.add_param_group(OptimizerParamGroup({parameters[2]}));
      OptimizerStateDict dict;
      dict.param_groups = {{.params = {0}}, {.params = {1}}, {.params = {2}}};
      optimizer.load_state_dict(dict);
      EXPECT_EQ(optimizer.local_optimizer().param_groups().size(), 3U) << name;
      train(optimizer, parameters, 1);
    }
  });
}

// ZERO-32
TEST(ZeroGroups, AddedThroughTheBaseClassAreNoticedByTheNextStep) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const std::vector<std::vector<int64_t>> shapes = {{4, 3}, {5}, {6, 2}, {3}};
      const auto parameters = parameters_of(shapes);
      const auto expected = parameters_of(shapes);
      ZeroRedundancyOptimizer<AdamW> optimizer(Groups{weights_and_biases(parameters)[0]}, {0.1}, zero);
      AdamW plain(Groups{weights_and_biases(expected)[0]}, AdamWOptions(0.1));
      torch::optim::Optimizer& base = optimizer;
      base.add_param_group(weights_and_biases(parameters)[1]);
      plain.add_param_group(weights_and_biases(expected)[1]);
      // Also by a norm, which comes before the step.
      set_gradients(parameters, 9);
      set_gradients(expected, 9);
      const auto norm = clip_grad_norm_(optimizer, 0.5);
      const auto expected_norm = clip_grad_norm_(expected, 0.5);
      EXPECT_TRUE(at::allclose(norm, expected_norm, 1e-6)) << name << ": " << norm << " for " << expected_norm;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(parameters[i].grad(), expected[i].grad(), 1e-6, 1e-7)) << name << i;
      }
      train(base, parameters, 3);
      train(plain, expected, 3);
      expect_same(parameters, expected, name);
      EXPECT_EQ(optimizer.local_optimizer().param_groups().size(), 2U);

      base.add_param_group(OptimizerParamGroup({at::eye(2).to_sparse().requires_grad_()}));
      expect_error([&] { base.step(); }, {"is sparse Float"});
    }
    const auto parameters = parameters_of({{4}, {5}});
    ZeroRedundancyOptimizer<AdamW> optimizer({parameters[0]}, {}, world.group());
    torch::optim::Optimizer& base = optimizer;
    base.param_groups()[0].params().push_back(parameters[1]);
    expect_error([&] { base.step(); }, {"parameter groups were changed from outside"});
  });
}

// ZERO-34
TEST(ZeroGroups, KeepValuesAndStateWhenParametersAreFrozenAndBack) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {6}});
      parameters[1].requires_grad_(false);
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<AdamW> optimizer(parameters, {}, zero);
      AdamW plain(expected);
      for (int step = 0; step < 9; ++step) {
        for (const auto& each : {parameters, expected}) {
          each[0].requires_grad_(step % 4 != 2);
          each[1].requires_grad_(step > 4);
        }
        train(optimizer, parameters, 1, step);
        train(plain, expected, 1, step);
        expect_same(parameters, expected, name + std::to_string(step));
      }
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
    }
  });
}

}  // namespace
}  // namespace lockstep
