// Optimizers that step in backward, gradients that are reduced late, and gradients reduced one by one.
#include <torch/serialize.h>

#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

OptimizerPtr make_sgd(std::vector<at::Tensor> parameters) {
  return std::make_shared<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// Parameters after some steps of one process with the whole batch.
std::vector<at::Tensor> trained(const std::vector<int64_t>& sizes, const at::Tensor& batch, int steps) {
  auto model = mlp(sizes);
  const auto optimizer = make_sgd(model->parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    model->forward(batch).pow(2).mean().backward();
    optimizer->step();
  }
  return model->parameters();
}

// DDP-86
TEST(OptimizerInBackward, StepsWhenTheGradientIsThereAndDropsIt) {
  const auto batch = random_batch(6, 4, 2);
  auto model = mlp({4, 3, 2});
  apply_optimizer_in_backward(make_sgd, model->parameters());
  for (int step = 0; step < 3; ++step) {
    model->forward(batch).pow(2).mean().backward();
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
  expect_close(model->parameters(), trained({4, 3, 2}, batch, 3));
  EXPECT_EQ(get_in_backward_optimizers(model->parameters()).size(), 4U);
  // Several per parameter step one after the other.
  apply_optimizer_in_backward(make_sgd, {model->layers[0]->bias});
  EXPECT_EQ(get_in_backward_optimizers({model->layers[0]->bias}).size(), 2U);
  remove_optimizers_in_backward(model->parameters());
  model->forward(batch).pow(2).mean().backward();
  EXPECT_TRUE(model->layers[0]->bias.grad().defined());
}

// DDP-87, DDP-88
LOCKSTEP_THREAD_TEST(DdpOptimizerInBackward, StepsWithTheMean, 2) {
  const auto batch = random_batch(8, 4, 2);
  for (const bool as_view : {false, true}) {
    auto model = mlp({4, 3, 2});
    const std::vector<at::Tensor> some = {model->layers[0]->weight, model->layers[1]->bias};
    apply_optimizer_in_backward(make_sgd, some);
    DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0, .gradient_as_bucket_view = as_view});
    torch::optim::SGD others({model->layers[0]->bias, model->layers[1]->weight},
                             torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      others.zero_grad();
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      for (const auto& parameter : some) EXPECT_FALSE(parameter.grad().defined());
      others.step();
    }
    expect_close(model->parameters(), trained({4, 3, 2}, batch, 4));
    expect_error([&] { ddp.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }); },
                 {"steps in backward"});
    expect_error([&] { const auto guard = ddp.no_sync(); }, {"no_sync", "steps in every backward"});
    remove_optimizers_in_backward(some);
  }
}

// DDP-87: a bucket that has arrived, with all before it, is used while backward still computes other gradients.
LOCKSTEP_THREAD_TEST(DdpOptimizerInBackward, StepsWhileBackwardRuns, 2) {
  const auto batch = random_batch(8, 4, 2);
  const std::vector<int64_t> sizes = {4, 3, 3, 2};
  for (const bool as_view : {false, true}) {
    auto model = mlp(sizes);
    DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0, .gradient_as_bucket_view = as_view});
    ddp.register_fused_optim(make_sgd);
    ddp(my_rows(batch, world)).pow(2).mean().backward();  // one bucket
    const auto before = model->layers[2]->weight.clone();
    bool has_stepped = false;
    // When all ranks are here, the last layer's buckets have arrived; the next gradient looks at them.
    model->layers[1]->weight.register_hook([&](const at::Tensor&) { barrier(world.group()); });
    model->layers[0]->weight.register_hook(
        [&](const at::Tensor&) { has_stepped = !at::equal(model->layers[2]->weight, before); });
    for (int step = 1; step < 4; ++step) {
      has_stepped = false;
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      EXPECT_TRUE(has_stepped) << "step " << step;
      for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    expect_close(model->parameters(), trained(sizes, batch, 4));
  }
}

// DDP-88: a parameter nobody used is not stepped, though its optimizer has momentum.
LOCKSTEP_THREAD_TEST(DdpOptimizerInBackward, LeavesUnusedParametersAlone, 2) {
  auto model = seeded(Branchy());
  apply_optimizer_in_backward(make_sgd, model->parameters());
  DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
  const auto input = random_batch(2, 4, world.rank());
  ddp(input, true, true).sum().backward();
  const auto right = model->right->weight.clone();
  const auto left = model->left->weight.clone();
  ddp(input, true, false).sum().backward();
  EXPECT_TRUE(at::equal(model->right->weight, right));
  EXPECT_FALSE(at::equal(model->left->weight, left));
  remove_optimizers_in_backward(model->parameters());
}

// DDP-88: what is refused stays refused
LOCKSTEP_THREAD_TEST(DdpOptimizerInBackward, IsRefusedInEveryForward, 2) {
  auto model = mlp({4, 2});
  apply_optimizer_in_backward(make_sgd, model->parameters());
  DistributedDataParallel ddp(model, world.group());
  ddp.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }, "mine");
  for (int attempt = 0; attempt < 2; ++attempt) expect_error([&] { ddp(random_batch(1, 4, 1)); }, {"'mine'"});
  remove_optimizers_in_backward(model->parameters());
}

// DDP-88, JOIN-34: a rank without inputs steps with the others, momentum included, and the divisor is as asked for
// (Z-15)
LOCKSTEP_THREAD_TEST(DdpOptimizerInBackward, StepsOnRanksWithoutInputsToo, 2) {
  const auto batch = random_batch(4, 4, 2);
  for (const bool by_all : {true, false}) {
    auto model = mlp({4, 2});
    apply_optimizer_in_backward(make_sgd, model->parameters());
    DistributedDataParallel ddp(model, world.group());
    auto reference = mlp({4, 2});
    const auto optimizer = make_sgd(reference->parameters());
    for (int epoch = 0; epoch < 2; ++epoch) {
      // In the first epoch only rank 1 has inputs, in the second both: of all ranks' gradient half, then all of it.
      const bool has_inputs = world.rank() == 1 || epoch == 1;
      ddp.join(by_all).run([&] {
        for (int step = 0; step < 3 && has_inputs; ++step) ddp(batch).pow(2).mean().backward();
      });
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        (reference->forward(batch).pow(2).mean() * (by_all && epoch == 0 ? 0.5 : 1.0)).backward();
        optimizer->step();
      }
      expect_close(model->parameters(), reference->parameters());
    }
    remove_optimizers_in_backward(model->parameters());
  }
}

// DDP-89
LOCKSTEP_THREAD_TEST(DdpFusedOptimizer, EqualsAStepAfterBackward, 2) {
  const auto batch = random_batch(8, 4, 2);
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
  ddp.register_fused_optim(make_sgd);
  for (int step = 0; step < 4; ++step) ddp(my_rows(batch, world)).pow(2).mean().backward();
  expect_close(ddp.parameters(), trained({4, 3, 2}, batch, 4));
  expect_error([&] { ddp.register_fused_optim(make_sgd); }, {"already"});
  expect_error([&] { const auto guard = ddp.no_sync(); }, {"no_sync"});
  DistributedDataParallel hooked(mlp({4, 2}), world.group());
  hooked.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }, "mine");
  expect_error([&] { hooked.register_fused_optim(make_sgd); }, {"'mine'"});
  DistributedDataParallel subset(mlp({4, 2}), world.group());
  expect_error([&] { subset.register_fused_optim([](auto) { return OptimizerPtr(); }); },
               {"'layer0.weight'", "no optimizer"});
  subset.register_fused_optim(make_sgd, {subset.module()->layers[0]->bias});
  subset(random_batch(1, 4, 1)).sum().backward();
  EXPECT_FALSE(subset.module()->layers[0]->bias.grad().defined());
  EXPECT_TRUE(subset.module()->layers[0]->weight.grad().defined());
}

// DDP-90, DDP-91
LOCKSTEP_THREAD_TEST(DdpDelayed, ReducesNamedParametersAtTheTrigger, 2) {
  auto model = mlp({4, 3, 2}, world.rank());
  const NamedTensors delayed = {{"layer1.weight", model->layers[1]->weight}, {"layer1.bias", model->layers[1]->bias}};
  DistributedDataParallel ddp(
      model, world.group(),
      {.delay_all_reduce_named_params = delayed, .param_to_hook_all_reduce = model->layers[0]->weight});
  EXPECT_EQ(ddp.bucket_plan().parameters().size(), 2U);
  testing::check_equal("copied from rank 0", model->layers[1]->weight, mlp({4, 3, 2}, 0)->layers[1]->weight);
  const auto batch = random_batch(8, 4, 2);
  auto reference = mlp({4, 3, 2}, 0);
  reference->forward(batch).pow(2).mean().backward();
  for (int step = 0; step < 3; ++step) {
    step % 2 == 0 ? zero_grads(ddp) : ddp.zero_grad(false);
    Recorder recorder;
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    // It begins before the trigger's own gradient is in its bucket.
    testing::expect_subset_order(recorder.events(), {"all_reduce", "gradient(layer0.weight)"});
    expect_close(gradients_of(*model), gradients_of(*reference));
    EXPECT_TRUE(model->layers[1]->weight.grad().is_alias_of(model->layers[1]->bias.grad())) << "one buffer";
  }
}

struct TwoDtypesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return wide->forward(narrow->forward(input).to(at::kDouble)); }
  torch::nn::Linear narrow = register_module("narrow", torch::nn::Linear(4, 3));
  torch::nn::Linear wide = register_module("wide", torch::nn::Linear(3, 2));
};
TORCH_MODULE(TwoDtypes);

// DDP-90
LOCKSTEP_THREAD_TEST(DdpDelayed, HasABufferPerDtype, 2) {
  TwoDtypes model;
  model->wide->to(at::kDouble);
  NamedTensors all;
  for (const auto& item : model->named_parameters()) all.emplace_back(item.key(), item.value());
  DistributedDataParallel ddp(
      model, world.group(), {.delay_all_reduce_named_params = all, .param_to_hook_all_reduce = model->narrow->weight});
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    const auto loss = ddp(at::full({1, 4}, world.rank() + 1.0)).sum();
    Recorder recorder;
    loss.backward();
    std::vector<std::pair<std::string, std::size_t>> sums;
    for (const auto& event : recorder.events("launch")) sums.emplace_back(event.dtype, event.bytes);
    EXPECT_EQ(sums, (std::vector<std::pair<std::string, std::size_t>>{{"Float", 15 * 4}, {"Double", 8 * 8}}));
    EXPECT_TRUE(at::equal(model->wide->bias.grad(), at::ones({2}, at::kDouble)));
    EXPECT_TRUE(model->narrow->weight.grad().is_alias_of(model->narrow->bias.grad()));
    EXPECT_TRUE(model->wide->weight.grad().is_alias_of(model->wide->bias.grad()));
  }
}

/// Gradients of the second layer are reduced late: when the first one's comes, or the weight's when its own has come.
struct Delayed {
  Delayed(const World& world, bool is_own_trigger)
      : model(mlp({4, 3, 2})), ddp(model, world.group(), options_for(*model, is_own_trigger)) {}
  static DdpOptions options_for(MlpImpl& model, bool is_own_trigger) {
    const auto& late = *model.layers[1];
    NamedTensors delayed = {{"layer1.weight", late.weight}};
    if (!is_own_trigger) delayed.emplace_back("layer1.bias", late.bias);
    return {.delay_all_reduce_named_params = delayed,
            .param_to_hook_all_reduce = is_own_trigger ? late.weight : model.layers[0]->weight};
  }
  Mlp model;
  DistributedDataParallel<Mlp> ddp;
};

// (D-8): gradients are views of one buffer, which optimizers must not notice
LOCKSTEP_THREAD_TEST(DdpDelayed, OptimizersZeroTheirGradientsEitherWay, 2) {
  const auto batch = random_batch(8, 4, 2);
  for (const bool is_own_trigger : {false, true}) {
    for (const bool sets_to_none : {false, true}) {
      Delayed delayed(world, is_own_trigger);
      const auto optimizer = make_sgd(delayed.model->parameters());
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad(sets_to_none);
        delayed.ddp(my_rows(batch, world)).pow(2).mean().backward();
        optimizer->step();
      }
      expect_close(delayed.model->parameters(), trained({4, 3, 2}, batch, 3));
    }
  }
}

// (D-8)
LOCKSTEP_THREAD_TEST(DdpDelayed, StillReducesAfterALoad, 2) {
  const auto batch = random_batch(8, 4, 2);
  for (const bool is_own_trigger : {false, true}) {
    Delayed delayed(world, is_own_trigger);
    delayed.ddp(my_rows(batch, world)).pow(2).mean().backward();
    auto reference = mlp({4, 3, 2}, /*seed=*/5);
    std::stringstream file;
    torch::save(reference, file);
    torch::load(delayed.model, file);
    zero_grads(delayed.ddp);
    delayed.ddp(my_rows(batch, world)).pow(2).mean().backward();
    reference->forward(batch).pow(2).mean().backward();
    expect_close(gradients_of(*delayed.model), gradients_of(*reference));
  }
}

// (D-8)
// A local backward between a synced forward and its backward does not use up the reduction.
LOCKSTEP_THREAD_TEST(DdpDelayed, LocalBackwardsLeaveTheReductionToSyncedOnes, 2) {
  auto reference = mlp({4, 3, 2});
  for (int rank = 0; rank < 2; ++rank) reference->forward(at::full({1, 4}, rank + 1.0)).sum().backward();
  for (const bool are_all_delayed : {false, true}) {
    auto model = mlp({4, 3, 2});
    NamedTensors delayed;
    for (const auto& item : model->named_parameters()) {
      if (are_all_delayed || item.key().starts_with("layer1")) delayed.emplace_back(item.key(), item.value());
    }
    DistributedDataParallel ddp(
        model, world.group(),
        {.delay_all_reduce_named_params = delayed, .param_to_hook_all_reduce = model->layers[0]->weight});
    const auto input = at::full({1, 4}, world.rank() + 1.0);
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      const auto synced = ddp(input).sum();
      at::Tensor local;
      {
        const auto guard = ddp.no_sync();
        local = ddp(input).sum();
      }
      Recorder recorder;
      local.backward();
      testing::expect_none(recorder.events("launch"), "all_reduce");
      synced.backward();
      // Twice, for the local and the synced one, over two ranks.
      for (std::size_t i = 0; i < 4; ++i) {
        testing::check_equal("gradient", model->parameters()[i].grad(), reference->parameters()[i].grad(),
                             {1e-5, 1e-6});
      }
    }
  }
}

LOCKSTEP_THREAD_TEST(DdpDelayed, NoSyncIsAboutForward, 2) {
  const auto input = at::full({1, 4}, world.rank() + 1.0);
  const auto first = [](double value) { return at::full({2, 4}, value); };
  const auto with_all_delayed = [&](const auto& run) {
    auto model = mlp({4, 2});
    DistributedDataParallel ddp(model, world.group(),
                                {.delay_all_reduce_named_params = {{"layer0.weight", model->layers[0]->weight},
                                                                   {"layer0.bias", model->layers[0]->bias}},
                                 .param_to_hook_all_reduce = model->layers[0]->weight});
    run(ddp);
    return model->layers[0]->weight.grad();
  };
  const double mine = world.rank() + 1;
  // Forward inside, backward outside: local.
  EXPECT_TRUE(at::equal(with_all_delayed([&](auto& ddp) {
                          at::Tensor loss;
                          {
                            const auto guard = ddp.no_sync();
                            loss = ddp(input).sum();
                          }
                          loss.backward();
                        }),
                        first(mine)));
  // Forward outside, backward inside: reduced.
  EXPECT_TRUE(at::equal(with_all_delayed([&](auto& ddp) {
                          const auto loss = ddp(input).sum();
                          const auto guard = ddp.no_sync();
                          loss.backward();
                        }),
                        first(1.5)));
  // One backward of both kinds: reduced.
  EXPECT_TRUE(at::equal(with_all_delayed([&](auto& ddp) {
                          auto loss = ddp(input).sum();
                          {
                            const auto guard = ddp.no_sync();
                            loss = loss + ddp(input).sum();
                          }
                          loss.backward();
                        }),
                        first(3)));
  // Accumulation.
  EXPECT_TRUE(at::equal(with_all_delayed([&](auto& ddp) {
                          {
                            const auto guard = ddp.no_sync();
                            ddp(input).sum().backward();
                          }
                          ddp(input).sum().backward();
                        }),
                        first(3)));
  // Two backwards of one forward: each is.
  EXPECT_TRUE(at::equal(with_all_delayed([&](auto& ddp) {
                          const auto loss = ddp(input).sum();
                          loss.backward({}, /*retain_graph=*/true);
                          loss.backward();
                        }),
                        first(3)));
}

// DDP-92
LOCKSTEP_THREAD_TEST(DdpDelayed, MayConcernAllParameters, 2) {
  auto model = mlp({4, 2});
  const NamedTensors delayed = {{"layer0.weight", model->layers[0]->weight}, {"layer0.bias", model->layers[0]->bias}};
  DistributedDataParallel ddp(
      model, world.group(),
      {.delay_all_reduce_named_params = delayed, .param_to_hook_all_reduce = model->layers[0]->weight});
  EXPECT_EQ(ddp.engine().reducer(), nullptr);
  for (int step = 0; step < 3; ++step) {
    zero_grads(ddp);
    ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
    // The trigger is a delayed one itself.
    EXPECT_TRUE(at::equal(model->layers[0]->weight.grad(), at::full({2, 4}, 1.5)));
    EXPECT_TRUE(at::equal(model->layers[0]->bias.grad(), at::ones({2})));
  }
  expect_error([&] { ddp.set_static_graph(); }, {"set_static_graph", "delayed"});
  expect_error([&] { ddp.bucket_plan(); }, {"bucket_plan", "delayed"});
  expect_error([&] { ddp.check_finalized(); }, {"check_finalized"});
  expect_error([&] { ddp.update_process_group(world.group()); }, {"update_process_group", "delayed"});
  auto other = mlp({4, 2});
  expect_error(
      [&] {
        DistributedDataParallel(
            model, world.group(),
            {.delay_all_reduce_named_params = delayed, .param_to_hook_all_reduce = other->layers[0]->weight});
      },
      {"no parameter of the module"});
}

// DDP-101
LOCKSTEP_THREAD_TEST(DdpPerParameter, EqualsBuckets, 3) {
  const auto batch = random_batch(12, 4, 2);
  auto reference = mlp({4, 3, 2});
  reference->forward(batch).pow(2).mean().backward();
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.per_parameter = true});
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    Recorder recorder;
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    testing::expect_count(recorder.events("launch"), "all_reduce", 4 + 1);  // and which parameters any rank has used
    expect_close(gradients_of(ddp), gradients_of(*reference));
  }
  zero_grads(ddp);
  {
    Recorder recorder;
    const auto guard = ddp.no_sync();
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    EXPECT_TRUE(recorder.events("launch").empty());
  }
  zero_grads(ddp);
  std::size_t calls = 0;
  ddp.register_parameter_hook([&](at::Tensor& gradient, const at::Tensor& parameter) {
    EXPECT_EQ(gradient.sizes(), parameter.sizes());
    gradient.fill_(world.rank());
    ++calls;
  });
  {
    Recorder recorder;
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    EXPECT_TRUE(recorder.events("launch").empty()) << "the hook reduces, or nobody";
  }
  EXPECT_EQ(calls, 4U);
  for (const auto& gradient : gradients_of(ddp)) EXPECT_TRUE((gradient == world.rank()).all().item<bool>());
  expect_error(
      [&] { DistributedDataParallel(mlp({4, 2}), world.group(), {.bucket_cap_mb = 1, .per_parameter = true}); },
      {"per_parameter", "bucket_cap_mb"});
}

// DDP-45, DDP-101: the forward decides, whatever is set when backward runs.
LOCKSTEP_THREAD_TEST(DdpPerParameter, NoSyncIsAboutForward, 2) {
  const auto input = at::full({1, 4}, world.rank() + 1.0);
  const auto gradient_after = [&](const auto& run) {
    DistributedDataParallel ddp(mlp({4, 2}), world.group(), {.per_parameter = true});
    run(ddp);
    return ddp.module()->layers[0]->weight.grad();
  };
  const auto local_loss = [&](auto& ddp) {
    const auto guard = ddp.no_sync();
    return ddp(input).sum();
  };
  const auto expect_equal = [](const at::Tensor& gradient, double value) {
    EXPECT_TRUE(at::equal(gradient, at::full({2, 4}, value))) << gradient;
  };
  // Inside of no_sync(), and backward outside.
  expect_equal(gradient_after([&](auto& ddp) { local_loss(ddp).backward(); }), world.rank() + 1);
  // The other way round.
  expect_equal(gradient_after([&](auto& ddp) {
                 const auto loss = ddp(input).sum();
                 const auto guard = ddp.no_sync();
                 loss.backward();
               }),
               1.5);
  // One of each: a local backward leaves the reduction to the synced one, which has both.
  expect_equal(gradient_after([&](auto& ddp) {
                 const auto synced = ddp(input).sum();
                 local_loss(ddp).backward();
                 synced.backward();
               }),
               3);
  expect_equal(gradient_after([&](auto& ddp) {
                 const auto synced = ddp(input).sum();
                 (synced + local_loss(ddp)).backward();
               }),
               3);
}

}  // namespace
}  // namespace lockstep
