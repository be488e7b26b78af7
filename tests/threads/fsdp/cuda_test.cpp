// Sharded units on an accelerator: two ranks share one GPU by gloo; one rank is made to shard, alone and over NCCL.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/comm/values.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/testing/delay.h"
#include "lockstep/testing/fsdp/delay_models.h"
#include "lockstep/testing/fsdp/parity.h"
#include "lockstep/testing/fsdp/states.h"
#include "lockstep/testing/fsdp/transformer.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/fsdp_models.h"
#include "tests/support/on_gpu.h"

namespace lockstep::fsdp_cuda_test {

using namespace fsdp_models;

class FsdpOnGpu : public testing::OnGpu {
 protected:
  static FullyShardOptions options_of(const World& world) {
    return {.mesh = DeviceMesh::from_group(world.group(), "cuda"), .force_sharding = true};
  }

  template <class Model>
  static at::Tensor loss_on_gpu(Model& model, const World& world, int step) {
    return model->forward(batch(world, step).to(world.device())).pow(2).mean();
  }

  template <class Model>
  static void train(Model& model, SGD& optimizer, const World& world, int steps = 5) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      loss_on_gpu(model, world, step).backward();
      optimizer.step();
    }
  }

  /// Trained by DDP.
  static Net reference(const World& world) {
    auto model = net();
    model->to(world.device());
    DistributedDataParallel ddp(model, DdpOptions{.process_group = world.group()});
    SGD optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
    train(ddp, optimizer, world);
    return model;
  }
};

// FSDP-17, FSDP-19, FSDP-25, FSDP-60, FSDP-87
TEST_F(FsdpOnGpu, TrainsAsDdpDoes) {
  on_gpu([](const World& world) {
    const auto expected = reference(world);
    for (const auto reshard : {std::optional<ReshardAfterForward>(), std::optional<ReshardAfterForward>(false)}) {
      for (const bool is_flat : {false, true}) {
        auto model = net();  // on the CPU: sharding moves it
        auto options = options_of(world);
        options.reshard_after_forward = reshard;
        options.use_orig_params = !is_flat;
        auto root = sharded(model, options);
        EXPECT_TRUE(model->parameters()[0].is_cuda());
        SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
        train(model, optimizer, world);
        const auto guard = root.summon_full_params();
        EXPECT_TRUE(at::allclose(model->blocks[1]->up->weight, expected->blocks[1]->up->weight, 1e-5, 1e-7));
        EXPECT_TRUE(at::allclose(model->table->weight, expected->table->weight, 1e-5, 1e-7));
      }
    }
  });
}

// FSDP-57, FSDP-58
TEST_F(FsdpOnGpu, OffloadsShardsGradientsAndStateToTheHost) {
  on_gpu([](const World& world) {
    const auto expected = reference(world);
    for (const bool pins : {true, false}) {
      auto model = net();
      auto options = options_of(world);
      options.offload_policy = CPUOffloadPolicy{.pin_memory = pins};
      auto root = sharded(model, options);
      for (const auto& shard : model->parameters()) {
        EXPECT_TRUE(shard.is_cpu());
        EXPECT_EQ(shard.is_pinned(), pins && shard.numel() > 0);
      }
      SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
      train(model, optimizer, world);
      for (const auto& shard : model->parameters()) EXPECT_TRUE(shard.is_cpu() && shard.grad().is_cpu());
      const auto state = full_state_dict(*model);
      for (const auto& item : expected->named_parameters()) {
        EXPECT_TRUE(at::allclose(state.at(item.key()).cpu(), item.value().cpu(), 1e-5, 1e-7)) << item.key();
      }
      // Accumulation adds to gradients on the host.
      optimizer.zero_grad();
      for (int i = 0; i < 2; ++i) loss_on_gpu(model, world, 1).backward();
      const auto twice = model->parameters()[0].grad().clone();
      optimizer.zero_grad();
      loss_on_gpu(model, world, 1).backward();
      EXPECT_TRUE(at::allclose(twice, model->parameters()[0].grad() * 2, 1e-5, 1e-7));
    }
  });
}

// FSDP-59
TEST_F(FsdpOnGpu, AnOffloadedModelCannotBeMovedToTheDevice) {
  on_gpu([](const World& world) {
    auto model = net();
    auto options = options_of(world);
    options.offload_policy = CPUOffloadPolicy{};
    sharded(model, options);
    model->to(world.device());
    expect_error([&] { loss_on_gpu(model, world, 0); }, {"'table.weight'", "cuda", "keep shards on the host"});
  });
}

// FSDP-58, TEST-60: nobody but the library waits for gradients on their way to the host.
TEST_F(FsdpOnGpu, GradientsOnTheirWayToTheHostAreAwaited) {
  on_gpu([](const World& world) {
    auto model = net();
    auto options = options_of(world);
    options.offload_policy = CPUOffloadPolicy{.pin_memory = true};
    sharded(model, options);
    const auto gradients_of_step = [&](bool waits) {
      for (const auto& shard : model->parameters()) {
        // Pinned memory is used again: what it held must not look like a gradient.
        if (shard.grad().defined()) shard.mutable_grad().fill_(NAN);
        shard.mutable_grad().reset();
      }
      const auto late = testing::delay_steps("hand_out", std::chrono::milliseconds(50), world.device());
      const auto wait = waits ? testing::delay_steps("finish_copies", std::chrono::milliseconds(0))
                              : testing::drop_steps("finish_copies");
      loss_on_gpu(model, world, 0).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& shard : model->parameters()) gradients.push_back(shard.grad().clone());
      at::ones({1}, world.device()).item<float>();  // the copies are over before their memory is used again
      return gradients;
    };
    const auto expected = gradients_of_step(true);
    const auto again = gradients_of_step(true);
    const auto early = gradients_of_step(false);
    bool is_missed = false;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(again[i], expected[i], 1e-5, 1e-7));
      is_missed = is_missed || !at::allclose(early[i], expected[i], 1e-5, 1e-7);
    }
    EXPECT_TRUE(is_missed) << "without the wait the gradients must not be there yet";
  });
}

// TEST-28, TEST-44, TEST-46, TEST-49: the kit on a device. One rank has NCCL, and so computes there.
TEST_F(FsdpOnGpu, KitKnowsDeviceModes) {
  using namespace testing;
  for (const auto mode : {DeviceInitMode::kBefore, DeviceInitMode::kAfter, DeviceInitMode::kNever}) {
    for (const bool offloads : {false, true}) {
      on_nccl([&](const World& world) {
        ASSERT_TRUE(compute_device().is_cuda());
        const auto whole = NestedWrappedModule::init(world.group(), {.device_init_mode = mode});
        EXPECT_EQ(whole->parameters()[0].is_cuda(), mode != DeviceInitMode::kNever);
        if (mode == DeviceInitMode::kNever) return;
        ParityOptions options{.device_init_mode = mode, .fsdp = {.force_sharding = true}};
        if (offloads) options.fsdp.offload_policy = CPUOffloadPolicy{};
        // One that is offloaded and moved afterwards fails at its first forward, which this expects.
        test_fsdp_parity<NestedWrappedModule>(world.group(), options);
        if (mode != DeviceInitMode::kAfter) test_fsdp_parity<TransformerWithSharedParams>(world.group(), options);
      });
    }
  }
  on_nccl([](const World& world) {
    const MixedPrecisionPolicy low{.param_dtype = at::kHalf};
    test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp = {.mp_policy = low, .force_sharding = true}});
    test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp = {.force_sharding = true}, .use_pure_fp16 = true});
  });
}

// TEST-38
TEST_F(FsdpOnGpu, KitGathersAndZeroesOffloadedModels) {
  using namespace testing;
  on_nccl([](const World& world) {
    const FullyShardOptions fsdp{.offload_policy = CPUOffloadPolicy{}, .force_sharding = true};
    const auto model = NestedWrappedModule::init(
        world.group(), {.fsdp_init_mode = FsdpInitMode::kRecursive, .fsdp = fsdp, .deterministic = true});
    fully_shard(*model, with_mesh(fsdp, world.group()));
    for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_cpu());
    for (const auto& [name, tensor] : get_full_params(*model)) EXPECT_TRUE(tensor.is_cuda()) << name;
    zero_model(*model);
    for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_cpu() && !parameter.any().item<bool>());
  });
}

// FSDP-88, FSDP-89
TEST_F(FsdpOnGpu, WaitsForWhatOtherStreamsDo) {
  on_gpu([](const World& world) {
    const auto expected = reference(world);
    auto model = net();
    sharded(model, options_of(world));
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      auto loss = loss_on_gpu(model, world, step);
      testing::device_sleep(std::chrono::milliseconds(20), world.device());  // after the loss
      loss.backward();
      testing::device_sleep(std::chrono::milliseconds(20),
                            world.device());  // before the step, which gathers must await
      optimizer.step();
    }
    const auto state = full_state_dict(*model);
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-5, 1e-7)) << item.key();
    }
  });
}

// FSDP-88
TEST_F(FsdpOnGpu, WaitsForTheEventOfAStepOnAnotherStream) {
  on_gpu([](const World& world) {
    const auto expected = reference(world);
    auto model = net();
    auto root = sharded(model, options_of(world));
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    const c10::impl::VirtualGuardImpl device(at::kCUDA);
    const auto other = device.getStreamFromGlobalPool(world.device());
    std::vector<at::Tensor> kept;  // gradients must live as long as the other stream reads them
    for (int step = 0; step < 5; ++step) {
      auto loss = loss_on_gpu(model, world, step);
      loss.backward();
      c10::Event reduced(at::kCUDA);
      reduced.record(device.getStream(world.device()));
      reduced.block(other);
      c10::Event stepped(at::kCUDA);
      {
        const c10::StreamGuard there(other);
        testing::device_sleep(std::chrono::milliseconds(20), world.device());
        optimizer.step();
        stepped.record(other);
      }
      if (step == 0) {
        expect_error([&] { root.set_post_optim_event(c10::Event(at::kCUDA)); }, {"not recorded"});
      }
      root.set_post_optim_event(std::move(stepped));
      for (const auto& parameter : model->parameters()) kept.push_back(parameter.grad());
      optimizer.zero_grad();
    }
    loss_on_gpu(model, world, 0);
    const auto state = full_state_dict(*model);
    for (const auto& item : expected->named_parameters()) {
      EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 1e-5, 1e-7)) << item.key();
    }
  });
}

// FSDP-69
TEST_F(FsdpOnGpu, HooksRunOnTheirStream) {
  on_gpu([](const World& world) {
    auto model = net();
    auto same = net();
    auto root = sharded(model, options_of(world));
    sharded(same, options_of(world));
    const c10::impl::VirtualGuardImpl device(at::kCUDA);
    const auto other = device.getStreamFromGlobalPool(world.device());
    for (auto& block : model->blocks) {
      unit_of(*block)->set_all_reduce_hook(
          [&](const at::Tensor& gradients) {
            EXPECT_EQ(device.getStream(world.device()), other);
            testing::device_sleep(std::chrono::milliseconds(20), world.device());
            gradients.mul_(3);
          },
          other);
    }
    loss_on_gpu(model, world, 0).backward();
    loss_on_gpu(same, world, 0).backward();
    const auto expected = same->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto factor = item.key().starts_with("block") ? 3.0 : 1.0;
      EXPECT_TRUE(at::allclose(item.value().grad(), expected[item.key()].grad() * factor, 1e-5, 1e-7)) << item.key();
    }
  });
}

// FSDP-50, FSDP-52
TEST_F(FsdpOnGpu, ComputesInLowPrecision) {
  on_gpu([](const World& world) {
    auto model = net();
    auto options = options_of(world);
    options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    sharded(model, options);
    SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
    train(model, optimizer, world);
    const auto expected = reference(world);
    const auto state = full_state_dict(*model);
    for (const auto& item : expected->named_parameters()) {
      EXPECT_EQ(state.at(item.key()).scalar_type(), at::kFloat);
      EXPECT_TRUE(at::allclose(state.at(item.key()), item.value(), 0.05, 0.02)) << item.key();
    }
  });
}

}  // namespace lockstep::fsdp_cuda_test
