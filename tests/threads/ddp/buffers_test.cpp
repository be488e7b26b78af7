// Buffers between forwards, and the sink that outputs pass.
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : norm(register_module("norm", torch::nn::BatchNorm1d(4))), fc(register_module("fc", torch::nn::Linear(4, 2))) {}
  at::Tensor forward(const at::Tensor& input) { return fc->forward(norm->forward(input)); }
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear fc;
};
TORCH_MODULE(Normed);

bool is_same_everywhere(const at::Tensor& tensor, const World& world) {
  const auto all = at::empty({world.world_size(), tensor.numel()}, tensor.options().requires_grad(false));
  all_gather_into_tensor(all, tensor.detach().reshape({1, -1}), world.group());
  for (int rank = 1; rank < world.world_size(); ++rank) {
    if (!at::equal(all[0], all[rank])) return false;
  }
  return true;
}

// DDP-8, DDP-74
LOCKSTEP_THREAD_TEST(DdpBuffers, FollowRankZeroBeforeEachForwardIfWanted, 3) {
  struct Setting {
    DdpOptions options;
    bool at_start;
    bool at_forward;
  };
  const std::vector<Setting> settings = {{{}, true, true},
                                         {{.broadcast_buffers = false}, false, false},
                                         {{.forward_sync_buffers = false}, true, false},
                                         {{.broadcast_buffers = false, .forward_sync_buffers = true}, true, true}};
  for (const auto& [options, at_start, at_forward] : settings) {
    const Warnings quiet;
    auto module = seeded(Normed());
    module->norm->running_mean.fill_(world.rank());
    DistributedDataParallel ddp(module, world.group(), options);
    EXPECT_EQ(is_same_everywhere(module->norm->running_mean, world), at_start);
    for (int step = 0; step < 3; ++step) {
      ddp(random_batch(5, 4, 10 + world.rank())).sum().backward();
      // After a forward they differ; the next one begins with rank 0's.
      EXPECT_FALSE(is_same_everywhere(module->norm->running_mean, world));
    }
    const auto before = module->norm->running_mean.clone();
    broadcast(before, 0, world.group());
    module->eval();
    ddp(random_batch(5, 4, 1));
    EXPECT_EQ(is_same_everywhere(module->norm->running_mean, world), at_forward);
    EXPECT_EQ(at::equal(module->norm->running_mean, before), at_forward || world.rank() == 0);
  }
}

// DDP-19
LOCKSTEP_THREAD_TEST(DdpBuffers, ReplacedOnesAreSyncedToo, 2) {
  struct HolderImpl : MlpImpl {
    HolderImpl() : MlpImpl({4, 2}) { register_buffer("counter", at::zeros({1})); }
  };
  auto module = std::make_shared<HolderImpl>();
  DistributedDataParallel ddp(module, world.group());
  ddp(random_batch(2, 4, 1)).sum().backward();
  // In place of the old tensor, a larger one.
  module->named_buffers()["counter"].set_data(at::full({3}, world.rank() + 5.0));
  ddp(random_batch(2, 4, 1)).sum().backward();
  EXPECT_TRUE(at::equal(module->named_buffers()["counter"], at::full({3}, 5.0)));
  // One that was not there when the module was wrapped.
  const auto late = module->register_buffer("late", at::full({2}, world.rank() + 7.0));
  ddp(random_batch(2, 4, 1)).sum().backward();
  EXPECT_TRUE(at::equal(late, at::full({2}, 7.0)));
}

// DDP-74: a backward that still needs the buffer's value is legal after the sync.
LOCKSTEP_THREAD_TEST(DdpBuffers, SyncLeavesVersionsAlone, 2) {
  auto module = seeded(Normed());
  DistributedDataParallel ddp(module, world.group());
  const auto version = module->norm->running_mean._version();
  module->eval();
  const auto first = ddp(random_batch(2, 4, 1));
  const auto second = ddp(random_batch(2, 4, 2));
  EXPECT_EQ(module->norm->running_mean._version(), version);
  (first.sum() + second.sum()).backward();
}

// DDP-75
LOCKSTEP_THREAD_TEST(DdpBuffers, HookReplacesTheCopy, 2) {
  for (const auto location : {BufferHookLocation::kPreForward, BufferHookLocation::kPostForward}) {
    auto module = mlp({4, 2});
    const auto counter = module->register_buffer("counter", at::full({1}, 1.0));
    DistributedDataParallel ddp(module, world.group());
    expect_error([&] { ddp.register_buffer_comm_hook(nullptr); }, {"no hook"});
    int calls = 0;
    ddp.register_buffer_comm_hook(
        [&](BufferMap& buffers) {
          ++calls;
          EXPECT_EQ(buffers.size(), 1U);
          return std::vector<FuturePtr>{all_reduce_future(buffers.at("counter"), world.group())};
        },
        location);
    for (int step = 1; step <= 3; ++step) {
      ddp(random_batch(2, 4, 1)).sum().backward();
      // Waited for at the end of backward.
      EXPECT_EQ(counter.item<float>(), std::pow(2.0F, static_cast<float>(step)));
    }
    EXPECT_EQ(calls, 3);
  }
}

// DDP-75: a failure of a hook's future comes out of backward.
LOCKSTEP_THREAD_TEST(DdpBuffers, HookFailureReachesBackward, 2) {
  auto module = mlp({4, 2});
  module->register_buffer("counter", at::full({1}, 1.0));
  DistributedDataParallel ddp(module, world.group());
  ddp.register_buffer_comm_hook([&](BufferMap&) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->setError(std::make_exception_ptr(std::runtime_error("buffers are lost")));
    return std::vector<FuturePtr>{future};
  });
  const auto output = ddp(random_batch(2, 4, 1)).sum();
  expect_error([&] { output.backward(); }, {"buffers are lost"});
}

// DDP-76
LOCKSTEP_THREAD_TEST(DdpSink, IsThereOnlyIfTheModeNeedsIt, 2) {
  const auto has_sink = [](const at::Tensor& output) {
    return output.grad_fn()->name().find("DdpSink") != std::string::npos;
  };
  DistributedDataParallel plain(mlp({4, 2}), world.group());
  EXPECT_FALSE(has_sink(plain(random_batch(2, 4, 1))));
  DistributedDataParallel searching(mlp({4, 2}), world.group(), {.find_unused_parameters = true});
  EXPECT_TRUE(has_sink(searching(random_batch(2, 4, 1))));
  DistributedDataParallel is_static(mlp({4, 2}), world.group(), {.static_graph = true});
  const auto first = is_static(random_batch(2, 4, 1));
  EXPECT_TRUE(has_sink(first));
  first.sum().backward();
  EXPECT_FALSE(has_sink(is_static(random_batch(2, 4, 1))));
  // Tensors without a history are left alone.
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(searching(random_batch(2, 4, 1)).grad_fn());
}

// DDP-77
LOCKSTEP_THREAD_TEST(DdpSink, ClonesUnlessToldNotTo, 2) {
  at::Tensor inner;
  struct KeeperImpl : MlpImpl {
    explicit KeeperImpl(at::Tensor& kept) : MlpImpl({4, 2}), kept_(kept) {}
    at::Tensor forward(const at::Tensor& input) { return kept_ = MlpImpl::forward(input); }
    at::Tensor& kept_;
  };
  DistributedDataParallel ddp(std::make_shared<KeeperImpl>(inner), world.group(), {.find_unused_parameters = true});
  auto output = ddp(random_batch(2, 4, 1));
  EXPECT_NE(output.data_ptr(), inner.data_ptr());
  output.mul_(2);  // legal: it is a copy
  output.sum().backward();
  ddp.set_ddp_sink_clone(false);
  output = ddp(random_batch(2, 4, 1));
  EXPECT_EQ(output.data_ptr(), inner.data_ptr());
}

// DDP-77
LOCKSTEP_THREAD_TEST(DdpSink, BackwardAfterTheWrapperIsGoneSaysSo, 2) {
  at::Tensor output;
  auto module = mlp({4, 2});
  {
    DistributedDataParallel ddp(module, world.group(), {.find_unused_parameters = true});
    output = ddp(random_batch(2, 4, 1)).sum();
  }
  expect_error([&] { output.backward(); }, {"destroyed"});
}

}  // namespace
}  // namespace lockstep
