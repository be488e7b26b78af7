// State of optimizers by name: a run that is resumed, on as many ranks or on others, goes on as if nothing had been.
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include "lockstep/fsdp/optimizer_state.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/state/optimizer_state.h"
#include "tests/support/fsdp_state_models.h"

namespace lockstep::fsdp_optimizer_state_test {

using namespace fsdp_state_models;
using testing::expect_error;

using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

struct Kind {
  std::string name;
  std::function<OptimizerPtr(const std::vector<at::Tensor>& parameters, double lr)> make;
};

std::vector<Kind> kinds() {
  const auto of = [](const auto& options_of, auto* type) {
    using Type = std::remove_pointer_t<decltype(type)>;
    return [options_of](const std::vector<at::Tensor>& parameters, double lr) -> OptimizerPtr {
      return std::make_shared<Type>(parameters, options_of(lr));
    };
  };
  return {
      {"SGD", of([](double lr) { return torch::optim::SGDOptions(lr).momentum(0.9).weight_decay(0.01); },
                 static_cast<torch::optim::SGD*>(nullptr))},
      {"plain SGD",
       of([](double lr) { return torch::optim::SGDOptions(lr); }, static_cast<torch::optim::SGD*>(nullptr))},
      {"Adam", of([](double lr) { return torch::optim::AdamOptions(lr).amsgrad(true); },
                  static_cast<torch::optim::Adam*>(nullptr))},
      {"AdamW",
       of([](double lr) { return torch::optim::AdamWOptions(lr); }, static_cast<torch::optim::AdamW*>(nullptr))},
      {"RMSprop", of([](double lr) { return torch::optim::RMSpropOptions(lr).momentum(0.5); },
                     static_cast<torch::optim::RMSprop*>(nullptr))},
      {"Adagrad", of([](double lr) { return torch::optim::AdagradOptions(lr).initial_accumulator_value(0.1); },
                     static_cast<torch::optim::Adagrad*>(nullptr))},
      {"lockstep AdamW",
       of([](double lr) { return optim::AdamWOptions{.lr = lr}; }, static_cast<optim::AdamW*>(nullptr))},
      {"lockstep SGD",
       of([](double lr) { return optim::SGDOptions{.lr = lr, .momentum = 0.9}; }, static_cast<optim::SGD*>(nullptr))},
      {"lockstep Rprop",
       of([](double lr) { return optim::RpropOptions{.lr = lr}; }, static_cast<optim::Rprop*>(nullptr))},
  };
}

void on_ranks(int world_size, const std::function<void(const World&)>& body) {
  testing::run_threads_in_gtest({.world_size = world_size}, body);
}

// FSDP-78
TEST(FsdpOptimizerState, ResumesToTheSameBits) {
  for (const auto& kind : kinds()) {
    on_ranks(3, [&](const World& world) {
      auto expected = net();
      sharded(expected, {.mesh = mesh_of(world)});
      const auto uninterrupted = kind.make(unique_parameters(*expected), 0.02);
      train(expected, *uninterrupted, 0, 5);

      auto first = net();
      sharded(first, {.mesh = mesh_of(world)});
      const auto before = kind.make(unique_parameters(*first), 0.02);
      train(first, *before, 0, 3);
      const auto model_state = full_state_dict(*first);
      const auto whole = full_optimizer_state_dict(*first, *before);
      const auto part = sharded_optimizer_state_dict(*first, *before);
      EXPECT_EQ(whole.state.empty(), kind.name == "plain SGD") << kind.name;

      for (const std::string way : {"whole", "rank 0", "part"}) {
        auto second = net(6);
        sharded(second, {.mesh = mesh_of(world)});
        load_full_state_dict(*second, model_state);
        const auto after = kind.make(unique_parameters(*second), 0.5);  // options come with the state
        if (way == "part") {
          load_sharded_optimizer_state_dict(*second, *after, {part});
        } else {
          const bool is_given = way == "whole" || world.rank() == 0;
          load_full_optimizer_state_dict(*second, *after, is_given ? whole : NamedOptimizerState(),
                                         {.broadcast_from_rank0 = way == "rank 0"});
        }
        train(second, *after, 3, 5);
        expect_same_model(
            *second,
            *[&] {
              auto bare = net(6);
              load_full_state_dict(*bare, full_state_dict(*expected));
              return bare;
            }(),
            kind.name + " " + way);
      }
    });
  }
}

// FSDP-78
TEST(FsdpOptimizerState, HasNamesOnceAndScalarsAsTheyAre) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(unique_parameters(*model), 0.01);
    train(model, optimizer, 0, 2);
    const auto whole = full_optimizer_state_dict(*model, optimizer);
    EXPECT_EQ(whole.state.size(), unique_parameters(*model).size());
    EXPECT_NE(whole.state.contains("tied"), whole.state.contains("head.bias"));
    const auto& weight = whole.state.at("first.weight");
    EXPECT_EQ(weight.at("step").toInt(), 2);
    EXPECT_EQ(weight.at("exp_avg").toTensor().sizes(), at::IntArrayRef({7, 5}));
    ASSERT_EQ(whole.param_groups.size(), 1U);
    EXPECT_EQ(whole.param_groups[0].params.size(), unique_parameters(*model).size());
    EXPECT_EQ(whole.param_groups[0].options.at("lr").toDouble(), 0.01);
    const auto part = sharded_optimizer_state_dict(*model, optimizer);
    EXPECT_EQ(part.state.at("first.weight").at("exp_avg").toTensor().size(0), world.rank() == 0 ? 4 : 3);
    EXPECT_EQ(part.shardings.at("first.weight").sizes, (std::vector<int64_t>{7, 5}));
    EXPECT_EQ(full_optimizer_state_dict(*model, optimizer, {.rank0_only = true}).state.empty(), world.rank() != 0);
    // It equals that of the same optimizer in an unsharded run.
    auto bare = net();
    torch::optim::AdamW plain(unique_parameters(*bare), 0.01);
    train(bare, plain, 0, 2);
    for (const auto& [name, values] : full_optimizer_state_dict(*bare, plain).state) {
      for (const auto& [key, value] : values) {
        if (!value.isTensor()) continue;
        EXPECT_TRUE(at::allclose(value.toTensor(), whole.state.at(name).at(key).toTensor(), 1e-4, 1e-7)) << name << key;
      }
    }
  });
}

// FSDP-78: 4 ranks to 2 to 3, by parts and by whole tensors, and into an unsharded run.
TEST(FsdpOptimizerState, ResumesOnAnyNumberOfRanks) {
  using torch::optim::AdamW;
  for (const bool by_parts : {false, true}) {
    auto expected = net();
    AdamW plain(unique_parameters(*expected), 0.01);
    ModuleState model_state;
    std::vector<NamedOptimizerState> saved;
    int step = 0;
    for (const int size : {4, 2, 3, 0}) {
      train(expected, plain, step, step + 2);
      std::vector<NamedOptimizerState> parts(static_cast<std::size_t>(size));
      ModuleState model_now;
      std::mutex mutex;
      const auto run = [&](const World* world) {
        auto model = net(step == 0 ? 5 : 6);
        if (world != nullptr) sharded(model, {.mesh = mesh_of(*world)});
        AdamW optimizer(unique_parameters(*model), 0.01);
        if (step > 0) {
          load_full_state_dict(*model, model_state);
          if (by_parts) {
            load_sharded_optimizer_state_dict(*model, optimizer, saved);
          } else {
            load_full_optimizer_state_dict(*model, optimizer, saved.front());
          }
        }
        train(model, optimizer, step, step + 2);
        const auto whole = full_state_dict(*model);
        for (const auto& item : expected->named_parameters()) {
          EXPECT_TRUE(at::allclose(whole.at(item.key()), item.value(), 1e-4, 1e-5)) << size << item.key();
        }
        if (world == nullptr) return;
        auto state =
            by_parts ? sharded_optimizer_state_dict(*model, optimizer) : full_optimizer_state_dict(*model, optimizer);
        for (auto& [name, values] : state.state) values = copied_to(values, at::kCPU, false);
        const std::lock_guard lock(mutex);
        parts[static_cast<std::size_t>(world->rank())] = state;
        if (world->rank() == 0) model_now = whole;
      };
      if (size == 0) {
        run(nullptr);
      } else {
        on_ranks(size, [&](const World& world) { run(&world); });
      }
      saved = parts;
      model_state = model_now;
      step += 2;
    }
  }
}

// FSDP-78
TEST(FsdpOptimizerState, SaysWhatIsMissingAndChangesNothing) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    model->first->weight.set_requires_grad(false);
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(unique_parameters(*model), 0.01);
    train(model, optimizer, 0, 2);
    const auto whole = full_optimizer_state_dict(*model, optimizer);
    EXPECT_FALSE(whole.state.contains("first.weight"));  // frozen: never stepped
    torch::optim::AdamW fresh(unique_parameters(*model), 0.5);
    const auto refused = [&](const NamedOptimizerState& state, const std::vector<std::string>& words) {
      for (const bool broadcasts : {false, true}) {
        expect_error(
            [&] { load_full_optimizer_state_dict(*model, fresh, state, {.broadcast_from_rank0 = broadcasts}); }, words);
        EXPECT_TRUE(fresh.state().empty());
        EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.5);
      }
    };
    auto other = whole;
    other.state.erase("head.weight");
    refused(other, {"lacks head.weight", "strict = false"});
    other = whole;
    other.state["more"] = other.state["head.weight"];
    refused(other, {"does not have: more"});
    other = whole;
    other.state["head.weight"]["exp_avg"] = at::zeros({4, 7});
    refused(other, {"'head.weight' ('exp_avg' has sizes [3, 7]", "[4, 7]"});
    other = whole;
    for (auto& [name, values] : other.state) {
      values["momentum_buffer"] = values["exp_avg"];
      values.erase("exp_avg");
    }
    refused(other, {"AdamW"});

    other = whole;
    other.state.erase("head.weight");
    load_full_optimizer_state_dict(*model, fresh, other, {.strict = false});
    EXPECT_EQ(fresh.state().size(), whole.state.size() - 1);
    EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.01);
    // That of an optimizer that has not stepped makes this one such.
    torch::optim::AdamW unstepped(unique_parameters(*model), 0.03);
    load_full_optimizer_state_dict(*model, fresh, full_optimizer_state_dict(*model, unstepped));
    EXPECT_TRUE(fresh.state().empty());
    EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.03);
    // One whose parameters are not the module's.
    torch::optim::AdamW stranger(net()->parameters(), 0.01);
    expect_error([&] { full_optimizer_state_dict(*model, stranger); },
                 {"parameter 0 of the optimizer is none of the module's", "after fully_shard()"});
  });
}

// FSDP-78
TEST(FsdpOptimizerState, MayLeaveOutFrozenParameters) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(unique_parameters(*model), 0.01);
    train(model, optimizer, 0, 1);
    model->named_parameters()["first.weight"].set_requires_grad(false);
    const auto whole = full_optimizer_state_dict(*model, optimizer, {.ignore_frozen_params = true});
    EXPECT_FALSE(whole.state.contains("first.weight"));
    EXPECT_TRUE(full_optimizer_state_dict(*model, optimizer).state.contains("first.weight"));
    const auto& names = whole.param_groups[0].params;
    EXPECT_EQ(std::count(names.begin(), names.end(), "first.weight"), 0);
    load_full_optimizer_state_dict(*model, optimizer, whole, {.ignore_frozen_params = true});
    EXPECT_EQ(optimizer.state().size(), whole.state.size());
  });
}

// FSDP-78: options of groups follow names, not positions.
TEST(FsdpOptimizerState, KeepsGroupsByName) {
  on_ranks(2, [](const World& world) {
    const auto groups_of = [](NetImpl& model, bool is_reversed) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(model.named_parameters()["head.weight"].is_leaf()
                              ? std::vector<at::Tensor>{model.named_parameters()["head.weight"]}
                              : std::vector<at::Tensor>{},
                          std::make_unique<torch::optim::AdamWOptions>(0.1));
      groups.emplace_back(std::vector<at::Tensor>{model.named_parameters()["first.weight"]},
                          std::make_unique<torch::optim::AdamWOptions>(0.2));
      if (is_reversed) std::reverse(groups.begin(), groups.end());
      return groups;
    };
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(groups_of(*model, false), torch::optim::AdamWOptions());
    train(model, optimizer, 0, 1);
    const auto whole = full_optimizer_state_dict(*model, optimizer);
    torch::optim::AdamW other(groups_of(*model, true), torch::optim::AdamWOptions());
    other.param_groups()[0].options().set_lr(7);
    other.param_groups()[1].options().set_lr(8);
    load_full_optimizer_state_dict(*model, other, whole);
    EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.2);
    EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.1);
    torch::optim::AdamW joined(
        std::vector<at::Tensor>{model->named_parameters()["head.weight"], model->named_parameters()["first.weight"]},
        0.5);
    expect_error([&] { load_full_optimizer_state_dict(*model, joined, whole); },
                 {"group 0 of the optimizer holds 'first.weight'", "another group than 'head.weight'"});
  });
}

// FSDP-78: ranks that have not stepped alike are told, none hangs.
TEST(FsdpOptimizerState, IsRefusedIfRanksDiffer) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::AdamW optimizer(unique_parameters(*model), 0.01);
    loss_of(model, 0).backward();
    if (world.rank() == 0) optimizer.step();
    expect_error([&] { full_optimizer_state_dict(*model, optimizer); },
                 {"the state of the optimizers", "the state of 'tied'", "rank 1: 'none'"});
  });
}

// FSDP-16, FSDP-75, FSDP-78: what a flat parameter consists of has its own names, in both directions.
TEST(FsdpOptimizerState, OfFlatParametersHasTheNamesOfTheirParts) {
  on_ranks(3, [](const World& world) {
    const auto trained = [&](bool use_orig_params, int from, int to, const ModuleState& model_state,
                             const NamedOptimizerState& optimizer_state) {
      auto model = built_from_seed([] { return ddp_models::Mlp(std::vector<int64_t>{5, 7, 3}); }, from == 0 ? 5 : 6);
      fully_shard(model->layers[0], {.mesh = mesh_of(world), .use_orig_params = use_orig_params});
      fully_shard(model, {.mesh = mesh_of(world), .use_orig_params = use_orig_params});
      if (from > 0) load_full_state_dict(*model, model_state);
      torch::optim::AdamW optimizer(model->parameters(), from == 0 ? 0.01 : 0.5);
      if (from > 0) load_full_optimizer_state_dict(*model, optimizer, optimizer_state);
      train(model, optimizer, from, to);
      return std::pair(full_state_dict(*model), full_optimizer_state_dict(*model, optimizer));
    };
    const auto [expected, expected_state] = trained(true, 0, 5, {}, {});
    const auto [flat, flat_state] = trained(false, 0, 3, {}, {});
    EXPECT_EQ(flat_state.state.size(), 4U);
    EXPECT_EQ(flat_state.state.at("layer1.weight").at("exp_avg").toTensor().sizes(), at::IntArrayRef({3, 7}));
    EXPECT_EQ(flat_state.param_groups[0].params.size(), 4U);
    for (const bool use_orig_params : {false, true}) {
      const auto [resumed, resumed_state] = trained(use_orig_params, 3, 5, flat, flat_state);
      for (const auto& [name, value] : expected) EXPECT_TRUE(at::allclose(value, resumed.at(name), 1e-5, 1e-6)) << name;
      for (const auto& [name, values] : expected_state.state) {
        EXPECT_TRUE(at::allclose(values.at("exp_avg").toTensor(), resumed_state.state.at(name).at("exp_avg").toTensor(),
                                 1e-4, 1e-6))
            << name;
      }
    }
  });
}

}  // namespace lockstep::fsdp_optimizer_state_test
