// What happens to gradients on their way to the shards: accumulation, weights, hooks, replaced collectives, precision.
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_gradients_test {

using namespace fsdp_models;
using ::testing::ElementsAre;

// FSDP-62
TEST(FsdpGradients, NoSyncScopesNestAndKeepWhatUnitsWereSetTo) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    {
      const auto outer = pair.root.no_sync();
      {
        const auto inner = pair.root.no_sync();
        loss_of(pair.model, world, 0).backward();
      }
      loss_of(pair.model, world, 1).backward();  // still inside
    }
    loss_of(pair.model, world, 2).backward();
    {
      const auto no_sync = pair.ddp.no_sync();
      loss_of(pair.ddp, world, 0).backward();
      loss_of(pair.ddp, world, 1).backward();
    }
    loss_of(pair.ddp, world, 2).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "nested");

    // A scope does not switch on what was switched off.
    pair.model->zero_grad();
    pair.root.set_requires_gradient_sync(false);
    { const auto scope = pair.root.no_sync(); }
    loss_of(pair.model, world, 3).backward();
    EXPECT_TRUE(pair.model->head->bias.grad().defined() || pair.model->parameters()[0].grad().eq(0).all().item<bool>());
    pair.root.set_requires_gradient_sync(true);
    loss_of(pair.model, world, 4).backward();
    pair.ddp.module()->zero_grad();
    {
      const auto no_sync = pair.ddp.no_sync();
      loss_of(pair.ddp, world, 3).backward();
    }
    loss_of(pair.ddp, world, 4).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "switched off");
  });
}

// FSDP-62
TEST(FsdpGradients, ZeroingTheGradientsDropsWhatWasSetAside) {
  for (const bool set_to_none : {true, false}) {
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      Pair pair(world);
      SGD optimizer(pair.model->parameters(), SGDOptions(0.1));
      for (int round = 0; round < 2; ++round) {  // the second with gradients of the first
        {
          const auto no_sync = pair.root.no_sync();
          loss_of(pair.model, world, 0).backward();
        }
        optimizer.zero_grad(set_to_none);
        loss_of(pair.model, world, 1).backward();
        pair.ddp.module()->zero_grad();
        loss_of(pair.ddp, world, 1).backward();
        expect_same_gradients(*pair.model, *pair.ddp.module(), "zeroed");
      }
    });
  }
}

// FSDP-62, FSDP-65
TEST(FsdpGradients, WhatWasSetAsideIsReducedThoughTheLastBackwardDoesNotUseIt) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    const auto part = [&](auto& model) { return model->blocks[0]->forward(at::ones({2, 7})).pow(2).mean(); };
    {
      const auto no_sync = pair.root.no_sync();
      loss_of(pair.model, world, 0).backward();
    }
    part(pair.model).backward();
    loss_of(pair.ddp, world, 0).backward();
    auto whole = pair.ddp.module();
    auto plain = net();
    part(plain).backward();
    for (const auto& item : plain->named_parameters()) {
      if (item.value().grad().defined()) whole->named_parameters()[item.key()].mutable_grad().add_(item.value().grad());
    }
    expect_same_gradients(*pair.model, *whole, "set aside", 1e-6);
  });
}

// FSDP-63
TEST(FsdpGradients, PartialSumsWaitForTheReplicas) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    Pair pair(world, {.mesh = mesh});
    testing::Recorder recorder;
    pair.root.set_requires_all_reduce(false);
    loss_of(pair.model, world, 0).backward();
    for (const auto& event : recorder.events("launch")) EXPECT_NE(event.kind, "all_reduce");
    pair.root.set_requires_all_reduce(true);
    loss_of(pair.model, world, 1).backward();
    {
      const auto no_sync = pair.ddp.no_sync();
      loss_of(pair.ddp, world, 0).backward();
    }
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*pair.model, *pair.ddp.module(), "partial sums", 1e-6);
  });
}

// FSDP-64
TEST(FsdpGradients, ReductionsMayWaitForTheLastBackward) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    for (int round = 0; round < 2; ++round) {
      for (int micro = 0; micro < 4; ++micro) {
        pair.root.set_is_last_backward(micro % 2 == 1);
        loss_of(pair.model, world, micro).backward();
        loss_of(pair.ddp, world, micro).backward();
        const bool is_first = round == 0 && micro == 0;
        // Zeros meanwhile, so that zeroing them is noticed.
        EXPECT_EQ(pair.model->parameters()[0].grad().any().item<bool>(), !is_first);
      }
    }
    expect_same_gradients(*pair.model, *pair.ddp.module(), "2 + 2", 1e-6);
    expect_error([&] { unit_of(*pair.model->blocks[0])->set_is_last_backward(true); }, {"is for the root"});
    // FSDP-88: on a CPU there is nothing to wait for.
    expect_error([&] { unit_of(*pair.model->blocks[0])->set_post_optim_event(c10::Event(at::kCPU)); },
                 {"is for the root"});
    pair.root.set_post_optim_event(c10::Event(at::kCPU));
    loss_of(pair.model, world, 0).backward();
  });
}

/// One of its two layers, by rank.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : first(register_module("first", torch::nn::Linear(4, 4))),
        second(register_module("second", torch::nn::Linear(4, 4))),
        last(register_module("last", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& input, bool uses_second) {
    const auto hidden = uses_second ? second->forward(input) : first->forward(input);
    return last->forward(at::tanh(hidden));
  }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(Branches);

// FSDP-65
TEST(FsdpGradients, RanksMayUseDifferentParametersOfAUnit) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = built_from_seed([] { return Branches(); });
    auto plain = built_from_seed([] { return Branches(); });
    const FullyShardOptions options{.mesh = mesh_of(world)};
    fully_shard({model->first.ptr(), model->second.ptr()}, options);
    auto root = fully_shard(model, options);
    root.set_reduce_scatter_unused_params(true);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      plain->zero_grad();
      const auto input = at::ones({2, 4}) * (world.rank() + 1);
      model->forward(input, world.rank() == 1).pow(2).mean().backward();
      // One process with both ranks' data.
      for (int rank = 0; rank < 2; ++rank) {
        (plain->forward(at::ones({2, 4}) * (rank + 1), rank == 1).pow(2).mean() / 2).backward();
      }
      expect_same_gradients(*model, *plain, "branches", 1e-6);
    }
  });
}

// FSDP-68
TEST(FsdpGradients, HooksOfShardsSeeReducedGradients) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    loss_of(pair.ddp, world, 0).backward();
    auto shard = pair.model->named_parameters()["head.weight"];
    std::vector<at::Tensor> seen;
    shard.register_hook([&](const at::Tensor& grad) {
      seen.push_back(grad.clone());
      return grad * 2;
    });
    loss_of(pair.model, world, 0).backward();
    ASSERT_EQ(seen.size(), 1u);
    const auto expected = layout_of(shard)->cut(pair.ddp.module()->head->weight.grad());
    EXPECT_TRUE(seen[0].equal(expected));
    EXPECT_TRUE(shard.grad().equal(expected * 2));
    // What was reduced, not its sum with what is there.
    loss_of(pair.model, world, 0).backward();
    EXPECT_TRUE(seen[1].equal(expected));
    EXPECT_TRUE(shard.grad().equal(expected * 4));
  });
}

// FSDP-69
TEST(FsdpGradients, AHookMayChangeWhatWasReduced) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    loss_of(pair.ddp, world, 0).backward();
    unit_of(*pair.model->blocks[1])->set_all_reduce_hook([](const at::Tensor& gradients) { gradients.mul_(3); });
    loss_of(pair.model, world, 0).backward();
    for (const auto& parameter : pair.ddp.module()->blocks[1]->parameters()) parameter.mutable_grad().mul_(3);
    expect_same_gradients(*pair.model, *pair.ddp.module(), "hooked");

    // There are no streams on a CPU, but what is refused with replicas is.
    const c10::Stream stream(c10::Stream::DEFAULT, at::Device(at::kCPU));
    unit_of(*pair.model->blocks[1])
        ->set_all_reduce_hook([](const at::Tensor& gradients) { gradients.mul_(2); }, stream);
    pair.model->zero_grad();
    loss_of(pair.model, world, 0).backward();
    for (const auto& parameter : pair.ddp.module()->blocks[1]->parameters()) parameter.mutable_grad().mul_(2.0 / 3);
    expect_same_gradients(*pair.model, *pair.ddp.module(), "on a stream", 1e-6);
    const auto replicas = init_device_mesh("cpu", {2, 1}, {.mesh_dim_names = {"replicate", "shard"}});
    // From a seed: other threads may be building from theirs.
    auto hybrid = fully_shard(built_from_seed([] { return torch::nn::Linear(2, 2); }), {.mesh = replicas});
    expect_error([&] { hybrid.set_all_reduce_hook([](const at::Tensor&) {}, stream); }, {"a mesh with replicas"});
    const c10::Stream of_gpu(c10::Stream::UNSAFE, at::Device(at::kCUDA, 0), 0);
    expect_error([&] { pair.root.set_all_reduce_hook([](const at::Tensor&) {}, of_gpu); }, {"cuda:0", "one of cpu"});

    auto other = net();
    auto root = sharded(other, {.mesh = mesh_of(world)});
    int calls = 0;
    root.register_comm_hook([&](const auto& outputs, const auto& inputs, const GroupPtr& group) {
      ++calls;
      for (std::size_t i = 0; i < outputs.size(); ++i) reduce_scatter_tensor(outputs[i], inputs[i], group);
    });
    expect_error([&] { root.register_comm_hook([](const auto&, const auto&, const GroupPtr&) {}); }, {"called before"});
    loss_of(other, world, 0).backward();
    EXPECT_EQ(calls, 4);
    EXPECT_TRUE(other->parameters()[0].grad().equal(pair.model->parameters()[0].grad()));
    expect_error([&] { root.register_comm_hook([](const auto&, const auto&, const GroupPtr&) {}); },
                 {"before the first forward"});
  });
}

struct CountingGather : AllGatherComm {
  at::Tensor allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& /*group*/) override {
    ++allocations;
    return at::empty({elements}, options);
  }
  Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
              const GroupPtr& group) override {
    ++runs;
    return AllGatherComm::run(outputs, inputs, group);
  }
  int allocations = 0;
  int runs = 0;
};

struct CountingReduce : ReduceScatterComm {
  Pending run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
              const GroupPtr& group) override {
    ++runs;
    groups.push_back(group);
    return ReduceScatterComm::run(outputs, inputs, group);
  }
  int runs = 0;
  std::vector<GroupPtr> groups;
};

// FSDP-70
TEST(FsdpGradients, CollectivesCanBeReplaced) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    const auto gather = std::make_shared<CountingGather>();
    const auto reduce = std::make_shared<CountingReduce>();
    auto unit = *unit_of(*pair.model->blocks[1]);
    unit.set_custom_all_gather(gather);
    unit.set_custom_reduce_scatter(reduce);
    pair.root.set_separate_reduce_scatter_group();
    pair.root.set_max_reductions_in_flight(3);
    expect_error([&] { pair.root.set_max_reductions_in_flight(0); }, {"at least 1"});
    expect_error([&] { unit.set_custom_all_gather(nullptr); }, {"null pointer"});
    for (int step = 0; step < 2; ++step) {
      pair.model->zero_grad();
      pair.ddp.module()->zero_grad();
      loss_of(pair.model, world, step).backward();
      loss_of(pair.ddp, world, step).backward();
      expect_same_gradients(*pair.model, *pair.ddp.module(), "replaced");
    }
    EXPECT_EQ(gather->runs, 4);
    EXPECT_EQ(gather->allocations, 4);
    EXPECT_EQ(reduce->runs, 2);
    EXPECT_NE(reduce->groups[0], world.group());
  });
}

// FSDP-60
TEST(FsdpGradients, WeightsCountAsTheyDoInDdp) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    const double weight = world.rank() == 0 ? 3 : 5;
    for (int step = 0; step < 2; ++step) {
      pair.model->zero_grad();
      pair.ddp.module()->zero_grad();
      {
        const auto no_sync = pair.root.no_sync();
        pair.root.backward(loss_of(pair.model, world, step), weight);
      }
      pair.root.backward(loss_of(pair.model, world, step + 5), weight + 1);
      {
        const auto no_sync = pair.ddp.no_sync();
        pair.ddp.backward(loss_of(pair.ddp, world, step), weight);
      }
      pair.ddp.backward(loss_of(pair.ddp, world, step + 5), weight + 1);
      expect_same_gradients(*pair.model, *pair.ddp.module(), "weighted");
    }
    // A rank without samples, whose mean is no number.
    pair.model->zero_grad();
    pair.ddp.module()->zero_grad();
    const auto empty = [&](auto& model) {
      const auto loss = loss_of(model, world, 7);
      return world.rank() == 1 ? loss * std::numeric_limits<float>::quiet_NaN() : loss;
    };
    pair.root.backward(empty(pair.model), world.rank() == 1 ? 0 : 2);
    pair.ddp.backward(empty(pair.ddp), world.rank() == 1 ? 0 : 2);
    expect_same_gradients(*pair.model, *pair.ddp.module(), "without samples");
    // Weighted ones that wait are not averaged as if they were not.
    {
      const auto no_sync = pair.root.no_sync();
      pair.root.backward(loss_of(pair.model, world, 0), weight);
    }
    expect_error([&] { loss_of(pair.model, world, 0).backward(); }, {"end with backward(loss, weight) as well"});
    pair.root.reset_iter_state();
    expect_error([&] { pair.root.backward(loss_of(pair.model, world, 0), -1); }, {"a weight of -1"});
  });
}

// FSDP-41
TEST(FsdpGradients, OfGradientsAreRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { loss_of(model, world, 0).backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                 {"unit '", "create_graph", "DistributedDataParallel"});
    // Nothing is left of it.
    unit_of(*model)->reset_iter_state();
    model->zero_grad();
    Pair pair(world);
    loss_of(model, world, 1).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*model, *pair.ddp.module(), "afterwards");
  });
}

// FSDP-41
TEST(FsdpGradients, AViewOfAUnitsOutputMayBeWritten) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    const auto loss = [&](auto& model) {
      auto hidden = model->blocks[0]->forward(at::ones({2, 7}));
      auto view = hidden.view({14});
      view.mul_(3);
      return view.pow(2).mean();
    };
    loss(pair.model).backward();
    auto plain = net();
    loss(plain).backward();
    expect_same_gradients(*pair.model, *plain, "written view", 1e-6);
  });
}

// FSDP-37
TEST(FsdpGradients, ABackwardInsideOfABackwardTrainsRight) {
  struct Inner : torch::autograd::Function<Inner> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, int64_t address) {
      context->saved_data["block"] = address;
      context->save_for_backward({input});
      const at::NoGradGuard no_grad;
      // NOLINTNEXTLINE(performance-no-int-to-ptr): how a module gets into a node
      return reinterpret_cast<BlockImpl*>(address)->forward(input);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grads) {
      const at::AutoGradMode with_grad(true);
      auto input = context->get_saved_variables()[0].detach().requires_grad_();
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      reinterpret_cast<BlockImpl*>(context->saved_data["block"].toInt())->forward(input).backward(grads[0]);
      return {input.grad(), at::Tensor()};
    }
  };
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    const auto loss = [&](auto& model, int step) {
      auto hidden = model->table->forward(batch(world, step));
      // The inner ones are over by then, and the step is not.
      hidden.register_hook([&pair](const at::Tensor&) {
        for (const auto& shard : pair.model->parameters()) EXPECT_FALSE(shard.grad().defined());
      });
      for (auto& block : model->blocks) hidden = Inner::apply(hidden, reinterpret_cast<int64_t>(block.get()));
      return model->head->forward(hidden).pow(2).mean();
    };
    for (int step = 0; step < 2; ++step) {
      pair.model->zero_grad();
      pair.ddp.module()->zero_grad();
      loss(pair.model, step).backward();
      loss_of(pair.ddp, world, step).backward();
      expect_same_gradients(*pair.model, *pair.ddp.module(), "reentrant", 1e-6);
    }
  });
}

// FSDP-90
TEST(FsdpGradients, AnErrorInAHookReachesTheCaller) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    bool should_throw = true;
    unit_of(*model->blocks[1])->set_all_reduce_hook([&](const at::Tensor&) {
      if (should_throw) throw std::runtime_error("the hook's own");
    });
    expect_error([&] { loss_of(model, world, 0).backward(); }, {"the hook's own"});
    should_throw = false;
    model->zero_grad();
    Pair pair(world);
    loss_of(model, world, 1).backward();
    loss_of(pair.ddp, world, 1).backward();
    expect_same_gradients(*model, *pair.ddp.module(), "afterwards");
  });
}

// FSDP-51, FSDP-55, FSDP-56
TEST(FsdpGradients, KeepTheirPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto layer = [&](const MixedPrecisionPolicy& policy) {
      auto linear = built_from_seed([] { return torch::nn::Linear(4, 4); });
      fully_shard(linear, {.mesh = mesh_of(world), .mp_policy = policy});
      return linear;
    };
    const auto run = [](torch::nn::Linear& linear, double value) {
      linear->forward(at::full({1, 4}, value)).sum().backward();
      return linear->parameters()[0].grad();
    };
    auto low = layer({.param_dtype = at::kBFloat16, .keep_low_precision_grads = true});
    EXPECT_EQ(run(low, 1).scalar_type(), at::kBFloat16);
    auto high = layer({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    EXPECT_EQ(run(high, 1).scalar_type(), at::kFloat);

    // 256 + 1 is 256 in bfloat16.
    auto sums = layer({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    {
      const auto no_sync = unit_of(*sums)->no_sync();
      run(sums, 256);
    }
    EXPECT_EQ(run(sums, 1)[0][0].item<double>(), 257);

    // 60000 + 60000 is infinite in float16.
    auto half = layer({.param_dtype = at::kHalf});
    EXPECT_EQ(run(half, 60000)[0][0].item<double>(), 60000);
  });
}

// FSDP-55
TEST(FsdpGradients, EvaluationMayBeInFullPrecision) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (const bool reshards : {true, false}) {
      const auto build = [&](bool is_full) {
        auto model = net();
        sharded(model, {.mesh = mesh_of(world),
                        .reshard_after_forward = reshards,
                        .mp_policy = {.param_dtype = at::kBFloat16, .full_precision_in_eval = is_full}});
        return model;
      };
      auto plain = net();
      plain->eval();
      auto model = build(true);
      auto low = build(false);
      SGD optimizer(model->parameters(), SGDOptions(0.1));
      SGD lower(low->parameters(), SGDOptions(0.1));
      const auto step = [&](int number) {
        loss_of(model, world, number).backward();
        loss_of(low, world, number).backward();
        optimizer.step();
        lower.step();
      };
      for (int round = 0; round < 2; ++round) {
        step(round);
        // Parameters in evaluation are those that train, not what is left of them in bfloat16.
        const auto state = full_state_dict(*model);
        const at::NoGradGuard no_grad;
        for (auto& item : plain->named_parameters()) item.value().copy_(state.at(item.key()));
        model->eval();
        const auto output = model->forward(batch(world, 7));
        EXPECT_EQ(output.scalar_type(), at::kFloat);
        EXPECT_TRUE(output.equal(plain->forward(batch(world, 7))));
        EXPECT_EQ(low->forward(batch(world, 7)).scalar_type(), at::kBFloat16);
        model->train();
      }
      step(2);
      for (std::size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(model->parameters()[i].equal(low->parameters()[i])) << i;
      }
      // Fine-tuning in evaluation mode: gradients are in full precision as well.
      optimizer.zero_grad();
      model->eval();
      plain->zero_grad();
      const auto state = full_state_dict(*model);
      {
        const at::NoGradGuard no_grad;
        for (auto& item : plain->named_parameters()) item.value().copy_(state.at(item.key()));
      }
      loss_of(model, world, 3).backward();
      DistributedDataParallel ddp(plain, DdpOptions{.process_group = world.group()});
      loss_of(ddp, world, 3).backward();
      expect_same_gradients(*model, *plain, "in evaluation mode");
      const auto loss = loss_of(model, world, 4);
      model->train();
      expect_error([&] { loss_of(model, world, 4); }, {"between training and evaluation", "backward first"});
    }
  });
}

// FSDP-52
TEST(FsdpGradients, OperandsAndOutputsAreCast) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto cast = built_from_seed([] { return torch::nn::Linear(4, 4); });
    fully_shard(cast,
                {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    auto input = at::ones({2, 4}).requires_grad_();
    const auto output = cast->forward(input);
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    output.sum().backward();
    EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(cast->parameters()[0].grad().scalar_type(), at::kFloat);

    auto plain = built_from_seed([] { return torch::nn::Linear(4, 4); });
    fully_shard(plain,
                {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    expect_error([&] { plain->forward(at::ones({2, 4})); }, {"dtype"});
    // Indices stay what they are.
    auto table = torch::nn::Embedding(5, 4);
    fully_shard(table, {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}});
    EXPECT_EQ(table->forward(at::ones({3}, at::kLong)).scalar_type(), at::kBFloat16);
  });
}

// FSDP-71
TEST(FsdpGradients, NormsCountEveryElementOnce) {
  testing::run_threads_in_gtest({.world_size = 4}, [](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    for (const double order : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      Pair pair(world, {.mesh = mesh, .ignored_params = {}});
      loss_of(pair.model, world, 0).backward();
      loss_of(pair.ddp, world, 0).backward();
      const auto norm = pair.root.clip_grad_norm_(0.01, order);
      const auto expected = clip_grad_norm_(pair.ddp.parameters(), 0.01, {.norm_type = order});
      EXPECT_TRUE(at::allclose(norm, expected, 1e-4)) << norm << expected;
      expect_same_gradients(*pair.model, *pair.ddp.module(), "clipped", 1e-6);
    }
    // An ignored parameter, which every rank has whole, counts once.
    auto model = net();
    auto plain = net();
    const auto ignored = model->head->weight;
    auto root = sharded(model, {.mesh = mesh_of(world), .ignored_params = {ignored}});
    for (const auto& item : model->named_parameters())
      item.value().mutable_grad() = at::ones_like(item.value().detach());
    for (const auto& item : plain->named_parameters())
      item.value().mutable_grad() = at::ones_like(item.value().detach());
    EXPECT_TRUE(at::allclose(root.clip_grad_norm_(1e9), clip_grad_norm_(plain->parameters(), 1e9)));
    expect_error([&] { unit_of(*model->blocks[0])->clip_grad_norm_(1); }, {"is for the root"});
  });
}

// FSDP-61
TEST(FsdpGradients, ADivideFactorIsOfItsUnit) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Pair pair(world);
    unit_of(*pair.model->blocks[0])->set_gradient_divide_factor(8);
    loss_of(pair.model, world, 0).backward();
    loss_of(pair.ddp, world, 0).backward();
    for (const auto& parameter : pair.ddp.module()->blocks[0]->parameters()) parameter.mutable_grad().mul_(0.25);
    expect_same_gradients(*pair.model, *pair.ddp.module(), "by eight", 1e-6);
  });
}

}  // namespace lockstep::fsdp_gradients_test
