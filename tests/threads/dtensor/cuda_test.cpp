// DTensors on an accelerator, against the same on one device.
#include "lockstep/dtensor/dtensor.h"

#include "lockstep/comm/collectives.h"
#include "lockstep/dtensor/factories.h"
#include "tests/support/dtensor_line.h"
#include "tests/support/on_gpu.h"

namespace lockstep::dtensor_cuda_test {

using testing::check_equal;
using testing::numbers;

constexpr testing::Tolerance kRounding{.relative = 1e-5, .absolute = 1e-6};

class DTensorOnGpu : public testing::OnGpu {
 protected:
  static DeviceMesh mesh_of(const World& world) { return DeviceMesh::from_group(world.group(), "cuda"); }

  /// Of this device, from the same seed each time.
  static at::Generator seeded(const World& world) {
    auto generator = at::globalContext().defaultGenerator(world.device()).clone();
    generator.set_current_seed(7);
    return generator;
  }
};

// TP-18
TEST_F(DTensorOnGpu, ComputesAsOneDeviceDoes) {
  on_gpu([](const World& world) {
    const auto mesh = mesh_of(world);
    const auto leaf = [&](at::IntArrayRef sizes, uint64_t seed) {
      return numbers(sizes, seed).to(world.device()).requires_grad_();
    };
    const auto x_whole = leaf({6, 4}, 1);
    const auto w_whole = leaf({4, 7}, 2);
    const auto v_whole = leaf({7, 3}, 3);
    at::gelu(x_whole.mm(w_whole)).mm(v_whole).pow(2).sum().backward();

    const auto x = distribute_tensor(x_whole, mesh, {Replicate()});
    const auto w = distribute_tensor(w_whole, mesh, {Shard(1)});
    const auto v = distribute_tensor(v_whole, mesh, {Shard(0)});
    EXPECT_TRUE(w.to_local().is_cuda());
    at::gelu(x.tensor().mm(w)).mm(v).pow(2).sum().backward();
    check_equal("x", DTensor(x.tensor().grad()).full_tensor(), x_whole.grad(), kRounding);
    check_equal("w", DTensor(w.tensor().grad()).full_tensor(), w_whole.grad(), kRounding);
    check_equal("v", DTensor(v.tensor().grad()).full_tensor(), v_whole.grad(), kRounding);
  });
}

// TP-27: gloo has no all-to-all of tensors on a GPU
TEST_F(DTensorOnGpu, GathersCutsAndReduces) {
  on_gpu([](const World& world) {
    const auto mesh = mesh_of(world);
    const auto whole = numbers({5, 4}, 1).to(world.device());
    for (const Placement& cut : {Placement(Shard(0)), Placement(Shard(1))}) {
      for (const bool is_async : {false, true}) {
        const auto pieces = distribute_tensor(whole, mesh, {cut});
        check_equal("gathered", pieces.redistribute({Replicate()}, {.async_op = is_async}).to_local(), whole);
        const auto replicas = distribute_tensor(whole, mesh, {Replicate()});
        check_equal("cut", replicas.redistribute({cut}, {.async_op = is_async}).to_local(), pieces.to_local());
        const auto terms = DTensor::from_local(whole / world.world_size(), mesh, {Partial()});
        check_equal("summed", terms.redistribute({Replicate()}, {.async_op = is_async}).to_local(), whole, kRounding);
        check_equal("scattered", terms.redistribute({cut}, {.async_op = is_async}).to_local(), pieces.to_local(),
                    kRounding);
      }
    }
  });
}

// TP-22, TP-44: pieces of what one device draws, from generators that go on alike
TEST_F(DTensorOnGpu, DrawsWhatOneDeviceDraws) {
  on_gpu([](const World& world) {
    const auto mesh = mesh_of(world);
    auto ours = seeded(world);
    auto one = seeded(world);
    const auto options = at::TensorOptions(world.device());
    for (const Placement& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      const dtensor::FactoryOptions made = {.mesh = mesh, .placements = {placement}, .generator = ours};
      check_equal("normal", dtensor::randn({5, 3}, made).full_tensor(), at::randn({5, 3}, one, options));
      check_equal("uniform", dtensor::rand({7, 2}, made).full_tensor(), at::rand({7, 2}, one, options));
      check_equal("state and offset", ours.get_state(), one.get_state());
      // The default generator: one mask, which every rank sees the same way.
      const DTensor dropped(at::dropout(distribute_tensor(at::ones({6, 50}, options), mesh, {placement}), 0.5, true));
      const auto mask = dropped.full_tensor();
      EXPECT_GT(mask.eq(0).sum().item<int64_t>(), 0);
      EXPECT_GT(mask.eq(2).sum().item<int64_t>(), 0);
      auto first = mask.clone();
      broadcast(first, 0, world.group());
      check_equal("mask", mask, first);
    }
  });
}

}  // namespace lockstep::dtensor_cuda_test
