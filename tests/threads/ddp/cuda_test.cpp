// DistributedDataParallel on an accelerator: several ranks share one GPU by gloo, one rank has NCCL. The comparison
// with Python (tests/oracle/ddp) runs there too; here is what a CPU cannot show.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/functional/loss.h>

#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/join/join.h"
#include "tests/support/ddp_models.h"
#include "tests/support/operator_counts.h"

namespace lockstep {
namespace {

using namespace ddp_models;

void expect_close_on_host(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  std::vector<at::Tensor> on_host;
  for (const auto& each : actual) on_host.push_back(each.cpu());
  expect_close(on_host, expected, 1e-4);
}

class DdpOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

// DDP-34: inputs on the host are moved to device_ids[0], by a side stream or not
TEST_F(DdpOnGpu, InputsOfTheHostAreMoved) {
  const auto whole = random_batch(64, 512, 3);
  auto reference = mlp({512, 256, 8});
  const auto expected = reference->forward(whole);
  expected.pow(2).mean().backward();
  for (const char* uses_side_stream : {"1", "0"}) {
    ::setenv("PYTORCH_DDP_USE_SIDE_STREAM", uses_side_stream, /*overwrite=*/1);
    testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [&](const World& world) {
      auto model = mlp({512, 256, 8});
      model->to(world.device());
      DistributedDataParallel ddp(model, world.group(), {.device_ids = {{world.device().index()}}});
      for (int step = 0; step < 3; ++step) {
        zero_grads(*model);
        // Pinned memory is what makes the copy run beside the device's other work.
        const auto mine = my_rows(whole, world).contiguous().pin_memory();
        const auto output = ddp(mine);
        ASSERT_TRUE(output.is_cuda());
        EXPECT_TRUE(at::allclose(output.cpu(), my_rows(expected, world), 1e-4, 1e-4));
        output.pow(2).mean().backward();
        expect_close_on_host(gradients_of(*model), gradients_of(*reference));
      }
    });
  }
  ::unsetenv("PYTORCH_DDP_USE_SIDE_STREAM");
}

/// A joinable on a GPU that does nothing but begin the iteration.
struct OpenerOnGpu : Joinable {
  explicit OpenerOnGpu(const World& world) : group(world.group()), device(world.device()) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override { return std::make_unique<JoinHook>(); }
  c10::Device join_device() const override { return device; }
  GroupPtr join_process_group() const override { return group; }
  GroupPtr group;
  c10::Device device;
};

// JOIN-58, JOIN-8: with work queued on the device, a control message neither waits for it nor holds it up
TEST_F(DdpOnGpu, ControlMessagesOfAJoinDoNotWaitForTheDevice) {
  const auto expect_no_wait = [](const World& world) {
    const auto matrix = at::ones({8192, 8192}, at::TensorOptions(at::kFloat).device(world.device()));
    const auto stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(world.device());
    OpenerOnGpu opener(world);
    const auto begun = [&](bool with_work) {
      if (with_work) {
        for (int i = 0; i < 40; ++i) at::matmul(matrix, matrix);
      }
      c10::Event work(at::kCUDA);
      work.record(stream);
      Join::notify(opener);
      EXPECT_TRUE(!with_work || !work.query()) << "notify() has waited for the device";
      const auto tally = Join::current_tally(opener);
      stream.synchronize();
      EXPECT_EQ(tally.live_count(), world.world_size());
    };
    Join({&opener}).run([&] {
      begun(false);  // libraries are loaded by the first product
      at::matmul(matrix, matrix);
      stream.synchronize();
      for (int i = 0; i < 3; ++i) begun(true);
    });
  };
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, expect_no_wait);
  testing::run_threads_in_gtest({.world_size = 1, .backend = "nccl"}, expect_no_wait);
}

// DDP-3
TEST_F(DdpOnGpu, DevicesThatAreNotTheModulesAreRefused) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    auto model = mlp({4, 2});
    testing::expect_error([&] { DistributedDataParallel(model, world.group(), {.device_ids = {{0}}}); },
                          {"device_ids", "cpu"});
    model->to(world.device());
    testing::expect_error([&] { DistributedDataParallel(model, world.group(), {.device_ids = {{0, 0}}}); },
                          {"device_ids", "0, 0", "cuda:0"});
    testing::expect_error([&] { DistributedDataParallel(model, world.group(), {.device_ids = {{1}}}); },
                          {"device_ids is [1]", "cuda:0", "move the module"});
  });
}

// D-14: in, out and divided by one operation per bucket each
TEST_F(DdpOnGpu, CopiesABucketAtOnce) {
  for (const bool as_view : {false, true}) {
    testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [&](const World& world) {
      const auto whole = random_batch(8, 6, 3);
      auto reference = mlp({6, 5, 5, 3});
      reference->forward(whole).pow(2).mean().backward();
      auto model = mlp({6, 5, 5, 3});
      model->to(world.device());
      DistributedDataParallel ddp(model, world.group(), {.gradient_as_bucket_view = as_view});
      const auto mine = my_rows(whole, world).to(world.device());
      for (int step = 0; step < 3; ++step) {
        // Gradients that are there are added to: as views they are divided where they are.
        for (auto& parameter : model->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad().zero_();
        }
        const auto loss = ddp(mine).pow(2).mean();
        barrier(world.group());
        std::optional<testing::OperatorCounts> counts;
        if (world.rank() == 0) counts.emplace(testing::OperatorCounts::Threads::kAll);
        barrier(world.group());
        loss.backward();
        barrier(world.group());
        const int buckets = 2 * static_cast<int>(ddp.bucket_plan().buckets().size());  // of both ranks
        if (counts && step > 0) {
          EXPECT_EQ(counts->of("aten::_foreach_copy_"), as_view ? 0 : 2 * buckets) << step;
          EXPECT_EQ(counts->of("aten::mul_"), buckets) << step;
        }
        counts.reset();
        barrier(world.group());
        expect_close_on_host(gradients_of(*model), gradients_of(*reference));
      }
    });
  }
}

// DDP-99
TEST_F(DdpOnGpu, SyncBatchNormEqualsBatchNormOverTheWholeBatch) {
  const auto whole = random_batch(12, 6, 5) * 3 + 1;
  struct NormedImpl : torch::nn::Module {
    explicit NormedImpl(std::shared_ptr<torch::nn::Module> norm_module)
        : fc(register_module("fc", torch::nn::Linear(6, 4))),
          norm(register_module("norm", std::move(norm_module))),
          head(register_module("head", torch::nn::Linear(4, 2))) {}
    at::Tensor forward(const at::Tensor& input) {
      auto hidden = fc->forward(input);
      if (auto* const synced = norm->as<SyncBatchNorm>()) {
        hidden = synced->forward(hidden);
      } else {
        hidden = norm->as<torch::nn::BatchNorm1d>()->forward(hidden);
      }
      return head->forward(hidden);
    }
    torch::nn::Linear fc;
    std::shared_ptr<torch::nn::Module> norm;
    torch::nn::Linear head;
  };
  const auto reference = seeded(std::make_shared<NormedImpl>(torch::nn::BatchNorm1d(4).ptr()));
  reference->forward(whole).pow(2).mean().backward();
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [&](const World& world) {
    const auto model = seeded(std::make_shared<NormedImpl>(SyncBatchNorm(4).ptr()));
    model->to(world.device());
    DistributedDataParallel ddp(model, world.group());
    ddp(my_rows(whole, world).to(world.device())).pow(2).mean().backward();
    expect_close_on_host(gradients_of(*model), gradients_of(*reference));
    EXPECT_TRUE(at::allclose(model->norm->as<SyncBatchNorm>()->running_var.cpu(),
                             reference->norm->as<torch::nn::BatchNorm1d>()->running_var, 1e-4, 1e-5));
  });
}

/// A layer that communicates in forward.
struct SyncedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return norm->forward(fc->forward(input)); }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(6, 4));
  SyncBatchNorm norm = register_module("norm", SyncBatchNorm(4));
};

// JOIN-41
TEST_F(DdpOnGpu, ScopesWithSyncBatchNormMustThrow) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    const auto model = seeded(std::make_shared<SyncedImpl>());
    model->to(world.device());
    DistributedDataParallel ddp(model, world.group());
    testing::expect_error([&] { ddp.join().finish(); }, {"'norm'", "throw_on_early_termination"});
    int steps = 0;
    testing::expect_error(
        [&] {
          ddp.join(true, true, /*throw_on_early_termination=*/true).run([&] {
            for (int step = 0; step < 2 + world.rank(); ++step) {
              ddp(random_batch(3, 6, step).to(world.device())).sum().backward();
              ++steps;
            }
          });
        },
        {"ran out of inputs"});
    EXPECT_EQ(steps, 2);
  });
}

/// Options that change what happens to a gradient on its way.
std::vector<DdpOptions> ways() {
  return {{},
          {.gradient_as_bucket_view = true},
          {.find_unused_parameters = true},
          {.static_graph = true},
          {.batched_grad_copy = true},
          {.bucket_cap_mb = 0.001},
          {.per_parameter = true}};
}

void expect_steps_of_one_process(const World& world) {
  const auto whole = random_batch(12, 32, 9);
  for (const auto& options : ways()) {
    auto reference = mlp({32, 64, 16, 4});
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
    auto model = mlp({32, 64, 16, 4});
    model->to(world.device());
    const Warnings quiet;
    DistributedDataParallel ddp(model, world.group(), options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      reference_optimizer.zero_grad();
      reference->forward(whole + step).pow(2).mean().backward();
      reference_optimizer.step();
      optimizer.zero_grad();
      ddp(my_rows(whole + step, world).to(world.device())).pow(2).mean().backward();
      expect_close_on_host(gradients_of(*model), gradients_of(*reference));
      optimizer.step();
    }
  }
}

// DDP-36, DDP-53, DDP-57
TEST_F(DdpOnGpu, RanksOnOneGpuEqualOneProcess) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, expect_steps_of_one_process);
}

TEST_F(DdpOnGpu, OneRankWithNcclEqualsOneProcess) {
  testing::run_threads_in_gtest({.world_size = 1, .backend = "nccl"}, expect_steps_of_one_process);
}

// The average of weights, on the device.
TEST_F(DdpOnGpu, WeightedMeansAreExact) {
  const auto whole = random_batch(9, 8, 4);
  auto reference = mlp({8, 3});
  reference->forward(whole).pow(2).mean().backward();
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [&](const World& world) {
    auto model = mlp({8, 3});
    model->to(world.device());
    DistributedDataParallel ddp(model, world.group());
    const auto mine = world.rank() == 0 ? whole.narrow(0, 0, 2) : whole.narrow(0, 2, 7);
    ddp.backward(ddp(mine.to(world.device())).pow(2).mean(), static_cast<double>(mine.size(0)));
    expect_close_on_host(gradients_of(*model), gradients_of(*reference));
  });
}

}  // namespace
}  // namespace lockstep
