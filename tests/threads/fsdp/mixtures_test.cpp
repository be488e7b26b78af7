// Programs that mix sharding with whatever else training code does, each beside one process that has every rank's data.
#include <ATen/autocast_mode.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <sstream>
#include <thread>

#include "lockstep/fsdp/join.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/fsdp_programs.h"

namespace lockstep::fsdp_mixtures_test {

using namespace fsdp_programs;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

/// Two blocks between a table and a head; all sizes divide by four.
struct ToyImpl : torch::nn::Module {
  ToyImpl()
      : table(register_module("table", torch::nn::Embedding(12, 8))),
        first(register_module("first", Block(8))),
        second(register_module("second", Block(8))),
        head(register_module("head", torch::nn::Linear(8, 4))) {}
  at::Tensor forward(const at::Tensor& input) {
    return head->forward(second->forward(first->forward(table->forward(input))));
  }
  torch::nn::Embedding table;
  Block first, second;
  torch::nn::Linear head;
};
TORCH_MODULE(Toy);

at::Tensor rows(int rank, int step, int64_t width = 8) {
  return random_batch(3, width, static_cast<uint64_t>(100 * step + rank + 1));
}

at::Tensor toy_loss(Toy& model, const Trainer& trainer, int step) {
  return trainer.mean([&](int rank) { return model->forward(tokens(rank, step)).pow(2).mean(); });
}

/// Runs `program(model, trainer)` in one process and sharded by `shard(model, options)`.
template <class Build, class ShardModel, class Program>
void compare(const World& world, const std::string& what, const FullyShardOptions& options, const Build& build,
             const ShardModel& shard, const Program& program, double tolerance = 2e-5) {
  auto plain = built_from_seed(build);
  Trainer alone{.size = world.world_size()};
  program(plain, alone);
  auto model = built_from_seed(build);
  Trainer trainer{.size = world.world_size(), .rank = world.rank(), .root = shard(model, options)};
  program(model, trainer);
  expect_whole_state(*model, *plain, what, tolerance);
}

FsdpUnit shard_toy(Toy& model, const FullyShardOptions& options) {
  fully_shard(model->first, options);
  fully_shard(model->second, options);
  return fully_shard(model, options);
}

/// Each way of sharding once: on two ranks, or on four if it needs them.
std::vector<std::pair<std::string, FullyShardOptions>> all_ways(const World& world) {
  const auto mesh = mesh_of(world);
  if (world.world_size() == 4) {
    const auto two = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    return {{"neighbours", {.mesh = mesh, .reshard_after_forward = 2}}, {"hybrid", {.mesh = two}}};
  }
  const auto second_dim = [](const std::string&, const at::Tensor& parameter) -> std::optional<ShardPlacement> {
    return parameter.dim() < 2 ? std::nullopt : std::optional(ShardPlacement{.dim = 1});
  };
  return {{"unset", {.mesh = mesh}},
          {"kept", {.mesh = mesh, .reshard_after_forward = false}},
          {"flat", {.mesh = mesh, .use_orig_params = false}},
          {"dim 1", {.mesh = mesh, .reshard_after_forward = true, .shard_placement_fn = second_dim}}};
}

/// Of a Toy, in every way it can be sharded.
template <class Program>
void compare_toys(const Program& program, const std::vector<int>& sizes = {2, 4}, double tolerance = 2e-5) {
  for (const int size : sizes) {
    testing::run_threads_in_gtest({.world_size = size}, [&](const World& world) {
      for (const auto& [what, options] : all_ways(world)) {
        compare(world, what, options, [] { return Toy(); }, shard_toy, program, tolerance);
      }
    });
  }
}

/// One step of a program that computes a gradient in `backward`.
template <class Backward>
void steps(auto& model, int count, const Backward& backward) {
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < count; ++step) {
    optimizer.zero_grad();
    backward(step);
    optimizer.step();
  }
}

TEST(FsdpMixtures, AccumulatesAcrossALoadAndAnEvaluation) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        toy_loss(model, trainer, step).backward();
        {
          const c10::InferenceMode inference;
          toy_loss(model, trainer, 50);
        }
        const at::NoGradGuard no_grad;
        auto state = full_state_dict(*model);
        for (auto& [name, tensor] : state) tensor.mul_(0.9);
        load_full_state_dict(*model, state);
      }
      toy_loss(model, trainer, step + 10).backward();
    });
  });
}

TEST(FsdpMixtures, AccumulatesAcrossACast) {
  compare_toys([](Toy& model, Trainer& trainer) {
    {
      const auto no_sync = trainer.no_sync();
      toy_loss(model, trainer, 0).backward();
    }
    model->to(at::kDouble);
    // libtorch leaves gradients of another dtype where they are: a program would begin anew.
    model->zero_grad();
    {
      const auto no_sync = trainer.no_sync();
      toy_loss(model, trainer, 1).backward();
    }
    {
      const c10::InferenceMode inference;
      toy_loss(model, trainer, 2);
    }
    toy_loss(model, trainer, 3).backward();
    SGD(model->parameters(), SGDOptions(0.1)).step();
  });
}

// What was exchanged is taken back by the first operator, which may be one of an evaluation.
TEST(FsdpMixtures, EvaluatesInInferenceModeRightAfterALoad) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      std::stringstream file;
      torch::save(model, file);
      {
        const at::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) parameter.mul_(2);
      }
      torch::load(model, file);
      if (step == 1) model->to(at::kDouble);
      if (step == 2) model->to(at::kFloat);
      {
        const c10::InferenceMode inference;
        toy_loss(model, trainer, 50);
      }
      model->zero_grad();
      toy_loss(model, trainer, step).backward();
    });
  });
}

TEST(FsdpMixtures, EvaluatesBetweenForwardAndBackward) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto loss = toy_loss(model, trainer, step);
      {
        const c10::InferenceMode inference;
        toy_loss(model, trainer, 50);
      }
      const auto other = toy_loss(model, trainer, step + 10);
      {
        const at::NoGradGuard no_grad;
        toy_loss(model, trainer, 51);
        model->first->forward(at::ones({1, 8}));
      }
      model->zero_grad();
      loss.backward();
      other.backward();
    });
  });
}

TEST(FsdpMixtures, RetriesForwardsAndBackwardsThatThrew) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 4, [&](int step) {
      if (step == 1) {
        EXPECT_ANY_THROW(model->head->forward(model->first->forward(at::ones({2, 8})).narrow(1, 0, 3)));
      }
      if (step == 2) {
        auto loss = toy_loss(model, trainer, step);
        bool should_throw = true;
        const auto middle = loss * 1;
        auto hidden = model->second->forward(model->first->forward(at::ones({2, 8})));
        hidden.register_hook([&](const at::Tensor&) {
          if (should_throw) throw std::runtime_error("no");
        });
        const auto doomed = middle + hidden.pow(2).mean();
        EXPECT_ANY_THROW(doomed.backward({}, /*retain_graph=*/true));
        model->zero_grad();
        should_throw = false;
        doomed.backward();  // the same graph
        return;
      }
      {
        const auto no_sync = trainer.no_sync();
        toy_loss(model, trainer, step).backward();
      }
      toy_loss(model, trainer, step + 10).backward();
    });
  });
}

// Gradients of earlier backwards go with the one that threw: they may be half added up. That must not be silent.
TEST(FsdpMixtures, TellsThatAThrowDropsWhatWasSetAside) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const Warnings warnings;
    const auto no_sync = root.no_sync();
    loss_of(model, world, 0).backward();
    auto hidden = model->table->forward(batch(world, 1));
    hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("no"); });
    EXPECT_ANY_THROW(model->head->forward(model->blocks[0]->forward(hidden)).sum().backward());
    EXPECT_EQ(warnings.count("no_sync()"), 0);
    loss_of(model, world, 1).backward();
    EXPECT_EQ(warnings.count("no_sync()"), 1);
  });
}

TEST(FsdpMixtures, SeveralForwardsOfDifferentUnitsBeforeOneBackward) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto one = trainer.mean([&](int rank) { return model->first->forward(rows(rank, step)).pow(2).mean(); });
      const auto all = toy_loss(model, trainer, step);
      const auto other =
          trainer.mean([&](int rank) { return model->head->forward(model->second->forward(rows(rank, 7))).sum(); });
      if (step == 1) {
        other.backward({}, /*retain_graph=*/true);
        (one + all).backward();
        other.backward();
      } else {
        (one + all + 0.1 * other).backward();
      }
    });
  });
}

TEST(FsdpMixtures, UnitsRunInOtherOrdersOrNotAtAll) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 6, [&](int step) {
      trainer
          .mean([&](int rank) {
            auto hidden = model->table->forward(tokens(rank, step));
            if (step % 3 != 1) hidden = model->second->forward(hidden);
            if (step % 2 == 0) hidden = model->first->forward(hidden);
            if (step == 5) hidden = model->first->forward(model->second->forward(hidden));
            return model->head->forward(hidden).pow(2).mean();
          })
          .backward();
    });
  });
}

/// Uses its parameters as views, slices, twice, of two units in one operator, through functionals.
struct ViewerImpl : torch::nn::Module {
  ViewerImpl()
      : left(register_module("left", torch::nn::Linear(8, 8))),
        right(register_module("right", torch::nn::Linear(8, 8))),
        scale(register_parameter("scale", at::full({4}, 0.5))) {}
  at::Tensor forward(const at::Tensor& input) {
    namespace F = torch::nn::functional;
    // Both units' parameters in one operator.
    auto hidden = at::addmm(right->bias, input, left->weight.t());
    const auto narrow = left->weight.slice(0, 0, 4).narrow(1, 2, 4);  // 4 x 4
    const auto halves = hidden.chunk(2, 1);
    hidden = at::cat({at::matmul(at::tanh(halves[0]), narrow) * scale, halves[1] * scale.select(0, 1)}, 1);
    const auto both = at::cat({left->weight, right->weight.t()}, 0);  // 16 x 8
    hidden = F::linear(at::tanh(hidden), both, at::cat({left->bias, right->bias}));
    const auto again = F::linear(hidden.narrow(1, 0, 8), left->weight.view({-1}).view({8, 8}), left->bias);
    return again + hidden.narrow(1, 8, 8) * right->weight.sum() + left->weight.unsqueeze(0).expand({1, 8, 8})[0][0];
  }
  torch::nn::Linear left, right;
  at::Tensor scale;
};
TORCH_MODULE(Viewer);

TEST(FsdpMixtures, ViewsOfParametersAndTwoUnitsInOneOperator) {
  for (const int size : {1, 2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        compare(
            world, what, options, [] { return Viewer(); },
            [](Viewer& model, const FullyShardOptions& options) {
              fully_shard(model->left, options);
              fully_shard(model->right, options);
              return fully_shard(model, options);
            },
            [](Viewer& model, Trainer& trainer) {
              steps(model, 4, [&](int step) {
                trainer.mean([&](int rank) { return model->forward(rows(rank, step)).pow(2).mean(); }).backward();
              });
            });
      }
    });
  }
}

// Gradients for the program, not for .grad: local, and nothing else is disturbed.
TEST(FsdpMixtures, GradientsOfInputsAndOfMembersAreThePrograms) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        toy_loss(model, trainer, step).backward();
      }
      auto input = at::ones({2, 8}).requires_grad_();
      const auto loss = model->head->forward(model->first->forward(input)).pow(2).mean();
      const auto gradients = torch::autograd::grad({loss}, {input, model->head->weight}, {}, /*retain_graph=*/true);
      EXPECT_EQ(gradients[1].sizes(), at::IntArrayRef({4, 8}));
      EXPECT_TRUE(gradients[0].abs().sum().item<double>() > 0);
      // Only some of the leaves.
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, {{model->head->weight, input}});
      EXPECT_TRUE(input.grad().allclose(gradients[0]));
      toy_loss(model, trainer, step + 10).backward();
    });
  });
}

// A gradient penalty: gradients of inputs are differentiated, parameters' are not.
TEST(FsdpMixtures, PenaltiesOfInputGradientsTrain) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      trainer
          .mean([&](int rank) {
            auto input = rows(rank, step).requires_grad_();
            const auto output = model->head->forward(model->second->forward(model->first->forward(input))).sum();
            const auto slope = torch::autograd::grad({output}, {input}, {}, true, /*create_graph=*/true)[0];
            return output.pow(2) * 0.01 + slope.pow(2).mean();
          })
          .backward();
    });
  });
}

// A penalty on parameters(): each rank adds the gradient of its shard, which is what the mean over ranks has.
TEST(FsdpMixtures, PenaltiesOfShardsAddToReducedGradients) {
  compare_toys([](Toy& model, Trainer& trainer) {
    const auto penalty = [&] {
      auto sum = at::zeros({});
      for (const auto& parameter : model->parameters()) sum = sum + parameter.pow(2).sum();
      return 0.05 * sum;
    };
    steps(model, 3, [&](int step) {
      if (step < 2) {
        const auto no_sync = trainer.no_sync();
        (toy_loss(model, trainer, step + 20) + penalty()).backward();
        (penalty() + toy_loss(model, trainer, step + 30)).backward();
      }
      (toy_loss(model, trainer, step) + penalty()).backward();
    });
  });
}

/// One element, one row, no row, and integers.
struct OddImpl : torch::nn::Module {
  OddImpl()
      : one(register_parameter("one", at::full({1}, 0.5))),
        row(register_parameter("row", at::linspace(-1, 1, 8).view({1, 8}))),
        none(register_parameter("none", at::zeros({0, 8}))),
        scalar_like(register_parameter("scalar_like", at::full({1, 1, 1}, 2.0))),
        order(register_parameter("order", at::arange(7, -1, -1), /*requires_grad=*/false)) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto all = at::cat({row, none}, 0);
    return (input * one).index_select(1, order) * all * scalar_like[0][0] + at::matmul(input, none.t()).sum();
  }
  at::Tensor one, row, none, scalar_like, order;
};
TORCH_MODULE(Odd);

TEST(FsdpMixtures, ParametersOfOneElementOneRowAndNone) {
  for (const int size : {1, 2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        if (what == "flat" || what == "dim 1") continue;
        compare(
            world, what, options, [] { return Odd(); },
            [](Odd& model, const FullyShardOptions& options) { return fully_shard(model, options); },
            [](Odd& model, Trainer& trainer) {
              steps(model, 3, [&](int step) {
                const auto loss = [&](int rank) { return model->forward(rows(rank, step)).pow(2).mean(); };
                if (step < 2) {
                  const auto no_sync = trainer.no_sync();
                  trainer.mean(loss).backward();
                }
                trainer.mean(loss).backward();
                EXPECT_TRUE(model->named_parameters()["none"].grad().defined());
              });
            });
      }
    });
  }
}

template <at::ScalarType kDtype>
struct TypedImpl : torch::nn::Module {
  TypedImpl()
      : weight(register_parameter("weight", at::randn({8, 8}, kDtype) * 0.3)),
        frozen(register_parameter("frozen", at::randn({8}, at::kFloat), /*requires_grad=*/false)) {}
  at::Tensor forward(const at::Tensor& input) { return at::matmul(input.to(kDtype), weight) * frozen; }
  at::Tensor weight, frozen;
};

template <at::ScalarType kDtype>
void train_typed() {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (auto& [what, options] : all_ways(world)) {
      if (what == "flat") continue;
      compare(
          world, what, options, [] { return std::make_shared<TypedImpl<kDtype>>(); },
          [](auto& model, const FullyShardOptions& options) { return fully_shard(*model, options); },
          [](auto& model, Trainer& trainer) {
            steps(model, 3, [&](int step) {
              const auto loss = [&](int rank) { return at::abs(model->forward(rows(rank, step))).pow(2).mean(); };
              {
                const auto no_sync = trainer.no_sync();
                trainer.mean(loss).backward();
              }
              if (step == 2) model->named_parameters()["frozen"].set_requires_grad(true);  // of another dtype
              trainer.mean(loss).backward();
              if (trainer.root) {
                trainer.root->clip_grad_norm_(0.5);
              } else {
                clip_grad_norm_(model->parameters(), 0.5);
              }
            });
          });
    }
  });
}

TEST(FsdpMixtures, DoubleAndComplexParameters) {
  train_typed<at::kDouble>();
  train_typed<at::kComplexFloat>();
}

TEST(FsdpMixtures, FrozenBetweenForwardAndBackward) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (const auto& [what, options] : all_ways(world)) {
      if (what == "flat") continue;
      compare(
          world, what, options, [] { return Toy(); }, shard_toy,
          [](Toy& model, Trainer& trainer) {
            steps(model, 4, [&](int step) {
              const auto loss = toy_loss(model, trainer, step);
              for (const auto* name : {"head.weight", "table.weight", "first.up.weight"}) {
                model->named_parameters()[name].set_requires_grad(step % 2 == 0);
              }
              loss.backward();
              EXPECT_EQ(model->named_parameters()["head.weight"].grad().defined(), step % 2 == 0) << step;
              for (auto& parameter : model->parameters()) parameter.set_requires_grad(true);
            });
          });
    }
  });
}

// The member is what C++ programs have at hand: freezing it means the parameter.
TEST(FsdpMixtures, MembersCanBeFrozenAndThawed) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (auto& [what, options] : all_ways(world)) {
      if (what == "flat") continue;
      compare(
          world, what, options, [] { return Toy(); }, shard_toy,
          [](Toy& model, Trainer& trainer) {
            steps(model, 4, [&](int step) {
              for (auto& weight : {model->head->weight, model->first->up->weight, model->table->weight}) {
                weight.set_requires_grad(step % 2 == 1);
              }
              toy_loss(model, trainer, step).backward();
              EXPECT_EQ(model->named_parameters()["head.weight"].grad().defined(), step % 2 == 1);
            });
          });
    }
    auto flat = built_from_seed([] { return Toy(); });
    shard_toy(flat, {.mesh = mesh_of(world), .use_orig_params = false});
    flat->head->weight.set_requires_grad(false);
    expect_error([&] { flat->forward(tokens(0, 0)); }, {"head.weight", "flat"});
  });
}

TEST(FsdpMixtures, TwoModelsUnderOneLossAndOneInsideOfAPlainOne) {
  struct PairImpl : torch::nn::Module {
    PairImpl()
        : one(register_module("one", Toy())),
          two(register_module("two", Toy())),
          plain(register_module("plain", torch::nn::Linear(4, 4))) {}
    Toy one, two;
    torch::nn::Linear plain;
  };
  for (const int size : {2}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        compare(
            world, what, options, [] { return std::make_shared<PairImpl>(); },
            [](auto& model, const FullyShardOptions& options) {
              auto other = options;
              other.reshard_after_forward = std::nullopt;
              shard_toy(model->two, other);
              return shard_toy(model->one, options);
            },
            [&](auto& model, Trainer& trainer) {
              for (auto& parameter : model->plain->parameters()) parameter.set_requires_grad(false);
              steps(model, 3, [&](int step) {
                const auto loss = [&](int rank) {
                  const auto left = model->one->forward(tokens(rank, step));
                  const auto right = model->two->forward(tokens(rank, step + 1));
                  return (model->plain->forward(left) * right).pow(2).mean();
                };
                trainer.mean(loss).backward();
                // One after the other, of two graphs.
                const auto first = trainer.mean(loss);
                const auto second = toy_loss(model->two, trainer, step + 5);
                second.backward();
                first.backward();
              });
            });
      }
    });
  }
}

TEST(FsdpMixtures, TwoGroupsWithOneModelEach) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"outer", "inner"}});
    for (const auto* axis : {"outer", "inner"}) {
      auto model = built_from_seed([] { return Toy(); });
      auto whole = built_from_seed([] { return Toy(); });
      auto other = built_from_seed([] { return Toy(); });
      Trainer trainer{.size = 2, .rank = mesh[axis].get_local_rank(), .root = shard_toy(model, {.mesh = mesh[axis]})};
      shard_toy(other, {.mesh = mesh_of(world)});
      Trainer alone{.size = 2};
      SGD optimizer(model->parameters(), SGDOptions(0.1));
      SGD plain(whole->parameters(), SGDOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        plain.zero_grad();
        const auto beside = other->forward(tokens(world.rank(), step)).sum();
        (toy_loss(model, trainer, step) + beside * 0).backward();
        toy_loss(whole, alone, step).backward();
        optimizer.step();
        plain.step();
      }
      expect_whole_state(*model, *whole, axis, 2e-5);
    }
  });
}

TEST(FsdpMixtures, OptimizersWithGroupsDecayClosuresAndZeros) {
  compare_toys([](Toy& model, Trainer& trainer) {
    std::vector<at::Tensor> decayed;
    std::vector<at::Tensor> others;
    for (const auto& item : model->named_parameters()) {
      (item.key().starts_with("first.") ? decayed : others).push_back(item.value());
    }
    AdamW optimizer({{decayed, std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.5))},
                     {others, std::make_unique<AdamWOptions>(AdamWOptions(1e-3).amsgrad(true))}});
    for (int step = 0; step < 4; ++step) {
      optimizer.step([&] {
        const at::AutoGradMode with_grad(true);
        optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
        auto loss = toy_loss(model, trainer, step);
        loss.backward();
        return loss;
      });
    }
  });
}

// Dot products of shards are this rank's: directions would differ by rank.
TEST(FsdpMixtures, OptimizersThatNeedWholeVectorsAreRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const torch::optim::LBFGS optimizer(model->parameters(), torch::optim::LBFGSOptions());
    expect_error([&] { check_optimizer(*model, optimizer); }, {"LBFGS", "shards"});
  });
}

// libtorch's own function sees this rank's shards only: the norm, and so the step, would differ by rank.
TEST(FsdpMixtures, LibtorchsClippingOfShardsIsRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    std::vector<at::Tensor> before;
    for (const auto& parameter : model->parameters()) before.push_back(parameter.grad().clone());
    for (const double order : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
      expect_error([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 0.1, order); },
                   {"lockstep::clip_grad_norm_", "shard"});
    }
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(model->parameters()[i].grad().equal(before[i]));
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    loss_of(ddp, world, 0).backward();
    for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_NEAR(root.clip_grad_norm_(0.1, order).item<double>(),
                  torch::nn::utils::clip_grad_norm_(ddp.parameters(), 0.1, order), 1e-6);
    }
    // By value every element is on its own.
    torch::nn::utils::clip_grad_value_(model->parameters(), 1e-3);
  });
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, world, 0).backward();
    EXPECT_GT(torch::nn::utils::clip_grad_norm_(model->parameters(), 0.1), 0);
  });
}

/// Its parameter gets its gradient in backward before any operator touches it.
struct ShiftedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return at::tanh(input) + shift; }
  at::Tensor shift = register_parameter("shift", at::arange(8, at::kFloat));
};
TORCH_MODULE(Shifted);

// FSDP-13
TEST(FsdpMixtures, OptimizersOfMembersAreToldInTheirFirstStep) {
  for (const int size : {1, 2}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        auto model = built_from_seed([] { return Toy(); });
        const std::vector<at::Tensor> members{model->head->weight, model->first->up->bias};
        SGD before(model->parameters(), SGDOptions(0.1));
        shard_toy(model, options);
        SGD plain(members, SGDOptions(0.1).momentum(0.9));
        AdamW adam(members, AdamWOptions(0.1));
        SGD right(model->parameters(), SGDOptions(0.1));
        const Trainer trainer{.size = world.world_size(), .rank = world.rank()};
        for (int step = 0; step < 2; ++step) {
          toy_loss(model, trainer, step).backward();
          {
            const c10::InferenceMode evaluation;
            toy_loss(model, trainer, 50);
          }
          expect_error([&] { plain.step(); }, {"'head.weight'", "parameters()"});
          expect_error([&] { adam.step(); }, {"'head.weight'", "parameters()"});
          expect_error([&] { before.step(); }, {"'", "parameters()"});
          expect_error([&] { plain.zero_grad(/*set_to_none=*/false); }, {"'head.weight'"});
          right.step();
          right.zero_grad();
        }
      }
    });
  }
}

// FSDP-39
TEST(FsdpMixtures, GradientsArriveBeforeAnyOperatorTouchesTheirParameter) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (auto& [what, options] : all_ways(world)) {
      compare(
          world, what, options, [] { return Shifted(); },
          [](Shifted& model, const FullyShardOptions& options) { return fully_shard(model, options); },
          [](Shifted& model, Trainer& trainer) {
            steps(model, 3, [&](int step) {
              const auto loss = trainer.mean([&](int rank) { return model->forward(rows(rank, step)).pow(2).mean(); });
              loss.backward({}, /*retain_graph=*/true);
              loss.backward();
            });
          });
    }
  });
}

TEST(FsdpMixtures, ScalersAccumulateAndSkip) {
  compare_toys([](Toy& model, Trainer& trainer) {
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2));
    GradScaler scaler({.device = at::kCPU, .init_scale = 256, .growth_interval = 2});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto bad = step == 1 ? std::numeric_limits<float>::infinity() : 1.0F;
      {
        const auto no_sync = trainer.no_sync();
        scaler.scale(toy_loss(model, trainer, step)).backward();
      }
      const auto loss = trainer.mean(
          [&](int rank) { return model->forward(tokens(rank, step)).pow(2).mean() * (rank == 0 ? bad : 1.0F); });
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      clip_grad_norm_(model->parameters(), 0.5);
      scaler.step(optimizer);
      scaler.update();
    }
  });
}

TEST(FsdpMixtures, AveragesOfParametersAreSwappedInForEvaluation) {
  compare_toys([](Toy& model, Trainer& trainer) {
    std::vector<at::Tensor> average;
    for (const auto& parameter : model->parameters()) average.push_back(parameter.detach().clone());
    steps(model, 4, [&](int step) {
      {
        const at::NoGradGuard no_grad;
        const auto parameters = model->parameters();
        for (std::size_t i = 0; i < average.size(); ++i) average[i].lerp_(parameters[i], 0.5);
        std::vector<at::Tensor> trained;
        for (std::size_t i = 0; i < average.size(); ++i) {
          trained.push_back(parameters[i].detach().clone());
          step % 2 == 0 ? static_cast<void>(parameters[i].copy_(average[i]))
                        : parameters[i].set_data(average[i].clone());
        }
        toy_loss(model, trainer, 50);
        for (std::size_t i = 0; i < average.size(); ++i) parameters[i].set_data(trained[i]);
      }
      toy_loss(model, trainer, step).backward();
    });
    // The average itself.
    const auto parameters = model->parameters();
    const auto vector = torch::nn::utils::parameters_to_vector(average);
    torch::nn::utils::vector_to_parameters(vector, parameters);
  });
}

TEST(FsdpMixtures, HooksOfMembersSeeLocalGradients) {
  compare_toys([](Toy& model, Trainer& trainer) {
    int calls = 0;
    model->head->weight.register_hook([&](const at::Tensor& grad) {
      ++calls;
      return grad * 3;
    });
    model->first->up->bias.register_hook([&](const at::Tensor& grad) { return grad + 0.25; });
    steps(model, 3, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        toy_loss(model, trainer, step).backward();
      }
      toy_loss(model, trainer, step + 10).backward();
      EXPECT_TRUE(model->parameters()[0].grad().defined());
    });
    EXPECT_EQ(calls, 6);
  });
}

/// Makes a tensor of its parameter in every forward, and keeps it in a member.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : direction(register_parameter("direction", at::randn({8, 8}))),
        length(register_parameter("length", at::ones({8, 1}))) {}
  at::Tensor forward(const at::Tensor& input) {
    weight = direction * (length / direction.norm(2, 1, /*keepdim=*/true));
    return at::matmul(input, weight);
  }
  at::Tensor direction, length, weight;
};
TORCH_MODULE(Normed);

TEST(FsdpMixtures, ModulesThatComputeTheirMembers) {
  for (const int size : {2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        if (what == "dim 1") continue;
        compare(
            world, what, options, [] { return Normed(); },
            [](Normed& model, const FullyShardOptions& options) { return fully_shard(model, options); },
            [](Normed& model, Trainer& trainer) {
              steps(model, 3, [&](int step) {
                trainer.mean([&](int rank) { return model->forward(rows(rank, step)).pow(2).mean(); }).backward();
              });
            });
      }
    });
  }
}

// Their gradients would be each rank's own.
TEST(FsdpMixtures, RefusesParametersThatAreRegisteredLater) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    auto late = model->register_parameter("late", at::ones({3}));
    expect_error([&] { (model->forward(batch(world, 0)) * late).pow(2).mean().backward(); },
                 {"'late'", "after fully_shard()"});
    late.set_requires_grad(false);
    model->zero_grad();
    (model->forward(batch(world, 0)) * late).pow(2).mean().backward();
    // Those that are ignored are known.
    auto other = net();
    sharded(other, {.mesh = mesh_of(world), .ignored_params = {other->head->bias}});
    loss_of(other, world, 0).backward();
  });
}

// In a forward, parameters() are shards: of one row they would be broadcast in silence.
TEST(FsdpMixtures, TellsOfForwardsThatReadShards) {
  struct ByNameImpl : torch::nn::Module {
    explicit ByNameImpl(bool has_member) {
      auto registered = register_parameter("scale", at::full({2}, 0.5));
      if (has_member) scale = registered;
    }
    at::Tensor forward(const at::Tensor& input) { return input * named_parameters()["scale"]; }
    at::Tensor scale;
  };
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    expect_error([&] { fully_shard(*std::make_shared<ByNameImpl>(false), {.mesh = mesh_of(world)}); },
                 {"'scale'", "register only", "in a member"});
    torch::nn::ParameterList list;
    list->append(at::ones({2}));
    expect_error([&] { fully_shard(list, {.mesh = mesh_of(world)}); }, {"register only"});
    auto model = std::make_shared<ByNameImpl>(true);
    fully_shard(*model, {.mesh = mesh_of(world)});
    const Warnings warnings;
    for (const auto& parameter : model->parameters()) parameter.detach().clone();
    model->to(at::kDouble);
    at::tanh(model->scale);  // so that they are taken back
    EXPECT_EQ(warnings.count("shard"), 0);
    model->forward(at::ones({3, 2})).sum().backward();
    EXPECT_EQ(warnings.count("reads the shard"), 1);
  });
}

// A view from before keeps the memory from before.
TEST(FsdpMixtures, WarnsOfViewsFromBeforeSharding) {
  struct CachedImpl : torch::nn::Module {
    CachedImpl() : weight(register_parameter("weight", at::ones({4, 4}))), turned(weight.t()) {}
    at::Tensor forward(const at::Tensor& input) { return at::matmul(input, turned); }
    at::Tensor weight, turned;
  };
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = std::make_shared<CachedImpl>();
    const Warnings warnings;
    fully_shard(*model, {.mesh = mesh_of(world)});
    EXPECT_EQ(warnings.count("'weight' shares its memory"), 1);
    auto clean = net();
    sharded(clean, {.mesh = mesh_of(world)});
    EXPECT_EQ(warnings.count("shares its memory"), 1);
  });
}

TEST(FsdpMixtures, WeightedBackwardsThatWereZeroedBlockNothing) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    {
      const auto no_sync = root.no_sync();
      root.backward(loss_of(model, world, 0), 3 + world.rank());
    }
    model->zero_grad();
    loss_of(model, world, 1).backward();
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    loss_of(ddp, world, 1).backward();
    const auto expected = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(layout_of(item.value())->cut(expected[item.key()].grad()).equal(item.value().grad())) << item.key();
    }
    root.backward(loss_of(model, world, 1), 1 + world.rank());
    loss_of(model, world, 1).backward();
  });
}

// FSDP-64
TEST(FsdpMixtures, ZeroingDropsReductionsThatWait) {
  compare_toys([](Toy& model, Trainer& trainer) {
    const auto is_last = [&](bool last) {
      if (trainer.root) trainer.root->set_is_last_backward(last);
    };
    // Of all parameters, and of some that the last backward does not use.
    for (const bool is_whole : {true, false}) {
      for (const bool sets_to_none : {true, false}) {
        is_last(false);
        toy_loss(model, trainer, 0).backward();
        model->zero_grad(sets_to_none);
        const auto head = [&](int step) {
          return trainer.mean([&](int rank) { return model->head->forward(rows(rank, step)).pow(2).mean(); });
        };
        head(2).backward();
        head(3).backward();
        is_last(true);
        (is_whole ? toy_loss(model, trainer, 1) : head(1)).backward();
        SGD(model->parameters(), SGDOptions(0.1)).step();
        model->zero_grad();
      }
    }
  });
}

TEST(FsdpMixtures, WeightedAndPlainBackwardsMix) {
  compare_toys([](Toy& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto weight = [](int rank) { return 1.0 + rank; };
      if (trainer.root) {
        trainer.root->backward(toy_loss(model, trainer, step), weight(*trainer.rank));
      } else {
        double all = 0;
        auto sum = at::zeros({});
        for (int rank = 0; rank < trainer.size; ++rank) {
          sum = sum + weight(rank) * model->forward(tokens(rank, step)).pow(2).mean();
          all += weight(rank);
        }
        (sum / all).backward();
      }
      toy_loss(model, trainer, step + 10).backward();
    });
  });
}

TEST(FsdpMixtures, ThreadsOfOneRankMayRunForwards) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    auto model = built_from_seed([] { return Toy(); });
    auto plain = built_from_seed([] { return Toy(); });
    shard_toy(model, {.mesh = mesh_of(world), .force_sharding = true});
    std::vector<at::Tensor> losses(4);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { losses[i] = model->forward(tokens(i, 0)).pow(2).mean(); });
    }
    for (auto& thread : threads) thread.join();
    at::stack(losses).sum().backward();
    for (int i = 0; i < 4; ++i) plain->forward(tokens(i, 0)).pow(2).mean().backward();
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(at::allclose(model->named_parameters()[item.key()].grad(), item.value().grad(), 1e-5, 1e-6));
    }
  });
}

TEST(FsdpMixtures, GraphsMayOutliveTheirModel) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (auto& [what, options] : all_ways(world)) {
      auto input = at::ones({2, 8}).requires_grad_();
      at::Tensor loss;
      at::Tensor unused;
      at::Tensor shard;
      {
        auto model = built_from_seed([] { return Toy(); });
        auto root = shard_toy(model, options);
        loss = model->head->forward(model->first->forward(input)).pow(2).mean();
        unused = toy_loss(model, {.size = 2, .rank = world.rank()}, 0);
        shard = model->parameters()[0];
        const auto no_sync = root.no_sync();
        toy_loss(model, {.size = 2, .rank = world.rank()}, 1).backward();
      }
      loss.backward();
      auto plain = built_from_seed([] { return Toy(); });
      auto same = at::ones({2, 8}).requires_grad_();
      plain->head->forward(plain->first->forward(same)).pow(2).mean().backward();
      EXPECT_TRUE(input.grad().allclose(same.grad())) << what;
      unused.reset();
    }
  });
}

TEST(FsdpMixtures, RecurrentLayersTrainAndAreCast) {
  for (const int size : {2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, options] : all_ways(world)) {
        compare(
            world, what, options,
            [] { return torch::nn::LSTM(torch::nn::LSTMOptions(8, 4).num_layers(2).batch_first(true)); },
            [](auto& model, const FullyShardOptions& options) { return fully_shard(model, options); },
            [&, flat = !options.use_orig_params](auto& model, Trainer& trainer) {
              const auto run = [&](int step) {
                const auto dtype = model->parameters()[0].scalar_type();
                const auto loss = [&](int rank) {
                  return std::get<0>(model->forward(rows(rank, step).unsqueeze(0).to(dtype))).pow(2).mean();
                };
                trainer.mean(loss).backward();
              };
              steps(model, 2, run);
              if (flat) return;
              model->zero_grad();
              for (auto& parameter : model->parameters()) parameter.set_data(parameter.data() * 0.5);
              steps(model, 2, run);
            });
      }
    });
  }
}

// LSTM::to() takes its weights from the register, which holds shards, and drops those it computed with.
TEST(FsdpMixtures, RecurrentLayersThatWereCastAreToldWhyTheyDoNotRun) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    struct ReaderImpl : torch::nn::Module {
      ReaderImpl() : torch::nn::Module("Reader") {}
      at::Tensor forward(const at::Tensor& input) { return std::get<0>(gru->forward(norm->forward(input))); }
      torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
      torch::nn::GRU gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(8, 4).batch_first(true)));
    };
    const auto input = [&](at::ScalarType dtype) { return rows(0, 0).unsqueeze(0).to(dtype); };
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      auto model = built_from_seed([] { return torch::nn::LSTM(torch::nn::LSTMOptions(8, 4).batch_first(true)); });
      fully_shard(model, {.mesh = mesh_of(world)});
      model->forward(input(at::kFloat));
      model->to(dtype);
      expect_error([&] { model->forward(input(dtype)); }, {"'weight_ih_l0'", "to()", "before fully_shard()"});
      // Not alone in its unit.
      auto reader = built_from_seed([] { return std::make_shared<ReaderImpl>(); });
      fully_shard(*reader, {.mesh = mesh_of(world)});
      reader->to(dtype);
      expect_error([&] { reader->forward(input(dtype)); }, {"'gru.weight_ih_l0'", "before fully_shard()"});
    }
  });
}

/// As DDP of the same precision would be too much to ask: beside one process in float, roughly.
TEST(FsdpMixtures, LowPrecisionWithEverything) {
  for (const int size : {2, 4}) {
    testing::run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (auto& [what, given] : all_ways(world)) {
        auto options = given;
        options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat};
        compare(
            world, what, options, [] { return Toy(); }, shard_toy,
            [](Toy& model, Trainer& trainer) {
              steps(model, 3, [&](int step) {
                {
                  const auto no_sync = trainer.no_sync();
                  toy_loss(model, trainer, step).backward();
                  const c10::InferenceMode inference;
                  toy_loss(model, trainer, 50);
                }
                const auto loss = toy_loss(model, trainer, step + 10);
                const auto part =
                    trainer.mean([&](int rank) { return at::matmul(rows(rank, step), model->head->weight.t()).sum(); });
                (loss + 0.01 * part).backward({}, /*retain_graph=*/true);
                loss.backward();
              });
            },
            0.03);
      }
    });
  }
}

TEST(FsdpMixtures, AutocastTrainsAsDdpDoes) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    expect_parity(world, [&](auto& model, SGD& optimizer) {
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        at::Tensor loss;
        {
          at::autocast::increment_nesting();
          at::autocast::set_autocast_enabled(at::kCPU, true);
          loss = loss_of(model, world, step);
          at::autocast::set_autocast_enabled(at::kCPU, false);
          if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        }
        loss.backward();
        optimizer.step();
      }
    });
  });
}

TEST(FsdpMixtures, JoinMayThrowWhenARankRunsOut) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    SGD plain(ddp.parameters(), SGDOptions(0.1));
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    FsdpJoinable joinable(root);
    const auto train = [&](auto& net, SGD& with, int step) {
      with.zero_grad();
      loss_of(net, world, step).backward();
      with.step();
    };
    EXPECT_ANY_THROW(Join({&joinable}, {.throw_on_early_termination = true}).run([&] {
      for (int step = 0; step < 1 + world.rank(); ++step) train(model, optimizer, step);
    }));
    train(ddp, plain, 0);
    for (int step = 5; step < 7; ++step) {
      train(model, optimizer, step);
      train(ddp, plain, step);
    }
    expect_same_parameters(*model, *ddp.module(), "after a thrown Join");
  });
}

// A check of the loss before sharding leaves gradients: they are the shards' now, and zeroed with them.
TEST(FsdpMixtures, GradientsFromBeforeShardingAreTheShards) {
  for (const bool is_zeroed : {false, true}) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      for (const auto& [what, options] : all_ways(world)) {
        const auto early = [](Toy& model) { model->forward(tokens(0, 90)).pow(2).mean().backward(); };
        const auto shard = [&](Toy& model, const FullyShardOptions& options) {
          early(model);
          return shard_toy(model, options);
        };
        compare(
            world, what, options, [] { return Toy(); }, shard,
            [&](Toy& model, Trainer& trainer) {
              if (!trainer.root) early(model);
              if (is_zeroed) model->zero_grad();
              toy_loss(model, trainer, 0).backward();
              SGD(model->parameters(), SGDOptions(0.1)).step();
            });
      }
    });
  }
}

// Parameters put into a flat buffer after sharding: the unit has its own, and steps on that one are lost.
TEST(FsdpMixtures, WarnsOfShardsInMemoryThatOthersShare) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    const Warnings warnings;
    auto weight = model->named_parameters()["head.weight"];
    weight.set_data(weight.detach().clone());
    loss_of(model, world, 0);
    EXPECT_EQ(warnings.count("memory that other tensors share"), 0);
    const auto flat = weight.detach().clone().view({-1});
    weight.set_data(flat.view(weight.sizes()));
    loss_of(model, world, 0);
    EXPECT_EQ(warnings.count("'head.weight' was given memory that other tensors share"), 1);
  });
}

// A unit that is still whole is gathered anew on all ranks, though one of them had nothing to write.
TEST(FsdpMixtures, ARankWithNothingToWriteSeesThatOthersWrote) {
  testing::run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    torch::nn::Linear layer(4, 2);
    fully_shard(layer, {.mesh = mesh_of(world), .reshard_after_forward = false});
    layer->forward(at::ones({1, 4}));
    {
      const at::NoGradGuard no_grad;
      for (auto& shard : layer->parameters()) shard.fill_(3);
    }
    EXPECT_EQ(layer->forward(at::ones({1, 4})).sum().item<double>(), 30);
  });
}

}  // namespace lockstep::fsdp_mixtures_test
