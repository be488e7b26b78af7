// Programs that mix what is newer in FSDP (parameters shared on one host, ragged shards, kept parts, precision of
// evaluations, hooks with streams, refused gradients, checkpoints) with whatever else training code does, each beside
// one process that has every rank's data, or beside the same program without the feature. They mean most with
// LOCKSTEP_SHARE_AMONG_THREADS=1, where rank threads share as processes of one host do.
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "lockstep/fsdp/join.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/intercept/deferred_init.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/fsdp_programs.h"

namespace lockstep::fsdp_newer_mixtures_test {

using namespace fsdp_programs;
using namespace std::chrono_literals;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

/// Ranks are threads here and share the default generator.
CheckpointOptions no_generators(CheckpointPolicyFn policy = {}) {
  return {.preserve_rng_state = false, .policy = std::move(policy)};
}

/// Which activations are kept.
enum class Saves { kAll, kNone, kProducts, kNested };

constexpr int64_t kWidth = 32;  // half of a layer is a page

struct DeepImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    const auto hidden = table->forward(input);
    if (saves != Saves::kNested) return head->forward(run(second, run(first, hidden)));
    const auto both = [this](const at::Tensor& in) { return run(second, run(first, in)); };
    return head->forward(checkpoint(no_generators(), both, hidden));
  }
  at::Tensor run(const Block& block, const at::Tensor& input) {
    const auto once = [this, module = block.ptr()](const at::Tensor& in) {
      auto out = module->forward(in);
      if (is_broken) throw std::runtime_error("broken");
      return at::tanh(out);
    };
    if (saves == Saves::kAll) return once(input);
    return checkpoint(no_generators(saves == Saves::kProducts ? save_operators({"aten::addmm"}) : CheckpointPolicyFn()),
                      once, input);
  }

  Saves saves = Saves::kAll;
  bool is_broken = false;
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(12, kWidth));
  Block first = register_module("first", Block(kWidth));
  Block second = register_module("second", Block(kWidth));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, 7));
};
TORCH_MODULE(Deep);

Deep deep(Saves saves = Saves::kAll) {
  auto model = built_from_seed([] { return Deep(); });
  model->saves = saves;
  return model;
}

FsdpUnit shard_deep(Deep& model, const FullyShardOptions& options) {
  fully_shard(model->first, options);
  fully_shard(model->second, options);
  return fully_shard(model, options);
}

at::Tensor rows(int rank, int step, int64_t width = kWidth) {
  return random_batch(3, width, static_cast<uint64_t>(100 * step + rank + 1));
}

at::Tensor loss_at(Deep& model, const Trainer& trainer, int step) {
  return trainer.mean([&](int rank) { return model->forward(tokens(rank, step)).pow(2).mean(); });
}

void evaluate(Deep& model, const Trainer& trainer, int step = 50) {
  const c10::InferenceMode inference;
  loss_at(model, trainer, step);
}

struct Way {
  std::string what;
  FullyShardOptions options;
  Saves saves = Saves::kAll;
};

/// One row on the first rank, none on the last of more than two, the rest on the second.
FullyShardOptions ragged(FullyShardOptions options) {
  const auto ranks = options.mesh->size(options.mesh->ndim() - 1);
  options.shard_placement_fn = [ranks](const std::string& name, const at::Tensor& parameter) {
    std::vector<int64_t> counts(static_cast<std::size_t>(ranks));
    counts.front() = std::min<int64_t>(1, parameter.size(0));
    counts[1] = parameter.size(0) - counts.front();
    return name.ends_with("down.bias") ? std::nullopt : std::optional(ShardPlacement{.rows = counts});
  };
  return options;
}

FullyShardOptions balanced(FullyShardOptions options) {
  options.balance = std::make_shared<ShardBalance>();
  return options;
}

DeviceMesh hybrid_mesh() {
  return init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
}

std::vector<Way> ways_of(const World& world) {
  const auto mesh = mesh_of(world);
  if (world.world_size() == 3) {
    return {{"ragged", ragged({.mesh = mesh})},
            {"balanced", balanced({.mesh = mesh, .reshard_after_forward = true}), Saves::kNested}};
  }
  if (world.world_size() == 4) {
    return {{"parts", ragged({.mesh = mesh, .reshard_after_forward = 2, .keep_parts = true}), Saves::kNone},
            {"hybrid", ragged({.mesh = hybrid_mesh()}), Saves::kProducts}};
  }
  const auto second_dim = [](const std::string&, const at::Tensor& parameter) -> std::optional<ShardPlacement> {
    return parameter.dim() < 2 ? std::nullopt : std::optional(ShardPlacement{.dim = 1});
  };
  return {{"unset", {.mesh = mesh}},
          {"freed", {.mesh = mesh, .reshard_after_forward = true}, Saves::kNone},
          {"dim 1", {.mesh = mesh, .reshard_after_forward = false, .shard_placement_fn = second_dim}, Saves::kProducts},
          {"flat", {.mesh = mesh, .use_orig_params = false}, Saves::kNested}};
}

/// Ranks that compute with one thread each: what they compute is small, and there are many.
void on_ranks(int size, const testing::RankBody& body) {
  const auto before = at::get_num_threads();
  at::set_num_threads(1);  // of the process: ranks take it over when they begin
  testing::run_threads_in_gtest({.world_size = size, .timeout = 60s, .collective_timeout = 20s}, body);
  at::set_num_threads(before);
}

/// What `program(model, trainer)` makes of `model` in one process, with the data of `size` ranks.
template <class Model, class Program>
Model trained_alone(Model model, int size, const Program& program) {
  Trainer alone{.size = size};
  on_ranks(1, [&](const World&) { program(model, alone); });
  return model;
}

/// Runs `program(model, trainer)` sharded by `shard(model, options)`; expects the parameters of `plain`.
template <class Model, class ShardModel, class Program>
void expect_same(const World& world, const Way& way, const Model& plain, Model model, const ShardModel& shard,
                 const Program& program, double tolerance = 5e-5) {
  SCOPED_TRACE(way.what);
  Trainer trainer{.size = world.world_size(), .rank = world.rank(), .root = shard(model, way.options)};
  program(model, trainer);
  expect_whole_state(*model, *plain, way.what, tolerance);
}

/// Runs it in one process, and sharded in all ways.
template <class Program>
void compare_deep(const Program& program, const std::vector<int>& sizes = {2, 4}, double tolerance = 5e-5,
                  const std::function<void(Way&)>& change = {}) {
  for (const int size : sizes) {
    const auto plain = trained_alone(deep(), size, program);
    on_ranks(size, [&](const World& world) {
      for (auto& way : ways_of(world)) {
        if (change) change(way);
        expect_same(world, way, plain, deep(way.saves), shard_deep, program, tolerance);
      }
    });
  }
}

template <class Backward>
void steps(auto& model, int count, const Backward& backward) {
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < count; ++step) {
    optimizer.zero_grad();
    backward(step);
    optimizer.step();
  }
}

/// Bits of the shards.
std::vector<at::Tensor> shards_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> shards;
  for (const auto& shard : model.parameters()) shards.push_back(shard.detach().clone());
  return shards;
}

TEST(FsdpNewerMixtures, AccumulatesAcrossALoadAndAnEvaluation) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        loss_at(model, trainer, step).backward();
        evaluate(model, trainer);
        const at::NoGradGuard no_grad;
        auto state = full_state_dict(*model);
        for (auto& [name, tensor] : state) tensor.mul_(0.9);
        load_full_state_dict(*model, state);
      }
      loss_at(model, trainer, step + 10).backward();
    });
  });
}

// Only the rank that has the row writes to its shard: parts that were kept are out of date on all of them.
TEST(FsdpNewerMixtures, ASummonChangesOneRowInTheMiddleOfAnAccumulation) {
  compare_deep([](Deep& model, Trainer& trainer) {
    const auto change_row = [&](int step) {
      std::unique_ptr<SummonGuard> scope;
      if (trainer.root) scope.reset(new SummonGuard(trainer.root->summon_full_params()));
      const at::NoGradGuard no_grad;
      model->first->up->weight.select(0, 0).fill_(0.01 * (step + 1));
    };
    steps(model, 2, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        loss_at(model, trainer, step).backward();
        change_row(step);
        evaluate(model, trainer);
        change_row(step + 1);
      }
      loss_at(model, trainer, step + 10).backward();
    });
  });
}

// What is loaded may be of one rank's part of a flat parameter; units that are whole are out of date on all of them.
TEST(FsdpNewerMixtures, LoadsSomeNamesBetweenEvaluations) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        steps(model, 2, [&](int step) {
          for (const auto* name : {"head.bias", "table.weight", "first.norm.weight"}) {
            evaluate(model, trainer);
            const auto value = std::string(name) == "table.weight" ? at::full({12, kWidth}, 0.1 * (step + 1))
                               : std::string(name) == "head.bias"  ? at::full({7}, 0.2 * (step + 1))
                                                                   : at::full({kWidth}, 0.9);
            load_full_state_dict(*model, {{name, value}}, {.strict = false});
          }
          evaluate(model, trainer);
          loss_at(model, trainer, step).backward();
        });
      },
      {2, 3, 4});
}

// The trained values stay where they were while others are swapped in: parameter.data() is no copy.
TEST(FsdpNewerMixtures, AveragesAreSwappedInAndOutWithoutCopies) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        std::vector<at::Tensor> average;
        for (const auto& parameter : model->parameters()) average.push_back(parameter.detach().clone());
        steps(model, 3, [&](int step) {
          {
            const at::NoGradGuard no_grad;
            const auto parameters = model->parameters();
            std::vector<at::Tensor> trained;
            for (std::size_t i = 0; i < average.size(); ++i) {
              average[i].lerp_(parameters[i], 0.5);
              trained.push_back(parameters[i].data());
              parameters[i].set_data(average[i]);
            }
            evaluate(model, trainer);
            for (std::size_t i = 0; i < average.size(); ++i) parameters[i].set_data(trained[i]);
            if (step == 1) evaluate(model, trainer);
          }
          loss_at(model, trainer, step).backward();
        });
      },
      {2, 3, 4});
}

// Between forward and backward a change is refused, also if another forward has gathered the new values since.
TEST(FsdpNewerMixtures, GraphsFromBeforeAStepAreRefused) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](const World& world) {
      for (const auto& way : ways_of(world)) {
        SCOPED_TRACE(way.what);
        for (const int kind : {0, 1, 2}) {
          auto model = deep(way.saves);
          Trainer trainer{.size = size, .rank = world.rank(), .root = shard_deep(model, way.options)};
          const auto loss = loss_at(model, trainer, 0);
          if (kind == 0) loss.backward({}, /*retain_graph=*/true);
          {
            const at::NoGradGuard no_grad;
            for (auto& shard : model->parameters()) shard.mul_(0.5);
          }
          if (kind == 1) evaluate(model, trainer);
          if (kind == 2) loss_at(model, trainer, 1);
          EXPECT_ANY_THROW(loss.backward()) << kind;
        }
      }
    });
  }
}

FullyShardOptions low_precision(FullyShardOptions options, bool is_full_in_eval) {
  options.mp_policy = {.param_dtype = at::kBFloat16,
                       .reduce_dtype = at::kFloat,
                       .output_dtype = at::kFloat,
                       .full_precision_in_eval = is_full_in_eval};
  return options;
}

// What runs again is in the precision of its forward, whatever the module's mode is by then.
TEST(FsdpNewerMixtures, ModelsAreSwitchedToEvaluationBeforeABackwardThatRunsThemAgain) {
  on_ranks(2, [&](const World& world) {
    const auto trained = [&](Saves saves) {
      auto model = deep(saves);
      Trainer trainer{.size = 2, .rank = world.rank()};
      shard_deep(model, low_precision({.mesh = mesh_of(world), .reshard_after_forward = true}, true));
      steps(model, 2, [&](int step) {
        const auto loss = loss_at(model, trainer, step);
        model->eval();
        loss.backward();
        model->train();
      });
      return shards_of(*model);
    };
    const auto expected = trained(Saves::kAll);
    for (const auto saves : {Saves::kNone, Saves::kProducts, Saves::kNested}) expect_close(trained(saves), expected, 0);
  });
}

// Evaluations in full precision give what one process gives, and change nothing of the training around them.
TEST(FsdpNewerMixtures, EvaluatesInFullPrecisionAroundEverything) {
  for (const int size : {2, 3, 4}) {
    on_ranks(size, [&](const World& world) {
      for (const auto& way : ways_of(world)) {
        SCOPED_TRACE(way.what);
        const auto trained = [&](bool is_full) {
          auto model = deep(way.saves);
          Trainer trainer{
              .size = size, .rank = world.rank(), .root = shard_deep(model, low_precision(way.options, is_full))};
          const auto check = [&] {
            if (!is_full) return;
            model->eval();
            const c10::InferenceMode inference;
            const auto out = model->forward(tokens(0, 60));
            model->train();
            auto plain = deep();
            load_full_state_dict(*plain, full_state_dict(*model));
            EXPECT_TRUE(at::allclose(out, plain->forward(tokens(0, 60)), 1e-5, 1e-5));
          };
          steps(model, 2, [&](int step) {
            check();
            {
              const auto no_sync = trainer.no_sync();
              loss_at(model, trainer, step).backward();
            }
            check();
            // A part of it in the other mode: another precision is another result, so only where nothing is reduced.
            if (is_full) {
              model->first->eval();
              const at::NoGradGuard no_grad;
              loss_at(model, trainer, 70);
              model->first->train();
            }
            loss_at(model, trainer, step + 10).backward();
          });
          return full_state_dict(*model);
        };
        const auto expected = trained(false);
        for (const auto& [name, tensor] : trained(true)) EXPECT_TRUE(tensor.equal(expected.at(name))) << name;
      }
    });
  }
}

// A frozen part of a model stays in eval(), where it is in full precision, and trains on.
TEST(FsdpNewerMixtures, APartInEvaluationModeTrainsInFullPrecision) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        model->eval();
        steps(model, 2, [&](int step) {
          {
            const auto no_sync = trainer.no_sync();
            loss_at(model, trainer, step).backward();
          }
          loss_at(model, trainer, step + 10).backward();
        });
      },
      {2, 4}, 5e-5, [](Way& way) { way.options = low_precision(way.options, true); });
}

// A gather that is under way ends as it began.
TEST(FsdpNewerMixtures, GathersAreReplacedWhileOneIsUnderWay) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      if (trainer.root && step == 1) {
        for (auto* module : std::vector<torch::nn::Module*>{model->first.get(), model.get()}) {
          unit_of(*module)->unshard(/*async=*/true);
          unit_of(*module)->set_custom_all_gather(std::make_shared<AllGatherComm>());
        }
      }
      const auto loss = loss_at(model, trainer, step);
      if (trainer.root && step == 2) {
        unit_of(*model->second)->set_custom_all_gather(std::make_shared<AllGatherComm>());
      }
      loss.backward();
    });
  });
}

// A rank whose shards are empty has nothing to write, and gathers anew with the others nevertheless.
TEST(FsdpNewerMixtures, UnitsStayWholeBehindTheirBackwardOnRanksWithoutRows) {
  const auto train = [](auto make_optimizer) {
    return [make_optimizer](Deep& model, Trainer& trainer) {
      if (trainer.root) trainer.root->set_reshard_after_backward(false);
      auto optimizer = make_optimizer(model->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_at(model, trainer, step).backward();
        clip_grad_norm_(model->parameters(), 0.1);
        optimizer.step();
        if (step == 1) evaluate(model, trainer);
      }
    };
  };
  using Parameters = std::vector<at::Tensor>;
  compare_deep(train([](const Parameters& p) { return AdamW(p, AdamWOptions(0.01).eps(1e-2)); }), {3});
  compare_deep(train([](const Parameters& p) { return optim::AdamW(p, {.lr = 0.01, .eps = 1e-2}); }), {3});
  compare_deep(train([](const Parameters& p) { return optim::RMSprop(p, {.lr = 0.01, .eps = 1e-2}); }), {3});
}

TEST(FsdpNewerMixtures, CastsBetweenSteps) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        for (const auto dtype : {at::kDouble, at::kFloat}) {
          model->zero_grad();
          evaluate(model, trainer);
          model->to(dtype);
          if (dtype == at::kFloat) evaluate(model, trainer);
          steps(model, 2, [&](int step) {
            {
              const auto no_sync = trainer.no_sync();
              loss_at(model, trainer, step).backward();
            }
            loss_at(model, trainer, step + 10).backward();
          });
        }
      },
      {2, 3, 4});
}

TEST(FsdpNewerMixtures, RetriesForwardsAndBackwardsThatThrew) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      if (step == 0) {
        model->is_broken = true;
        EXPECT_ANY_THROW(loss_at(model, trainer, step));
        model->is_broken = false;
      }
      if (step == 1) {
        bool should_throw = true;
        auto hidden = model->run(model->second, model->run(model->first, at::ones({2, kWidth})));
        hidden.register_hook([&](const at::Tensor&) {
          if (should_throw) throw std::runtime_error("no");
        });
        const auto doomed = loss_at(model, trainer, step) + hidden.pow(2).mean();
        EXPECT_ANY_THROW(doomed.backward({}, /*retain_graph=*/true));
        model->zero_grad();
        should_throw = false;
        evaluate(model, trainer);
        doomed.backward();  // the same graph
        return;
      }
      {
        const auto no_sync = trainer.no_sync();
        loss_at(model, trainer, step).backward();
      }
      loss_at(model, trainer, step + 10).backward();
    });
  });
}

TEST(FsdpNewerMixtures, RetriesRecomputationsThatThrew) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) {
      const auto loss = loss_at(model, trainer, step);
      if (trainer.root && model->saves != Saves::kAll) {
        // Early stop ends a run before it throws, in all but the innermost functions.
        model->is_broken = true;
        EXPECT_ANY_THROW(loss.backward({}, /*retain_graph=*/true));
        model->is_broken = false;
        if (step == 1) trainer.root->reset_iter_state();
        model->zero_grad();
        evaluate(model, trainer);
      }
      loss.backward();
    });
  });
}

TEST(FsdpNewerMixtures, SeveralForwardsAndARetainedGraph) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) {
      const auto one = trainer.mean([&](int rank) {
        // A unit called twice, once directly.
        return model->first->forward(model->run(model->first, rows(rank, step))).pow(2).mean();
      });
      const auto all = loss_at(model, trainer, step);
      evaluate(model, trainer);
      const auto other =
          trainer.mean([&](int rank) { return model->head->forward(model->run(model->second, rows(rank, 7))).sum(); });
      other.backward({}, /*retain_graph=*/true);
      {
        const at::NoGradGuard no_grad;
        loss_at(model, trainer, 51);
      }
      (one + all).backward({}, /*retain_graph=*/true);
      (0.1 * other).backward();
      (0.1 * one).backward();
    });
  });
}

TEST(FsdpNewerMixtures, UnitsRunInOtherOrdersOrNotAtAll) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 5, [&](int step) {
      trainer
          .mean([&](int rank) {
            auto hidden = model->table->forward(tokens(rank, step));
            if (step % 3 != 1) hidden = model->run(model->second, hidden);
            if (step % 2 == 0) hidden = model->run(model->first, hidden);
            return model->head->forward(hidden).pow(2).mean();
          })
          .backward();
      // Stops in the middle, with the next unit gathered ahead.
      const c10::InferenceMode inference;
      model->first->norm->forward(at::ones({1, kWidth}));
    });
  });
}

TEST(FsdpNewerMixtures, UnitsAreFrozenAndThawed) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 5, [&](int step) {
      for (auto& shard : model->first->parameters()) shard.set_requires_grad(step % 2 == 0);
      if (step == 2) evaluate(model, trainer);
      if (step == 3) {
        const auto no_sync = trainer.no_sync();
        loss_at(model, trainer, step).backward();
      }
      loss_at(model, trainer, step + 10).backward();
    });
  });
}

/// One element, one row, none, odd sizes.
struct OddImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    const auto run = [this](const at::Tensor& in) {
      const auto all = at::cat({row, none}, 0);
      return at::matmul(at::tanh((in * one) * all + at::matmul(in, none.t()).sum()), odd.t());
    };
    return is_checkpointed ? checkpoint(no_generators(), run, input) : run(input);
  }
  bool is_checkpointed = false;
  at::Tensor one = register_parameter("one", at::full({1}, 0.5));
  at::Tensor row = register_parameter("row", at::linspace(-1, 1, 8).view({1, 8}).clone());
  at::Tensor none = register_parameter("none", at::zeros({0, 8}));
  at::Tensor odd = register_parameter("odd", at::linspace(-1, 1, 40).view({5, 8}).clone());
};
TORCH_MODULE(Odd);

TEST(FsdpNewerMixtures, ParametersOfOneElementOneRowAndNone) {
  const auto train = [](Odd& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto loss = [&](int rank) { return model->forward(rows(rank, step, 8)).pow(2).mean(); };
      if (step < 2) {
        const auto no_sync = trainer.no_sync();
        trainer.mean(loss).backward();
        const c10::InferenceMode inference;
        trainer.mean(loss);
      }
      trainer.mean(loss).backward();
      if (trainer.root) trainer.root->clip_grad_norm_(10);
      if (step == 1) load_full_state_dict(*model, full_state_dict(*model));
    });
  };
  const auto shard = [](Odd& model, const FullyShardOptions& options) { return fully_shard(model, options); };
  for (const int size : {2, 3, 4}) {
    const auto plain = trained_alone(Odd(), size, train);
    on_ranks(size, [&](const World& world) {
      for (const auto& way : ways_of(world)) {
        if (way.what == "flat" || way.what == "dim 1") continue;
        Odd model;
        model->is_checkpointed = way.saves != Saves::kAll;
        expect_same(world, way, plain, model, shard, train);
      }
    });
  }
}

TEST(FsdpNewerMixtures, LowPrecisionWithEverything) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        steps(model, 2, [&](int step) {
          {
            const auto no_sync = trainer.no_sync();
            loss_at(model, trainer, step).backward();
            evaluate(model, trainer);
          }
          const auto loss = loss_at(model, trainer, step + 10);
          const auto part =
              trainer.mean([&](int rank) { return at::matmul(rows(rank, step), model->head->weight.t()).mean(); });
          (loss + 0.01 * part).backward({}, /*retain_graph=*/true);
          loss.backward();
        });
      },
      {2, 4}, 0.05, [](Way& way) { way.options = low_precision(way.options, false); });
}

TEST(FsdpNewerMixtures, ScalersClipAndSkip) {
  compare_deep([](Deep& model, Trainer& trainer) {
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2).eps(1e-3));
    GradScaler scaler({.device = at::kCPU, .init_scale = 256, .growth_interval = 2});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto bad = step == 1 ? std::numeric_limits<float>::infinity() : 1.0F;
      {
        const auto no_sync = trainer.no_sync();
        scaler.scale(loss_at(model, trainer, step)).backward();
      }
      const auto loss = trainer.mean(
          [&](int rank) { return model->forward(tokens(rank, step)).pow(2).mean() * (rank == 0 ? bad : 1.0F); });
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      clip_grad_norm_(model->parameters(), 0.5);
      scaler.step(optimizer);
      scaler.update();
      if (step == 2) evaluate(model, trainer);
    }
  });
}

TEST(FsdpNewerMixtures, StateIsSavedAndLoadedInMidTraining) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        ModuleState full;
        ShardedModuleState parts;
        std::stringstream file;
        steps(model, 5, [&](int step) {
          if (step == 1) {
            full = full_state_dict(*model);
            for (const auto& [name, part] : sharded_state_dict(*model))
              parts[name] = {part.local.clone(), part.sharding};
            torch::save(model, file);
          }
          if (step == 2) load_full_state_dict(*model, full);
          if (step == 3) {
            loss_at(model, trainer, 40);  // units may be whole, or parts kept
            trainer.root ? load_sharded_state_dict(*model, parts) : load_full_state_dict(*model, full);
          }
          if (step == 4) {
            evaluate(model, trainer);
            torch::load(model, file);
          }
          const auto loss = loss_at(model, trainer, step);
          const auto saved = full_state_dict(*model);  // between forward and backward
          loss.backward();
        });
      },
      {2, 3, 4});
}

TEST(FsdpNewerMixtures, WholeParametersAreLookedAtBetweenForwardAndBackward) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        const auto summon = [&](const SummonOptions& options) {
          return trainer.root ? std::unique_ptr<SummonGuard>(new SummonGuard(trainer.root->summon_full_params(options)))
                              : nullptr;
        };
        steps(model, 3, [&](int step) {
          const auto loss = loss_at(model, trainer, step);
          {
            const auto scope = summon({.writeback = step != 1});
            EXPECT_EQ(model->first->up->weight.detach().sum().isnan().item<bool>(), false);
            evaluate(model, trainer);
          }
          loss.backward({}, /*retain_graph=*/true);
          if (step == 0) {
            const auto scope = summon({.with_grads = true});
            model->head->weight.mutable_grad().mul_(2);
          }
          loss.backward();
        });
      },
      {3, 4});
}

// The shard of a unit is written between forward and backward: all ranks are told, and go on with the next step.
TEST(FsdpNewerMixtures, AWriteBetweenForwardAndBackwardIsRefusedAndForgotten) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        steps(model, 2, [&](int step) {
          const auto loss = loss_at(model, trainer, step);
          const at::NoGradGuard no_grad;
          auto weight =
              model->named_parameters()[trainer.root && !trainer.root->options().use_orig_params ? "second._flat_param"
                                                                                                 : "second.up.weight"];
          const auto before = weight.detach().clone();
          weight.mul_(3);
          if (trainer.root) {
            expect_error([&] { loss.backward(); }, {"was changed between forward and backward", "second"});
            trainer.root->reset_iter_state();
          }
          weight.copy_(before);
          model->zero_grad();
          const at::AutoGradMode grad_mode(true);
          loss_at(model, trainer, step).backward();
        });
      },
      {2});
}

TEST(FsdpNewerMixtures, HooksOfSavedTensorsSeeWholeParametersAndCompress) {
  compare_deep([](Deep& model, Trainer& trainer) {
    int packed = 0;
    const auto pack = [&](const at::Tensor& tensor) -> std::any {
      ++packed;
      return tensor.detach().to(at::kDouble);
    };
    const auto unpack = [](const std::any& value) {
      const auto& tensor = std::any_cast<const at::Tensor&>(value);
      return tensor;
    };
    steps(model, 3, [&](int step) {
      at::Tensor loss;
      if (step == 0) {
        // Of the program's own: what it packed it gives back as it was.
        const auto scope = saved_tensors_hooks(
            [&](const at::Tensor& tensor) -> std::any { return std::pair(pack(tensor), tensor.scalar_type()); },
            [&](const std::any& value) {
              const auto& [tensor, dtype] = std::any_cast<const std::pair<std::any, at::ScalarType>&>(value);
              return unpack(tensor).to(dtype);
            });
        loss = loss_at(model, trainer, step);
      } else {
        const auto scope = save_on_cpu();
        loss = loss_at(model, trainer, step);
        evaluate(model, trainer);
      }
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    });
    EXPECT_GT(packed, 0);
  });
}

TEST(FsdpNewerMixtures, HooksWithStreamsAndEventsOnCpus) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        const auto scale = [](const at::Tensor& gradients) { gradients.mul_(0.5); };
        if (trainer.root) {
          unit_of(*model->first)->set_all_reduce_hook(scale, c10::Stream(c10::Stream::DEFAULT, at::Device(at::kCPU)));
        }
        steps(model, 3, [&](int step) {
          if (trainer.root) trainer.root->set_post_optim_event(c10::Event(at::kCPU));
          {
            const auto no_sync = trainer.no_sync();
            loss_at(model, trainer, step).backward();
          }
          loss_at(model, trainer, step + 10).backward();
          if (trainer.root) return;
          for (auto& parameter : model->first->parameters()) parameter.mutable_grad().mul_(0.5);
        });
      },
      {2, 3});
}

// Norms of a rank's part are refused in every way of sharding, and leave training as it was.
TEST(FsdpNewerMixtures, NormsOfPartsAreRefusedInTheMiddleOfTraining) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        loss_at(model, trainer, step).backward();
      }
      loss_at(model, trainer, step + 10).backward();
      if (!trainer.root) return;
      for (const auto& shard : model->parameters()) {
        expect_error([&] { shard.grad().norm(); }, {"clip_grad_norm_()"});
        expect_error([&] { shard.grad().detach().abs().max(); }, {"clip_grad_norm_()"});
        EXPECT_NO_THROW(shard.grad().pow(2).sum());
      }
      // A member's gradient is in its shard.
      expect_error([&] { model->first->up->weight.grad().add_(1); }, {"up.weight", "parameters()"});
      evaluate(model, trainer);
      expect_error([&] { model->first->up->weight.grad().add_(1); }, {"up.weight", "parameters()"});
    });
  });
}

// Some units synchronise, others wait.
TEST(FsdpNewerMixtures, SomeUnitsAccumulateWhileOthersReduce) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) {
      if (trainer.root) unit_of(*model->first)->set_requires_gradient_sync(false);
      loss_at(model, trainer, step).backward();
      evaluate(model, trainer);
      if (trainer.root) unit_of(*model->first)->set_requires_gradient_sync(true);
      if (trainer.root) trainer.root->set_is_last_backward(false);
      loss_at(model, trainer, step + 10).backward();
      if (trainer.root) trainer.root->set_is_last_backward(true);
      loss_at(model, trainer, step + 20).backward();
    });
  });
}

// A forward without gradients inside of a backward.
TEST(FsdpNewerMixtures, EvaluatesInAHookOfABackward) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      auto hidden = model->run(model->first, rows(trainer.rank.value_or(0), 0));
      hidden.register_hook([&](const at::Tensor&) {
        const at::NoGradGuard no_grad;
        model->second->forward(at::ones({1, kWidth}));
        model->head->forward(at::ones({1, kWidth}));
      });
      (loss_at(model, trainer, step) + 0 * hidden.sum()).backward();
    });
  });
}

// Ranks with different numbers of inputs, what is run again, and low precision: as without checkpoints and sharing.
TEST(FsdpNewerMixtures, JoinsWithCheckpointsSharingAndLowPrecision) {
  on_ranks(4, [&](const World& world) {
    const auto trained = [&](Saves saves, const FullyShardOptions& options) {
      auto model = deep(saves);
      auto root = shard_deep(model, low_precision(options, true));
      Trainer trainer{.size = 4, .rank = world.rank(), .root = root};
      SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
      FsdpJoinable joinable(root);
      const auto update = [&] {
        root.clip_grad_norm_(1);
        optimizer.step();
      };
      Join scope({&joinable}, {});
      scope.mirror(update).run([&] {
        for (int step = 0; step < 1 + world.rank(); ++step) {
          optimizer.zero_grad();
          loss_at(model, trainer, step).backward();
          update();
        }
      });
      return full_state_dict(*model);
    };
    const auto mesh = mesh_of(world);
    const auto expected = trained(Saves::kAll, {.mesh = mesh, .share_on_host = false});
    for (const auto saves : {Saves::kAll, Saves::kNone, Saves::kNested}) {
      for (const auto& options : {FullyShardOptions{.mesh = mesh}, ragged({.mesh = mesh}),
                                  FullyShardOptions{.mesh = mesh, .reshard_after_forward = 2, .keep_parts = true}}) {
        for (const auto& [name, tensor] : trained(saves, options)) {
          EXPECT_TRUE(at::allclose(tensor, expected.at(name), 1e-5, 1e-6)) << name;
        }
      }
    }
  });
}

TEST(FsdpNewerMixtures, TwoGroupsWithOneModelEach) {
  on_ranks(4, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"outer", "inner"}});
    for (const auto* axis : {"outer", "inner"}) {
      auto model = deep(Saves::kNone);
      auto whole = deep();
      auto other = deep();
      Trainer trainer{.size = 2, .rank = mesh[axis].get_local_rank(), .root = shard_deep(model, {.mesh = mesh[axis]})};
      shard_deep(other, balanced({.mesh = mesh_of(world)}));
      Trainer alone{.size = 2};
      SGD optimizer(model->parameters(), SGDOptions(0.1));
      SGD plain(whole->parameters(), SGDOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        plain.zero_grad();
        if (world.rank() == step) std::this_thread::sleep_for(10ms);
        const auto beside = other->forward(tokens(world.rank(), step)).sum();
        (loss_at(model, trainer, step) + beside * 0).backward();
        loss_at(whole, alone, step).backward();
        optimizer.step();
        plain.step();
      }
      expect_whole_state(*model, *whole, axis, 5e-5);
    }
  });
}

/// Of a step whose backward is slow on rank `late`, while the others have gone on to `meanwhile`: the gradient of the
/// input, which needs the first unit's parameters. Under no_sync() nobody waits for a reduction.
template <class Meanwhile>
at::Tensor late_gradient(const World& world, Deep& model, std::optional<FsdpUnit>& root, int late,
                         const Meanwhile& meanwhile) {
  Trainer trainer{.size = world.world_size(), .rank = world.rank()};
  loss_at(model, trainer, 0).backward();
  auto no_sync = std::make_optional(root->no_sync());
  const auto input = at::ones({2, kWidth}).requires_grad_();
  auto hidden = model->run(model->first, input);
  if (world.rank() == late) {
    hidden.register_hook([](const at::Tensor&) { std::this_thread::sleep_for(10ms); });
  }
  auto loss = model->head->forward(model->run(model->second, hidden)).pow(2).sum();
  loss.backward();
  no_sync.reset();
  meanwhile();
  return input.grad();
}

// What rank 0 does next does not reach what rank 1 still computes with.
TEST(FsdpNewerMixtures, ALateRankComputesWithTheValuesOfItsForward) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](const World& world) {
      auto plain = deep();
      const auto same = at::ones({2, kWidth}).requires_grad_();
      plain->head->forward(plain->run(plain->second, plain->run(plain->first, same))).pow(2).sum().backward();
      auto ways = ways_of(world);
      for (const auto& way : ways) {
        SCOPED_TRACE(way.what);
        for (const int kind : {0, 1, 2, 3}) {
          auto model = deep(way.saves);
          auto root = std::optional(shard_deep(model, way.options));
          Trainer trainer{.size = size, .rank = world.rank()};
          std::optional<Deep> next;
          const auto gradient = late_gradient(world, model, root, kind % size, [&] {
            const at::NoGradGuard no_grad;
            if (kind == 0) {  // steps and evaluates
              for (const auto& shard : model->parameters()) shard.fill_(100);
              loss_at(model, trainer, 1);
            } else if (kind == 1) {  // loads
              auto state = sharded_state_dict(*model);
              for (auto& [name, part] : state) part.local = at::full_like(part.local, 100);
              load_sharded_state_dict(*model, state);
              evaluate(model, trainer);
            } else if (kind == 2) {  // destroys
              root.reset();
              model = nullptr;
            } else {  // and makes another one
              root.reset();
              model = nullptr;
              next = deep();
              for (auto& parameter : (*next)->parameters()) parameter.fill_(100);
              shard_deep(*next, way.options);
              evaluate(*next, trainer);
            }
          });
          EXPECT_TRUE(at::allclose(gradient, same.grad(), 1e-4, 1e-4)) << kind;
        }
      }
    });
  }
}

// A rank comes late to every unit of its forward, and to its step.
TEST(FsdpNewerMixtures, RanksAreLateAtDifferentPlaces) {
  compare_deep([](Deep& model, Trainer& trainer) {
    const auto late = [&](int step, int place) {
      if (trainer.rank && (step + place) % trainer.size == *trainer.rank) std::this_thread::sleep_for(3ms);
    };
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto loss = trainer.mean([&](int rank) {
        late(step, 0);
        auto hidden = model->table->forward(tokens(rank, step));
        late(step, 1);
        hidden = model->run(model->first, hidden);
        if (hidden.requires_grad()) hidden.register_hook([&late, step](const at::Tensor&) { late(step, 2); });
        late(step, 3);
        return model->head->forward(model->run(model->second, hidden)).pow(2).mean();
      });
      loss.backward();
      late(step, 1);
      if (step == 1) evaluate(model, trainer);
      optimizer.step();
      late(step, 2);
      if (step == 2) evaluate(model, trainer);
    }
  });
}

// Graphs outlive their model, and a second one is made meanwhile, by ranks at different places.
TEST(FsdpNewerMixtures, GraphsOutliveTheirModelWhileAnotherTrains) {
  const auto train = [](Deep& model, Trainer& trainer) {
    steps(model, 1, [&](int step) { loss_at(model, trainer, step).backward(); });
  };
  for (const int size : {2, 4}) {
    const auto other = trained_alone(deep(), size, train);
    on_ranks(size, [&](const World& world) {
      for (const auto& way : ways_of(world)) {
        SCOPED_TRACE(way.what);
        const auto input = at::ones({2, kWidth}).requires_grad_();
        at::Tensor loss;
        {
          auto model = deep(way.saves);
          auto root = shard_deep(model, way.options);
          Trainer trainer{.size = size, .rank = world.rank()};
          loss_at(model, trainer, 0).backward();
          // By holders, which a checkpoint keeps.
          auto first = model->first;
          loss = (way.saves == Saves::kAll ? first->forward(input) : checkpoint(no_generators(), first, input))
                     .pow(2)
                     .mean();
        }
        if (world.rank() == 1) std::this_thread::sleep_for(5ms);
        expect_same(world, way, other, deep(way.saves), shard_deep, train);
        loss.backward();
        auto plain = deep();
        const auto same = at::ones({2, kWidth}).requires_grad_();
        plain->first->forward(same).pow(2).mean().backward();
        EXPECT_TRUE(at::allclose(input.grad(), same.grad(), 1e-5, 1e-6));
      }
    });
  }
}

// A module built without memory, cut raggedly.
TEST(FsdpNewerMixtures, DeferredModelsAreCutRaggedly) {
  const auto train = [](Deep& model, Trainer& trainer) {
    steps(model, 2, [&](int step) { loss_at(model, trainer, step).backward(); });
  };
  const auto plain = trained_alone(deep(), 3, train);
  on_ranks(3, [&](const World& world) {
    for (const auto& way : ways_of(world)) {
      auto model = built_from_seed([] { return deferred_init([] { return Deep(); }); });
      model->saves = way.saves;
      expect_same(world, way, plain, model, shard_deep, train);
    }
  });
}

struct SavingMlpImpl : MlpImpl {
  using MlpImpl::MlpImpl;
  at::Tensor forward(at::Tensor hidden) {
    for (auto& layer : layers) {
      const auto run = [this, module = layer.ptr()](const at::Tensor& in) {
        auto out = module->forward(in);
        if (is_broken) throw std::runtime_error("broken");
        return at::tanh(out);
      };
      hidden = is_checkpointed ? checkpoint(no_generators(), run, hidden) : run(hidden);
    }
    return hidden;
  }
  bool is_checkpointed = false;
  bool is_broken = false;
};
TORCH_MODULE(SavingMlp);

SavingMlp saving_mlp(bool is_checkpointed) {
  auto model = seeded(SavingMlp(std::vector<int64_t>{4, 6, 5, 2}));
  model->is_checkpointed = is_checkpointed;
  return model;
}

// DDP in low precision, accumulating, with a recomputation that throws and is tried again.
TEST(FsdpNewerMixtures, DdpRetriesRecomputationsInLowPrecision) {
  on_ranks(2, [&](const World& world) {
    for (const bool is_low : {false, true}) {
      const auto trained = [&](bool is_checkpointed) {
        DdpOptions options;
        if (is_low) options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        DistributedDataParallel ddp(saving_mlp(is_checkpointed), world.group(), options);
        SGD optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          const auto loss = [&](int batch) {
            return ddp(random_batch(3, 4, static_cast<uint64_t>(10 * batch + world.rank()))).pow(2).mean();
          };
          {
            const auto no_sync = ddp.no_sync();
            loss(step).backward();
          }
          if (step == 1 && is_checkpointed) {
            const auto doomed = loss(7);
            ddp.module()->is_broken = true;
            EXPECT_ANY_THROW(doomed.backward());
            ddp.module()->is_broken = false;
            optimizer.zero_grad();
            const auto no_sync = ddp.no_sync();
            loss(step).backward();
          }
          loss(step + 10).backward();
          optimizer.step();
        }
        return shards_of(*ddp.module());
      };
      expect_close(trained(true), trained(false), 0);
    }
  });
}

// ZeRO in all stages, Join and checkpoints.
TEST(FsdpNewerMixtures, ZeroJoinsWithCheckpoints) {
  on_ranks(3, [&](const World& world) {
    for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
      const auto trained = [&](bool is_checkpointed) {
        DistributedDataParallel ddp(saving_mlp(is_checkpointed), world.group());
        ZeroRedundancyOptimizer<optim::AdamW> optimizer(ddp.parameters(), {.lr = 0.01}, {.stage = stage, .ddp = ddp});
        Join({&ddp, &optimizer}).run([&] {
          for (int step = 0; step < 1 + world.rank(); ++step) {
            optimizer.zero_grad();
            ddp(random_batch(3, 4, static_cast<uint64_t>(10 * step + world.rank()))).pow(2).mean().backward();
            optimizer.step();
          }
        });
        return shards_of(*ddp.module());
      };
      expect_close(trained(true), trained(false), 0);
    }
  });
}

// A checkpointed Sequential of units, in segments, with statistics that are updated once.
TEST(FsdpNewerMixtures, SequencesOfUnitsRunAgainInSegments) {
  on_ranks(2, [&](const World& world) {
    const auto build = [] {
      return built_from_seed([] {
        return torch::nn::Sequential(torch::nn::Linear(8, 64), torch::nn::BatchNorm1d(64), torch::nn::Linear(64, 64),
                                     torch::nn::BatchNorm1d(64), torch::nn::Linear(64, 3));
      });
    };
    const auto trained = [&](int segments, bool shares) {
      auto model = build();
      const FullyShardOptions options{.mesh = mesh_of(world), .reshard_after_forward = true, .share_on_host = shares};
      for (const auto& layer : *model) fully_shard(*layer.ptr(), options);
      auto root = fully_shard(model, options);
      steps(model, 3, [&](int step) {
        const auto input = rows(world.rank(), step, 8);
        const auto loss = [&] {
          return (segments == 0 ? model->forward(input)
                                : checkpoint_sequential(model, segments, input, no_generators()))
              .pow(2)
              .mean();
        };
        {
          const auto no_sync = root.no_sync();
          loss().backward();
        }
        loss().backward();
        model->eval();
        const c10::InferenceMode inference;
        model->forward(input);
        model->train();
      });
      auto tensors = shards_of(*model);
      for (const auto& buffer : model->buffers()) tensors.push_back(buffer.clone());
      return tensors;
    };
    const auto expected = trained(0, false);
    for (const int segments : {1, 2, 5}) expect_close(trained(segments, true), expected, 0);
  });
}

// Gathered ahead of the step that changes the values, by ranks at different times.
TEST(FsdpNewerMixtures, UnitsAreGatheredByHandBeforeAStep) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto loss = loss_at(model, trainer, step);
      if (trainer.root && step == 1) {
        for (const auto& block : {model->first, model->second}) {
          unit_of(*block)->reshard();
          unit_of(*block)->unshard();
        }
      }
      loss.backward();
      if (!trainer.root) return;
      if (step == *trainer.rank) std::this_thread::sleep_for(5ms);
      for (const auto& block : {model->first, model->second}) unit_of(*block)->unshard(/*async=*/step != 2);
      trainer.root->unshard(/*async=*/true);
    });
    evaluate(model, trainer);
  });
}

TEST(FsdpNewerMixtures, ReshardingIsSwitchedInTheMiddleOfAnAccumulation) {
  compare_deep([](Deep& model, Trainer& trainer) {
    steps(model, 3, [&](int step) {
      const auto reshards = [&](bool is_on) {
        if (trainer.root) trainer.root->set_reshard_after_forward(is_on);
      };
      reshards(step % 2 == 0);
      {
        const auto no_sync = trainer.no_sync();
        const auto loss = loss_at(model, trainer, step);
        reshards(step % 2 == 1);
        loss.backward();
      }
      evaluate(model, trainer);
      if (trainer.root) trainer.root->set_reshard_after_backward(step != 1);
      loss_at(model, trainer, step + 10).backward();
    });
  });
}

TEST(FsdpNewerMixtures, CastsInEvaluationMode) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        for (const auto dtype : {at::kDouble, at::kFloat}) {
          model->eval();
          evaluate(model, trainer);
          model->zero_grad();
          model->to(dtype);
          evaluate(model, trainer);
          model->train();
          if (dtype == at::kFloat) model->eval();
          steps(model, 2, [&](int step) { loss_at(model, trainer, step).backward(); });
          model->train();
        }
      },
      {2, 4}, 0.05, [](Way& way) { way.options = low_precision(way.options, true); });
}

// A frozen part stays in evaluation mode, and so in full precision, below one that trains in low precision.
TEST(FsdpNewerMixtures, AFrozenPartIsInFullPrecision) {
  compare_deep(
      [](Deep& model, Trainer& trainer) {
        for (auto& shard : model->second->parameters()) shard.set_requires_grad(false);
        model->second->eval();
        steps(model, 2, [&](int step) {
          {
            const auto no_sync = trainer.no_sync();
            loss_at(model, trainer, step).backward();
          }
          loss_at(model, trainer, step + 10).backward();
        });
      },
      {2, 4}, 0.05, [](Way& way) { way.options = low_precision(way.options, true); });
}

// Ranks use different parameters of a unit.
TEST(FsdpNewerMixtures, RanksUseDifferentParametersOfAUnit) {
  compare_deep([](Deep& model, Trainer& trainer) {
    if (trainer.root) trainer.root->set_reduce_scatter_unused_params(true);
    steps(model, 3, [&](int step) {
      const auto loss = [&](int rank) {
        auto hidden = model->run(model->first, model->table->forward(tokens(rank, step)));
        hidden = rank % 2 == 0 ? model->second->norm->forward(hidden) : model->second->up->forward(hidden);
        return hidden.pow(2).mean() + 0.1 * model->head->forward(model->table->forward(tokens(rank, 0))).mean();
      };
      trainer.mean(loss).backward();
    });
  });
}

TEST(FsdpNewerMixtures, WeightedBackwardsOverAGroupOfTheirOwn) {
  compare_deep([](Deep& model, Trainer& trainer) {
    if (trainer.root && trainer.root->options().mesh->ndim() == 1) {
      trainer.root->set_separate_reduce_scatter_group();
      trainer.root->set_max_reductions_in_flight(3);
    }
    const auto weight = [](int rank) { return 1.0 + rank; };
    const auto backward = [&](int step) {
      if (trainer.root) return trainer.root->backward(loss_at(model, trainer, step), weight(*trainer.rank));
      double all = 0;
      auto sum = at::zeros({});
      for (int rank = 0; rank < trainer.size; ++rank) {
        sum = sum + weight(rank) * model->forward(tokens(rank, step)).pow(2).mean();
        all += weight(rank);
      }
      (sum / all / 2).backward();
    };
    steps(model, 2, [&](int step) {
      {
        const auto no_sync = trainer.no_sync();
        backward(step);
      }
      evaluate(model, trainer);
      backward(step + 10);
    });
  });
}

// A second sharded model that follows the first, evaluated in every place.
TEST(FsdpNewerMixtures, TeachersFollowTheirStudents) {
  for (const int size : {2, 3, 4}) {
    const auto program = [&](Deep& model, Deep& teacher, Trainer& trainer) {
      const auto teach = [&](int rank, int step) {
        const at::NoGradGuard no_grad;
        return teacher->forward(tokens(rank, step));
      };
      steps(model, 3, [&](int step) {
        auto loss = trainer.mean([&](int rank) {
          const auto run = [&, rank, step](const at::Tensor& in) { return (in - teach(rank, step)).pow(2).mean(); };
          return checkpoint(no_generators(), run, model->forward(tokens(rank, step)));
        });
        evaluate(teacher, trainer);
        loss.backward();
        {
          const at::NoGradGuard no_grad;
          const auto students = model->parameters();
          const auto teachers = teacher->parameters();
          for (std::size_t i = 0; i < students.size(); ++i) teachers[i].lerp_(students[i], 0.3);
        }
        // Its first forward behind that is one inside of a backward.
        auto hidden = model->run(model->first, rows(0, step));
        hidden.register_hook([&](const at::Tensor&) { teach(0, 5); });
        (0 * hidden.sum()).backward();
      });
    };
    auto plain_teacher = deep();
    const auto plain =
        trained_alone(deep(), size, [&](Deep& model, Trainer& trainer) { program(model, plain_teacher, trainer); });
    on_ranks(size, [&](const World& world) {
      for (const auto& way : ways_of(world)) {
        auto teacher = deep();
        auto options = way.options;
        if (options.balance) options.balance = std::make_shared<ShardBalance>();
        shard_deep(teacher, options);
        expect_same(world, way, plain, deep(way.saves), shard_deep,
                    [&](Deep& model, Trainer& trainer) { program(model, teacher, trainer); });
        expect_whole_state(*teacher, *plain_teacher, way.what, 5e-5);
      }
    });
  }
}

// Steps inside of backward, by hooks of the shards, one of which throws in its first run.
TEST(FsdpNewerMixtures, HooksOfShardsStepAndThrow) {
  compare_deep([](Deep& model, Trainer& trainer) {
    bool is_broken = false;
    const auto step_with = [&](const at::Tensor& shard, const at::Tensor& gradient) {
      if (is_broken) throw std::runtime_error("broken");
      const at::NoGradGuard no_grad;
      shard.data().sub_(gradient, 0.1);
    };
    if (trainer.root) {
      for (const auto& shard : model->parameters()) {
        shard.register_hook([&, weak = c10::weak_intrusive_ptr(shard.getIntrusivePtr())](const at::Tensor& gradient) {
          step_with(at::Tensor(weak.lock()), gradient);
        });
      }
    }
    for (int step = 0; step < 3; ++step) {
      if (trainer.root && step == 1) {
        is_broken = true;
        EXPECT_ANY_THROW(loss_at(model, trainer, 20).backward());
        is_broken = false;
        model->zero_grad();
      }
      loss_at(model, trainer, step).backward();
      if (!trainer.root) {
        for (const auto& parameter : model->parameters()) step_with(parameter, parameter.grad());
      }
      model->zero_grad();
      if (step == 1) evaluate(model, trainer);
    }
    // The program's hooks refer to it.
    for (const auto& shard : model->parameters()) torch::autograd::impl::clear_hooks(shard);
  });
}

// Parameters among the arguments of a checkpoint.
TEST(FsdpNewerMixtures, CheckpointsTakeParametersAsArguments) {
  compare_deep([](Deep& model, Trainer& trainer) {
    const auto run = [](const at::Tensor& in, const at::Tensor& weight, const std::vector<at::Tensor>& biases) {
      return at::tanh(at::matmul(in, weight.t()) + biases[0]).sum(1) + biases[1].sum();
    };
    steps(model, 3, [&](int step) {
      const auto loss = [&](int rank) {
        const auto hidden = model->run(model->first, model->table->forward(tokens(rank, step))).flatten(0, 1);
        const std::vector biases{model->second->up->bias, model->head->bias};
        const auto out = trainer.root ? checkpoint(no_generators(), run, hidden, model->second->up->weight, biases)
                                      : run(hidden, model->second->up->weight, biases);
        return out.pow(2).mean() * 0.01;
      };
      {
        const auto no_sync = trainer.no_sync();
        trainer.mean(loss).backward();
      }
      const auto kept = trainer.mean(loss);
      kept.backward({}, /*retain_graph=*/true);
      kept.backward();
    });
  });
}

}  // namespace lockstep::fsdp_newer_mixtures_test
