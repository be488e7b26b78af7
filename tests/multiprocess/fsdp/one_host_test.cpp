// Ranks of one host read each other's parameters where they are: what they compute is what copies would give, whatever
// the others do meanwhile.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <thread>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/memory_plan.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::fsdp_one_host_test {

using namespace std::chrono_literals;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::AdamW;

/// Two units and a root. On two and on four ranks most parts are of whole pages; biases, and the rows of the head, are
/// not.
struct Model {
  explicit Model(const World& world, FullyShardOptions options) {
    torch::manual_seed(3);
    first = Linear(64, 128);
    second = Linear(128, 64);
    net = Sequential(first, torch::nn::Tanh(), second, Linear(64, 7));
    options.mesh = DeviceMesh::from_group(world.group(), "cpu");
    fully_shard(*first, options);
    fully_shard(*second, options);
    root = fully_shard(*net, options);
  }
  at::Tensor loss(const World& world, int step) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(10 * step + world.rank()));
    return net->forward(at::randn({5, 64}, generator)).pow(2).mean();
  }

  Linear first = nullptr;
  Linear second = nullptr;
  Sequential net = nullptr;
  std::optional<FsdpUnit> root;
};

/// Steps of all kinds: plain ones, behind an evaluation, accumulated, after a shard was written by hand, with a part
/// that is frozen meanwhile.
std::vector<at::Tensor> trained(const World& world, const FullyShardOptions& options) {
  Model model(world, options);
  AdamW optimizer(model.net->parameters(), 0.01);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    if (step == 2 || step == 4) {
      const at::NoGradGuard no_grad;
      model.loss(world, 100 + step);
    }
    if (step == 3) {
      const at::NoGradGuard no_grad;
      for (const auto& shard : model.net->parameters()) shard.mul_(0.9);
    }
    if (step == 3 || step == 5) {
      for (auto& shard : model.second->parameters()) shard.set_requires_grad(step == 5);
    }
    if (step % 2 == 1) {
      const auto guard = model.root->no_sync();
      model.loss(world, 50 + step).backward();
    }
    model.loss(world, step).backward();
    // Ranks step at different times: some write to their shards while others have not yet left the backward.
    if (step % 3 == world.rank() % 3) std::this_thread::sleep_for(3ms);
    optimizer.step();
  }
  std::vector<at::Tensor> shards;
  for (const auto& shard : model.net->parameters()) shards.push_back(shard.detach().clone());
  return shards;
}

FullyShardOptions with_sharing(FullyShardOptions options, bool shares) {
  options.share_on_host = shares;
  return options;
}

void expect_same_bits(const World& world, const FullyShardOptions& options, const std::string& what) {
  const auto copied = trained(world, with_sharing(options, false));
  const auto shared = trained(world, with_sharing(options, true));
  for (std::size_t i = 0; i < copied.size(); ++i) EXPECT_TRUE(shared[i].equal(copied[i])) << what << ", shard " << i;
}

// FSDP-25, FSDP-50, FSDP-62
TEST(FsdpOnOneHost, TrainsToTheSameBitsAsCopies) {
  for (const int ranks : {2, 4}) {
    const auto report = testing::run_processes_from_gtest(
        {.world_size = ranks, .backend = "shm"},
        [](const World& world) {
          expect_same_bits(world, {}, "defaults");
          expect_same_bits(world, {.reshard_after_forward = false}, "kept whole");
          expect_same_bits(world, {.mp_policy = {.param_dtype = at::kBFloat16}}, "bfloat16");
          expect_same_bits(world, {.use_orig_params = false}, "flat");
          expect_same_bits(world, {.limit_all_gathers = false}, "all ahead");
        },
        str("on ", ranks));
    EXPECT_TRUE(report.has_passed()) << report.describe();
  }
}

// FSDP-2, FSDP-25
TEST(FsdpOnOneHost, AsksOthersInForwardOnly) {
  const auto report = testing::run_processes_from_gtest({.world_size = 2, .backend = "shm"}, [](const World& world) {
    for (const bool shares : {true, false}) {
      Model model(world, with_sharing({.reshard_after_forward = true}, shares));
      model.loss(world, 0).backward();  // the first gathers also make the blocks
      const testing::Recorder recorder;
      auto loss = model.loss(world, 1);
      std::map<std::string, int> calls;
      for (const auto& event : recorder.events("launch")) ++calls[event.kind];
      EXPECT_EQ(calls["all_to_all_single"], shares ? 3 : 0);
      EXPECT_EQ(calls["all_gather_into_tensor"], shares ? 0 : 3);
      loss.backward();
      for (const auto& event : recorder.events("launch")) ++calls[event.kind];
      EXPECT_EQ(calls["all_to_all_single"], shares ? 6 : 0);  // those of the forward, counted again
      EXPECT_EQ(calls["reduce_scatter_tensor"], 3);
    }
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

/// What a backward computes with the first layer's parameters. Rank 1 is late; the other has gone on to `meanwhile`.
at::Tensor gradient_of_input(const World& world, Model& model, const std::function<void()>& meanwhile) {
  model.loss(world, 0).backward();
  const auto guard = model.root->no_sync();  // in which nobody waits for a reduction
  const auto input = at::ones({5, 64}).requires_grad_();
  auto hidden = model.first->forward(input);
  if (world.rank() == 1) {
    hidden.register_hook([](const at::Tensor& gradient) {
      std::this_thread::sleep_for(100ms);
      return gradient;
    });
  }
  model.second->forward(at::tanh(hidden)).sum().backward();
  if (world.rank() == 0) meanwhile();
  barrier(world.group());
  return input.grad();
}

// FSDP-8
TEST(FsdpOnOneHost, KeepsWhatALateRankStillReads) {
  const auto report = testing::run_processes_from_gtest({.world_size = 2, .backend = "shm"}, [](const World& world) {
    Model copied(world, with_sharing({}, false));
    const auto expected = gradient_of_input(world, copied, [] {});
    Model written(world, with_sharing({}, true));
    const auto after_write = gradient_of_input(world, written, [&] {
      const at::NoGradGuard no_grad;
      for (const auto& shard : written.net->parameters()) shard.fill_(1e9);
    });
    EXPECT_TRUE(after_write.equal(expected));
    auto gone = std::make_optional<Model>(world, with_sharing({}, true));
    std::vector<at::Tensor> others;
    const auto after_end = gradient_of_input(world, *gone, [&] {
      // The model goes, and what comes next gets its memory.
      gone->root.reset();
      gone->net = nullptr;
      gone->first = nullptr;
      gone->second = nullptr;
      const auto backend = world.group()->getBackend(at::kCPU);
      for (int i = 0; i < 64; ++i) others.push_back(backend->allocateTensor(8192, at::kFloat).fill_(1e9));
    });
    EXPECT_TRUE(after_end.equal(expected));
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

struct ShuffledImpl : torch::nn::Module {
  ShuffledImpl(const World& world, const std::string& what) {
    const bool is_other = world.rank() == 1;
    for (const auto* name : {"a", "b"}) {
      const auto shown = what == "order" && is_other ? (std::string(name) == "a" ? "b" : "a") : name;
      layers.push_back(register_module(shown, Linear(64, what == "sizes" && is_other ? 128 : 64)));
    }
  }
  std::vector<Linear> layers;
};
TORCH_MODULE(Shuffled);

// FSDP-100
TEST(FsdpOnOneHost, RefusesParametersThatDifferByRank) {
  const auto report = testing::run_processes_from_gtest({.world_size = 2, .backend = "shm"}, [](const World& world) {
    for (const std::string what : {"order", "sizes"}) {
      Shuffled model(world, what);
      // One unit, whose name is the same on all ranks.
      fully_shard(*model, {.mesh = DeviceMesh::from_group(world.group(), "cpu")});
      testing::expect_error([&] { model->layers[0]->forward(at::ones({1, 64})); },
                            {what == "sizes" ? "128" : "parameter '", "rank 1"});
    }
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// FSDP-98
TEST(FsdpOnOneHost, IsPartOfTheMemoryPlan) {
  const auto report = testing::run_processes_from_gtest({.world_size = 2, .backend = "shm"}, [](const World& world) {
    Model shared(world, with_sharing({}, true));
    Model copied(world, with_sharing({}, false));
    const auto ours = memory_plan(*shared.net).units;
    const auto theirs = memory_plan(*copied.net).units;
    EXPECT_EQ(ours[0].shards, 2 * theirs[0].shards);
    EXPECT_EQ(ours[0].whole, 128 * 4);  // the bias; the weight is seen where it lies
    EXPECT_GE(theirs[0].whole, 64 * 128 * 4);
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

}  // namespace lockstep::fsdp_one_host_test
