// Whole parameters in a scope: what is seen there, what stays of it, and what is refused.
#include "lockstep/fsdp/summon.h"

#include <torch/nn/init.h>

#include "lockstep/optim/grad_scaler.h"
#include "tests/support/fsdp_state_models.h"

namespace lockstep::summon_test {

using namespace fsdp_state_models;
using testing::expect_error;

void on_ranks(int world_size, const std::function<void(const World&)>& body) {
  testing::run_threads_in_gtest({.world_size = world_size}, body);
}

// FSDP-79
TEST(Summon, ShowsWholeParametersAndKeepsTheLocalPartOfEdits) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const World& world) {
      auto whole = net();
      auto model = net();
      auto root = sharded(model, {.mesh = mesh_of(world)});
      const at::NoGradGuard no_grad;
      {
        const auto scope = root.summon_full_params();
        const auto expected = whole->named_parameters();
        for (const auto& item : model->named_parameters()) {
          EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
        }
        EXPECT_TRUE(model->blocks[1]->up->weight.equal(whole->blocks[1]->up->weight));
        EXPECT_TRUE(model->head->weight.is_same(model->named_parameters()["head.weight"]));
        EXPECT_TRUE(model->head->bias.is_same(model->named_parameters()["tied"]));
        // Written by its member, by its name, and through data() as optimizers do.
        model->head->weight.fill_(3);
        model->named_parameters()["block0.up.weight"].mul_(2);
        model->blocks[1]->down->bias.data().fill_(4);
        EXPECT_TRUE(model->forward(batch(0)).defined());
      }
      whole->head->weight.fill_(3);
      whole->blocks[0]->up->weight.mul_(2);
      whole->blocks[1]->down->bias.fill_(4);
      whole->forward(batch(0));  // its batch norm counts
      expect_same_model(*model, *whole, "written back");
      EXPECT_TRUE(layout_of(model->parameters()[0]));
      if (world.world_size() > 1) {
        EXPECT_EQ(model->head->weight.storage().nbytes(), 0U);
      }
      EXPECT_TRUE(model->forward(batch(1)).equal(whole->forward(batch(1))));
      {
        const auto scope = root.summon_full_params({.writeback = false});
        model->head->weight.fill_(5);
      }
      expect_same_model(*model, *whole, "not written back");
    });
  }
}

// FSDP-79: ranks that write different things keep their own rows of them.
TEST(Summon, KeepsEachRanksRows) {
  on_ranks(3, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const at::NoGradGuard no_grad;
    {
      const auto scope = root.summon_full_params();
      model->head->weight.fill_(world.rank());
    }
    const auto scope = root.summon_full_params();
    EXPECT_TRUE(model->head->weight.select(1, 0).equal(at::arange(3, at::kFloat)));
  });
}

// FSDP-79
TEST(Summon, TakesOneUnitIfAskedFor) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const at::NoGradGuard no_grad;
    const auto expected = net()->forward(batch(0));
    const auto scope = root.summon_full_params({.recurse = false});
    EXPECT_EQ(model->named_parameters()["head.weight"].size(0), 3);
    EXPECT_EQ(model->named_parameters()["block0.up.weight"].size(0), 7);
    EXPECT_TRUE(model->forward(batch(0)).equal(expected));
    const auto inner = unit_of(*model->blocks[0])->summon_full_params();
    EXPECT_EQ(model->named_parameters()["block0.up.weight"].size(0), 14);
  });
}

// FSDP-79
TEST(Summon, GivesRankZeroOnlyAndHostMemoryIfAskedFor) {
  on_ranks(2, [](const World& world) {
    auto whole = net();
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const at::NoGradGuard no_grad;
    {
      const auto scope = root.summon_full_params({.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (world.rank() == 0) {
        EXPECT_TRUE(model->head->weight.equal(whole->head->weight));
        EXPECT_TRUE(model->head->weight.device().is_cpu());
      } else {
        EXPECT_EQ(model->named_parameters()["head.weight"].size(0), 1);
        expect_error([&] { model->head->weight.sum(); }, {"rank 1", "aten::sum", "rank0_only"});
      }
    }
    EXPECT_TRUE(model->forward(batch(0)).equal(whole->forward(batch(0))));
  });
}

// FSDP-79
TEST(Summon, ShowsAndKeepsGradients) {
  on_ranks(3, [](const World& world) {
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    loss_of(ddp, 0, world.rank()).backward();
    const auto expected = ddp.module()->named_parameters();
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    loss_of(model, 0, world.rank()).backward();
    {
      const auto scope = root.summon_full_params();
      EXPECT_FALSE(model->head->weight.grad().defined());
    }
    {
      const auto scope = root.summon_full_params({.with_grads = true});
      for (const auto& item : model->named_parameters()) {
        EXPECT_TRUE(item.value().grad().equal(expected[item.key()].grad())) << item.key();
      }
      model->head->weight.mutable_grad().fill_(2);
      model->head->bias.mutable_grad().reset();
    }
    const auto shards = model->named_parameters();
    EXPECT_TRUE(shards["head.weight"].grad().eq(2).all().item<bool>());
    EXPECT_EQ(shards["head.weight"].grad().sizes(), shards["head.weight"].sizes());
    EXPECT_FALSE(shards["head.bias"].grad().defined());
    EXPECT_FALSE(model->head->weight.grad().defined());
    {
      const auto scope = root.no_sync();
      loss_of(model, 1).backward();
    }
    expect_error([&] { static_cast<void>(root.summon_full_params({.with_grads = true})); },
                 {"'", "waits to be reduced"});
    {
      const auto scope = root.summon_full_params();  // and what waits is there afterwards
    }
    const auto before = shards["head.weight"].grad().clone();
    loss_of(model, 1).backward();
    const auto sum = shards["head.weight"].grad() - before;
    model->zero_grad();
    loss_of(model, 1).backward();
    EXPECT_TRUE(at::allclose(sum, shards["head.weight"].grad() * 2, 1e-4, 1e-6));
  });
}

// FSDP-79, FSDP-50
TEST(Summon, ShowsFullPrecisionUnderAPolicy) {
  on_ranks(2, [](const World& world) {
    const auto build = [] { return std::make_shared<torch::nn::LinearImpl>(6, 5); };
    const auto whole = built_from_seed(build, 3);
    auto model = built_from_seed(build, 3);
    auto root = fully_shard(*model, {.mesh = mesh_of(world), .mp_policy = {.param_dtype = at::kBFloat16}});
    const auto input = at::ones({2, 6}, at::kBFloat16);
    const auto before = model->forward(input);
    {
      const auto scope = root.summon_full_params();
      EXPECT_TRUE(model->weight.equal(whole->weight));
      const at::NoGradGuard no_grad;
      model->weight.add_(1e-4);
      whole->weight.add_(1e-4);
    }
    EXPECT_TRUE(layout_of(model->parameters()[0])->cut(whole->weight.detach()).equal(model->parameters()[0].detach()));
    const auto output = model->forward(input);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().eq(2).all().item<bool>());
  });
}

// FSDP-79: looking at parameters between forward and backward is no change; changing them is refused by the backward.
TEST(Summon, MayBeOpenedBetweenForwardAndBackward) {
  on_ranks(2, [](const World& world) {
    const auto gradients = [&](bool summons) {
      auto model = net();
      auto root = sharded(model, {.mesh = mesh_of(world)});
      const auto loss = loss_of(model, 0, world.rank());
      if (summons) {
        const auto scope = root.summon_full_params();
        EXPECT_EQ(model->head->weight.sum().dim(), 0);
      }
      loss.backward();
      return model->parameters()[0].grad();
    };
    EXPECT_TRUE(gradients(true).equal(gradients(false)));
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    const auto loss = loss_of(model, 0, world.rank());
    {
      const auto scope = root.summon_full_params();
      const at::NoGradGuard no_grad;
      model->blocks[0]->up->weight.mul_(2);
    }
    EXPECT_ANY_THROW(loss.backward());
  });
}

// FSDP-79
TEST(Summon, RefusesWhatWouldLoseSomething) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { static_cast<void>(root.summon_full_params({.rank0_only = true})); },
                 {"rank0_only and writeback"});
    expect_error([&] { static_cast<void>(root.summon_full_params({.offload_to_cpu = true, .with_grads = true})); },
                 {"with_grads and offload_to_cpu"});
    {
      const auto outer = root.summon_full_params();
      expect_error([&] { static_cast<void>(root.summon_full_params()); }, {"inside of another one"});
      expect_error([&] { loss_of(model, 0).backward(); }, {"a backward inside of a summon_full_params() scope"});
    }
    // A later unit refuses: the earlier ones are not left summoned.
    {
      const auto last = root.summon_full_params({.recurse = false});
      expect_error([&] { static_cast<void>(root.summon_full_params()); }, {"inside of another one"});
    }
    EXPECT_EQ(model->named_parameters()["block0.up.weight"].size(0), 7);
    const auto hidden = model->forward(batch(0));
    hidden.register_hook([&](const at::Tensor&) { static_cast<void>(root.summon_full_params()); });
    expect_error([&] { hidden.sum().backward(); }, {"inside of a backward"});
    root.reset_iter_state();
    loss_of(model, 0).backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

// FSDP-79
TEST(Summon, AppliesAFunctionToWholeParameters) {
  on_ranks(3, [](const World& world) {
    const auto initialise = [](torch::nn::Module& module) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false))
        parameter.copy_(at::arange(parameter.numel()).view_as(parameter));
    };
    auto whole = net();
    whole->apply(initialise);
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    root.apply(initialise);
    expect_same_model(*model, *whole, "applied");
  });
}

// FSDP-72
TEST(Scaler, KeepsTheDtypeOfWhatItScales) {
  on_ranks(2, [](const World& world) {
    ShardedGradScaler scaler({.device = at::kCPU});
    EXPECT_EQ(scaler.get_scale(), 65536);
    EXPECT_EQ(scaler.get_growth_factor(), 2);
    EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
    EXPECT_EQ(scaler.get_growth_interval(), 2000);
    const auto loss = at::full({}, 2, at::kBFloat16);
    EXPECT_EQ(scaler.scale(loss).scalar_type(), at::kBFloat16);
    EXPECT_EQ(scaler.scale(std::vector{loss, at::ones({})})[0].scalar_type(), at::kBFloat16);
    EXPECT_EQ(scaler.scale(loss).item<double>(), 131072);
    // As of Python's ordinary one, promoted.
    EXPECT_EQ(GradScaler({.device = at::kCPU}).scale(loss).scalar_type(), at::kFloat);
    ShardedGradScaler off({.device = at::kCPU, .enabled = false});
    EXPECT_TRUE(off.scale(loss).is_same(loss));

    // A rank without gradients joins, and does as the others do.
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::SGD optimizer(unique_parameters(*model), torch::optim::SGDOptions(0.1));
    scaler.scale(loss_of(model, 0)).backward();
    if (world.rank() == 1) optimizer.zero_grad();
    if (world.rank() == 0) model->parameters()[0].grad().fill_(std::numeric_limits<float>::infinity());
    const auto before = model->parameters()[1].detach().clone();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(model->parameters()[1].detach().equal(before));
    EXPECT_EQ(scaler.get_scale(), 32768);
  });
}

// FSDP-73
TEST(Scaler, SaysHowItWasMisused) {
  on_ranks(2, [](const World& world) {
    auto model = net();
    sharded(model, {.mesh = mesh_of(world)});
    torch::optim::SGD optimizer(unique_parameters(*model), torch::optim::SGDOptions(0.1));
    ShardedGradScaler scaler({.device = at::kCPU, .init_scale = 4});
    expect_error([&] { scaler.unscale_(optimizer); }, {"unscale_() before there is a scale"});
    scaler.scale(loss_of(model, 0)).backward();
    expect_error([&] { scaler.update(); }, {"update() without a step() or unscale_()"});
    scaler.unscale_(optimizer);
    expect_error([&] { scaler.unscale_(optimizer); }, {"unscale_() has already been called"});
    scaler.step(optimizer);
    expect_error([&] { scaler.unscale_(optimizer); }, {"unscale_() is being called after step()"});
    expect_error([&] { scaler.step(optimizer); }, {"step() has already been called"});
    expect_error([&] { scaler.update(0.0); }, {"a scale of 0"});
    expect_error([&] { scaler.update(std::numeric_limits<double>::infinity()); }, {"a scale of inf"});
    expect_error([&] { scaler.update(at::ones({2})); }, {"Float[2]", "one floating-point number"});
    expect_error([&] { scaler.update(at::ones({1}).requires_grad_()); }, {"requires a gradient"});
    expect_error([&] { scaler.update(at::ones({1}, at::kLong)); }, {"one floating-point number"});
    EXPECT_EQ(scaler.get_scale(), 4);
    scaler.update(at::full({}, 8.0));
    EXPECT_EQ(scaler.get_scale(), 8);
    // A scale that was given begins a new step as well.
    scaler.scale(loss_of(model, 1)).backward();
    scaler.unscale_(optimizer);
    scaler.step(optimizer);
  });
}

}  // namespace lockstep::summon_test
