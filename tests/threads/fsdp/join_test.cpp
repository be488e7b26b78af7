// Ranks with different numbers of inputs train a sharded model as DDP trains a whole one.
#include "lockstep/fsdp/join.h"
#include "lockstep/join/join.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_join_test {

using namespace fsdp_models;

void train(auto& model, SGD& optimizer, Joinable& joinable, const World& world, int inputs,
           const JoinSettings& settings, const std::function<void(const at::Tensor&)>& backward) {
  const auto update = [&] { optimizer.step(); };
  Join scope({&joinable}, settings);
  scope.mirror(update).run([&] {
    for (int step = 0; step < inputs; ++step) {
      optimizer.zero_grad();
      backward(loss_of(model, world, step));
      update();
    }
  });
}

// JOIN-53
TEST(FsdpJoin, MirrorsStepsOfRanksWithMoreInputs) {
  for (const int size : {2, 4}) {
    for (const auto& options : {FullyShardOptions{}, FullyShardOptions{.reshard_after_forward = true},
                                FullyShardOptions{.reshard_after_forward = false}}) {
      for (const bool by_world : {true, false}) {
        testing::run_threads_in_gtest({.world_size = size}, [&](const World& world) {
          const JoinSettings settings{.options = {.divide_by_initial_world_size = by_world}};
          const int inputs =
              1 + 2 * world.rank();  // rank 0 runs out after the first, whose order differs from later ones
          DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
          SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
          const auto backward = [](const at::Tensor& loss) { loss.backward(); };
          train(ddp, plain, ddp, world, inputs, settings, backward);
          auto model = net();
          auto sharding = options;
          sharding.mesh = mesh_of(world);
          const auto root = sharded(model, sharding);
          FsdpJoinable joinable(root);
          SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
          train(model, optimizer, joinable, world, inputs, settings, backward);
          expect_same_parameters(*model, *ddp.module(), "uneven");
          // And on, outside of the scope.
          for (int step = 0; step < 2; ++step) {
            optimizer.zero_grad();
            plain.zero_grad();
            loss_of(model, world, step).backward();
            loss_of(ddp, world, step).backward();
            optimizer.step();
            plain.step();
          }
          expect_same_parameters(*model, *ddp.module(), "afterwards");
        });
      }
    }
  }
}

// JOIN-52, JOIN-53
TEST(FsdpJoin, WeightsOfRanksThatRanOutAreZero) {
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    const JoinSettings settings{.options = {.weighted = true}};
    const int inputs = 2 + 2 * world.rank();
    DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
    SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
    train(ddp, plain, ddp, world, inputs, settings,
          [&](const at::Tensor& loss) { ddp.backward(loss, 3 + world.rank()); });
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    FsdpJoinable joinable(root);
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    train(model, optimizer, joinable, world, inputs, settings,
          [&](const at::Tensor& loss) { root.backward(loss, 3 + world.rank()); });
    expect_same_parameters(*model, *ddp.module(), "weighted");
  });
}

// JOIN-53
TEST(FsdpJoin, RefusesScopesThatCannotBeMirrored) {
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    expect_error([&] { FsdpJoinable(*unit_of(*model->blocks[0])); }, {"is for the root"});
    FsdpJoinable joinable(root);
    {
      Join scope({&joinable}, {.enable = true});
      expect_error([&] { loss_of(model, world, 0); }, {"would not step their shards", "mirror(update)"});
      scope.mirror([] {});
      {
        const at::NoGradGuard no_grad;
        expect_error([&] { loss_of(model, world, 0); }, {"Evaluate outside of it"});
      }
      loss_of(model, world, 0).backward();
      expect_error([&] { loss_of(model, world, 1).backward(); }, {"has a gradient of an earlier backward"});
      root.reset_iter_state();
      model->zero_grad();
      {
        const auto no_sync = root.no_sync();
        expect_error([&] { loss_of(model, world, 1).backward(); }, {"without gradient sync inside of a Join scope"});
      }
      root.reset_iter_state();
      scope.finish();
    }
  });
}

// JOIN-53
TEST(FsdpJoin, RefusesStepsThatLiveRanksLeaveOut) {
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    auto model = net();
    auto root = sharded(model, {.mesh = mesh_of(world)});
    FsdpJoinable joinable(root);
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    Join scope({&joinable});
    scope.mirror([&] { optimizer.step(); });
    const auto run = [&] {
      scope.run([&] {
        for (int step = 0; step < 1 + 3 * world.rank(); ++step) {
          optimizer.zero_grad();
          loss_of(model, world, step).backward();
          if (step != 1) optimizer.step();  // which the rank that ran out cannot know
        }
      });
    };
    std::string error;
    try {
      run();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    EXPECT_THAT(error, ::testing::HasSubstr("ranks have not stepped alike in this Join scope"));
  });
}

}  // namespace lockstep::fsdp_join_test
