// Tensors on GPUs: between workers by TensorPipe and device maps, and as far as they get without.
#include <torch/nn/modules/linear.h>

#include "lockstep/base/str.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/remote_module.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/on_gpu.h"
#include "tests/support/rpc_linear.h"

namespace lockstep::rpc_gpu_test {

using rpc::RemoteModule;
using rpc::rpc_sync;
using testing::expect_error;

const auto twice = rpc::function("gpu_test.twice", [](at::Tensor x) { return x * 2; });
const auto device_of = rpc::function("gpu_test.device_of", [](at::Tensor x) { return x.device().str(); });
const auto twice_on_gpu = rpc::function("gpu_test.twice_on_gpu", [](at::Tensor x) { return (x.cuda() * 2).cpu(); });

const auto on_cpu = rpc::function("gpu_test.on_cpu", [](rpc::RRef<at::Tensor> tensor) {
  EXPECT_TRUE(tensor.local_value().is_cuda());
  return tensor.local_value().detach().cpu();
});

class RpcOnGpu : public testing::OnGpu {
 protected:
  /// On worker0 of two; GPU 0 of each is the other's.
  static void lead(bool is_mapped, const std::function<void()>& body) {
    testing::run_processes_in_gtest({.world_size = 2, .backend = "gloo"}, [&](const World& world) {
      rpc::RpcOptions options{.fail_on_rref_leak = true};
      if (is_mapped) options.set_device_map(str("worker", 1 - world.rank()), {{{at::kCUDA, 0}, {at::kCUDA, 0}}});
      rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), options);
      if (world.rank() == 0) body();
      rpc::shutdown();
    });
  }
};

// RPC-55
TEST_F(RpcOnGpu, ModulesTakeInputsToTheirDevice) {
  for (const bool is_mapped : {false, true}) {
    lead(is_mapped, [&] {
      const RemoteModule<torch::nn::LinearImpl> module("worker1/cuda:0", std::int64_t{4}, std::int64_t{3});
      const auto x = at::randn({2, 4});
      const auto y = module.forward(x);
      EXPECT_EQ(y.is_cuda(), is_mapped);
      const auto parameters = module.remote_parameters();
      const auto expected = at::linear(x, rpc_sync("worker1", on_cpu, parameters[0]));
      EXPECT_TRUE(at::allclose(y.cpu(), expected, 1e-3, 1e-5));
    });
  }
}

// RPC-56
TEST_F(RpcOnGpu, TensorsTravelByADeviceMapOnly) {
  lead(false, [] {
    expect_error([] { rpc_sync("worker1", twice, at::ones(2, at::kCUDA)); }, {"cuda:0", "device"});
    EXPECT_EQ(rpc_sync("worker1", twice, at::ones(2)).sum().item<float>(), 4) << "the agent goes on";
  });
  lead(true, [] {
    const auto result = rpc_sync("worker1", twice, at::ones(2, at::kCUDA));
    EXPECT_EQ(result.device(), c10::Device(at::kCUDA, 0));
    EXPECT_EQ(result.sum().item<float>(), 4);
    EXPECT_EQ(rpc_sync("worker1", device_of, at::ones(2, at::kCUDA)), "cuda:0");
    EXPECT_EQ(rpc_sync("worker1", device_of, at::ones(2)), "cpu");
  });
}

// RPC-44
TEST_F(RpcOnGpu, GraphsCrossDevices) {
  for (const bool is_mapped : {false, true}) {
    lead(is_mapped, [&] {
      for (const auto root : {at::kCPU, at::kCUDA}) {
        for (int repeat = 0; repeat < 20; ++repeat) {
          const auto x = at::randn({64, 64}).requires_grad_();
          const dist_autograd::Context context;
          auto y = rpc_sync("worker1", twice_on_gpu, (x.cuda() * 3).cpu());
          if (is_mapped) y = rpc_sync("worker1", twice, y.cuda());
          const auto loss = (y.to(root) * y.to(root)).sum();
          dist_autograd::backward(context.id(), {loss});
          const double factor = is_mapped ? 12 : 6;
          EXPECT_TRUE(
              at::allclose(dist_autograd::get_gradients(context.id()).at(x), x.detach() * (2 * factor * factor)));
        }
      }
    });
  }
}

}  // namespace lockstep::rpc_gpu_test
