// DDP beside modules that live on other workers.
#include <ATen/record_function.h>
#include <torch/nn/modules/linear.h>

#include <mutex>

#include "lockstep/base/str.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/rpc/dist_autograd.h"
#include "lockstep/rpc/distributed_optimizer.h"
#include "lockstep/rpc/remote_module.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/rpc_linear.h"

namespace lockstep::rpc_ddp_test {

using rpc::make_linear;
using rpc::RemoteModule;
using rpc::rpc_sync;

const auto gradient_of =
    rpc::function("ddp_test.gradient_of", [](rpc::RRef<at::Tensor> parameter, std::int64_t context) {
      return dist_autograd::get_gradients(context).at(parameter.local_value());
    });

void run(int world_size, const std::function<void(const World&)>& body) {
  testing::run_processes_in_gtest({.world_size = world_size, .backend = "gloo"}, [&](const World& world) {
    rpc::init_rpc(str("worker", world.rank()), world.rank(), world.world_size(), {.fail_on_rref_leak = true});
    body(world);
    rpc::shutdown();
  });
}

// RPC-73
TEST(RpcDdp, RemoteLayersTrainAsLocalOnes) {
  run(4, [](const World& world) {
    for (const auto* const place : {"worker0/cpu", "worker0"}) {
      torch::manual_seed(world.rank());
      const RemoteModule<torch::nn::Linear> remote(place, std::int64_t{10}, std::int64_t{5});
      auto local = make_linear(10, 5);
      {
        const torch::NoGradGuard no_grad;
        local->weight.copy_(remote.module_rref().to_here()->weight);
      }
      DistributedDataParallel ddp(make_linear(5, 1), world.group());
      const auto input = at::randn({10, 10});
      // Together in one process: layer, then DDP.
      ddp(local->forward(input)).sum().backward();
      {
        const dist_autograd::Context context;
        const auto loss = ddp(remote.forward(input)).sum();
        dist_autograd::backward(context.id(), {loss});
        const auto gradients = dist_autograd::get_gradients(context.id());
        const auto parameter = ddp.parameters()[0];
        EXPECT_TRUE(at::allclose(gradients.at(parameter), parameter.grad()));
        const auto remote_gradient = rpc_sync("worker0", gradient_of, remote.remote_parameters()[0], context.id());
        EXPECT_TRUE(at::allclose(remote_gradient, local->weight.grad()));
        rpc::barrier();  // a context that ends takes its gradients along, also on worker0
      }
    }
  });
}

/// A pipeline of two remote layers on the CPU and two of this worker's own, under DDP, on `device`: four gradients.
void expect_pipeline_trains(const World& world, c10::Device device) {
  const RemoteModule<torch::nn::Linear> first("worker0", std::int64_t{10}, std::int64_t{7});
  const RemoteModule<torch::nn::Linear> third("worker1/cpu", std::int64_t{5}, std::int64_t{3});
  auto second = make_linear(7, 5);
  auto fourth = make_linear(3, 1);
  second->to(device);
  fourth->to(device);
  DistributedDataParallel ddp_second(second, world.group());
  DistributedDataParallel ddp_fourth(fourth, world.group());
  const auto local_first = first.module_rref().to_here();
  const auto local_third = third.module_rref().to_here();
  const auto input = at::randn({10, 10});
  ddp_fourth(local_third->forward(ddp_second(local_first->forward(input).to(device)).cpu()).to(device))
      .sum()
      .backward();
  const dist_autograd::Context context;
  const auto hidden = ddp_second(first.forward(input).to(device)).cpu();
  const auto loss = ddp_fourth(third.forward(hidden).to(device)).sum();
  dist_autograd::backward(context.id(), {loss});
  const auto gradients = dist_autograd::get_gradients(context.id());
  EXPECT_TRUE(at::allclose(gradients.at(second->weight), second->weight.grad()));
  EXPECT_TRUE(at::allclose(gradients.at(fourth->weight), fourth->weight.grad()));
  EXPECT_EQ(gradients.at(fourth->weight).device(), device);
  EXPECT_TRUE(at::allclose(rpc_sync("worker0", gradient_of, first.remote_parameters()[0], context.id()),
                           local_first->weight.grad()));
  EXPECT_TRUE(at::allclose(rpc_sync("worker1", gradient_of, third.remote_parameters()[0], context.id()),
                           local_third->weight.grad()));
  rpc::barrier();
}

// RPC-74, RPC-44
TEST(RpcDdp, PipelinesOfRemoteAndOwnLayersTrainAsLocalOnes) {
  run(2, [](const World& world) { expect_pipeline_trains(world, at::kCPU); });
}

// RPC-74, RPC-44
TEST(RpcDdp, PipelinesCrossDevices) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "there is no GPU";
  run(2, [](const World& world) { expect_pipeline_trains(world, {at::kCUDA, 0}); });
}

// RPC-48
TEST(RpcDdp, OneOptimizerStepsRemoteAndLocalParameters) {
  run(2, [](const World& world) {
    torch::manual_seed(world.rank());
    const RemoteModule<torch::nn::Linear> remote("worker0", std::int64_t{4}, std::int64_t{3});
    DistributedDataParallel ddp(make_linear(3, 2), world.group());
    auto parameters = remote.remote_parameters();
    const auto remote_weight = parameters[0];
    const auto own_weight = ddp.parameters()[0];
    parameters.emplace_back(own_weight);
    rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters, torch::optim::SGDOptions(0.1));
    const auto remote_before = remote_weight.to_here().detach().clone();
    const auto own_before = own_weight.detach().clone();
    const dist_autograd::Context context;
    const auto hidden = rpc::remote("worker0", rpc::builtin<at::Tensor(at::Tensor, at::Tensor)>("aten::add.Tensor"),
                                    remote.forward(at::ones({2, 4})), at::ones({2, 3}));
    dist_autograd::backward(context.id(), {ddp(hidden.to_here()).pow(2).sum()});
    optimizer.step(context.id());
    rpc::barrier();
    EXPECT_FALSE(at::equal(remote_weight.to_here(), remote_before));
    EXPECT_FALSE(at::equal(own_weight, own_before));
  });
}

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl()
      : used(register_module("used", make_linear(2, 2))), unused(register_module("unused", make_linear(2, 2))) {}
  rpc::RRef<at::Tensor> forward(const at::Tensor& x) {
    last = rpc::RRef<at::Tensor>(used->forward(x));
    return last;
  }
  rpc::RRef<at::Tensor> last;
  torch::nn::Linear used;
  torch::nn::Linear unused;
};
TORCH_MODULE(TwoLayers);

// RPC-58, DDP-48, DDP-76
TEST(RpcDdp, UnusedParametersAreFoundBehindAReference) {
  run(2, [](const World& world) {
    DistributedDataParallel ddp(TwoLayers(), world.group(), {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      const auto output = ddp(at::full({1, 2}, world.rank() + 1.0));
      EXPECT_TRUE(output.is_owner());
      EXPECT_NE(output.to_string(), ddp.module()->last.to_string()) << "the module's own stays as it was";
      ddp.module()->last = {};
      output.local_value().sum().backward();
      EXPECT_TRUE(at::allclose(ddp.module()->used->weight.grad(), at::full({2, 2}, 1.5))) << "the mean of 1 and 2";
      EXPECT_FALSE(ddp.module()->unused->weight.grad().defined());
    }
  });
}

at::Tensor table() {
  static const auto rows = [] {
    torch::manual_seed(7);
    return torch::randn({10, 4}).requires_grad_();
  }();
  return rows;
}
const auto look_up = rpc::function("ddp_test.look_up", [](at::Tensor ids) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return table().index_select(0, ids);
});
const auto table_gradient = rpc::function(
    "ddp_test.table_gradient", [](std::int64_t context) { return dist_autograd::get_gradients(context).at(table()); });

// RPC-78
TEST(RpcDdp, TrainersMayDivideTheirOptimizersState) {
  run(3, [](const World& world) {
    const auto trainers = new_group({0, 1});
    if (world.rank() != 2) {
      torch::manual_seed(3);
      DistributedDataParallel ddp(make_linear(4, 2), trainers);
      auto reference = make_linear(4, 2);
      {
        const torch::NoGradGuard no_grad;
        reference->weight.copy_(ddp.module()->weight);
      }
      ZeroRedundancyOptimizer<torch::optim::Adam> zero(ddp.parameters(), torch::optim::AdamOptions(0.1), trainers);
      torch::optim::Adam plain(reference->parameters(), torch::optim::AdamOptions(0.1));
      const auto ids_of = [](int rank, int step) { return at::tensor({rank + step, 2 * rank + 1, step}); };
      for (int step = 0; step < 4; ++step) {
        zero.zero_grad();
        const dist_autograd::Context context;
        const auto rows = rpc_sync("worker2", look_up, ids_of(world.rank(), step));
        dist_autograd::backward(context.id(), {ddp(rows).pow(2).mean()});
        dist_autograd::accumulate_grads(context.id(), ddp.parameters());
        zero.step();
        // One process with both batches.
        plain.zero_grad();
        for (const int rank : {0, 1}) {
          const auto input = table().detach().index_select(0, ids_of(rank, step));
          (reference->forward(input).pow(2).mean() / 2).backward();
        }
        plain.step();
        EXPECT_TRUE(at::allclose(ddp.module()->weight, reference->weight, 1e-4, 1e-5)) << step;
      }
    }
    rpc::barrier();
  });
}

// RPC-78
TEST(RpcDdp, LookupsOfTheNextBatchComeWhileThisOneComputes) {
  run(3, [](const World& world) {
    const auto trainers = new_group({0, 1});
    if (world.rank() != 2) {
      torch::manual_seed(3);
      DistributedDataParallel ddp(make_linear(4, 2), trainers);
      const auto ids_of = [&](int batch) { return at::tensor({world.rank() + batch, 3}); };
      using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;
      const auto finish = [&](const dist_autograd::Context& context, const at::Tensor& rows, Gradients& gradients) {
        dist_autograd::backward(context.id(), {ddp(rows).pow(2).sum()});
        gradients.emplace_back(dist_autograd::get_gradients(context.id()).at(ddp.parameters()[0]),
                               rpc_sync("worker2", table_gradient, context.id()));
      };
      Gradients in_turn;
      for (int batch = 0; batch < 4; ++batch) {
        const dist_autograd::Context context;
        finish(context, rpc_sync("worker2", look_up, ids_of(batch)), in_turn);
      }
      struct Batch {
        std::unique_ptr<dist_autograd::Context> context;
        rpc::Future<at::Tensor> rows;
      };
      const auto begin = [&](int batch) {
        auto context = std::make_unique<dist_autograd::Context>(dist_autograd::Context::ForLater());
        const dist_autograd::WorkFor it(*context);
        auto rows = rpc::rpc_async("worker2", look_up, ids_of(batch));
        return Batch{std::move(context), std::move(rows)};
      };
      Gradients overlapped;
      auto next = begin(0);
      for (int batch = 0; batch < 4; ++batch) {
        const auto now = std::exchange(next, begin(batch + 1));
        const dist_autograd::WorkFor it(*now.context);
        finish(*now.context, now.rows.wait(), overlapped);
      }
      next.rows.wait();
      ASSERT_EQ(overlapped.size(), in_turn.size());
      for (std::size_t i = 0; i < in_turn.size(); ++i) {
        EXPECT_TRUE(at::equal(overlapped[i].first, in_turn[i].first)) << i;
        EXPECT_TRUE(at::equal(overlapped[i].second, in_turn[i].second)) << i;
      }
    }
    rpc::barrier();
  });
}

const auto multiply = rpc::function("ddp_test.multiply", [](at::Tensor a, at::Tensor b) { return a * b; });

// RPC-57
TEST(RpcDdp, AveragesGradientsThatComeThroughAnotherWorker) {
  run(3, [](const World& world) {
    torch::manual_seed(1);
    DistributedDataParallel ddp(make_linear(4, 2), world.group());
    const auto scale = at::full({2}, 1.5).requires_grad_();
    const auto input = at::randn({6, 4}) + world.rank();
    const int next = (world.rank() + 1) % world.world_size();
    const auto parameter = ddp.parameters()[0];
    for (int step = 0; step < 3; ++step) {
      const dist_autograd::Context context;
      const auto hidden = rpc_sync(next, multiply, ddp(input), scale);
      dist_autograd::backward(context.id(), {rpc_sync(next, multiply, hidden, hidden).sum()});
      const auto gradients = dist_autograd::get_gradients(context.id());
      EXPECT_FALSE(parameter.grad().defined());
      EXPECT_FALSE(scale.grad().defined());
      // A context that ends takes parts of the others' graphs along.
      rpc::barrier();
      (ddp(input) * scale).pow(2).sum().backward();
      EXPECT_TRUE(at::allclose(gradients.at(scale), scale.grad(), 1e-5, 1e-5));
      EXPECT_TRUE(at::allclose(gradients.at(parameter), parameter.grad(), 1e-5, 1e-5));
      ddp.zero_grad();
      scale.mutable_grad() = at::Tensor();
    }
  });
}

// RPC-79
TEST(RpcDdp, ProfilersSeeCallsByName) {
  run(2, [](const World& world) {
    if (world.rank() != 0) return;
    static std::mutex mutex;
    static std::vector<std::string> names;
    const auto handle = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& range) {
                                                const std::lock_guard lock(mutex);
                                                names.emplace_back(range.name());
                                                return std::unique_ptr<at::ObserverContext>();
                                              }).scopes({at::RecordScope::USER_SCOPE}));
    const auto x = at::ones(2);
    const auto sum = rpc::builtin<at::Tensor(at::Tensor, at::Tensor)>("aten::add.Tensor");
    rpc_sync("worker1", sum, x, x);
    rpc::rpc_async("worker1", sum, x, x).wait();
    rpc::remote("worker1", sum, x, x).to_here();
    at::removeCallback(handle);
    for (const auto* const kind : {"rpc_sync", "rpc_async", "remote"}) {
      const auto expected = str(kind, "#aten::add.Tensor(worker0 -> worker1)");
      EXPECT_NE(std::find(names.begin(), names.end(), expected), names.end()) << expected;
    }
  });
}

}  // namespace lockstep::rpc_ddp_test
