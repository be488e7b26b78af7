// Checkpointing inside of DistributedDataParallel, and around it: gradients of the whole batch without it.
#include "lockstep/nn/functional_collectives.h"
#include "tests/support/ddp_models.h"

namespace lockstep::checkpointed_ddp_test {

using namespace ddp_models;

/// Ranks are threads here and share the default generator.
CheckpointOptions options() {
  return {.preserve_rng_state = false};
}

/// Layers of which each runs in a checkpoint, some of them nested.
struct SavingMlpImpl : MlpImpl {
  explicit SavingMlpImpl(const std::vector<int64_t>& sizes) : MlpImpl(sizes) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto all = [this](at::Tensor hidden) {
      for (std::size_t i = 0; i < layers.size(); ++i) {
        auto one = [layer = layers[i]](const at::Tensor& in) mutable { return at::tanh(layer->forward(in)); };
        hidden = i == 0 ? one(hidden) : checkpoint(options(), one, hidden);
      }
      return hidden;
    };
    return checkpoint(options(), all, input);
  }
};
TORCH_MODULE(SavingMlp);

struct PlainMlpImpl : MlpImpl {
  explicit PlainMlpImpl(const std::vector<int64_t>& sizes) : MlpImpl(sizes) {}
  at::Tensor forward(at::Tensor hidden) {
    for (auto& layer : layers) hidden = at::tanh(layer->forward(hidden));
    return hidden;
  }
};
TORCH_MODULE(PlainMlp);

const std::vector<int64_t> kSizes = {4, 6, 5, 2};

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

at::Tensor rows_of(const World& world, int step) {
  return my_rows(random_batch(6, kSizes[0], static_cast<uint64_t>(step)), world);
}

std::vector<at::Tensor> whole_batch(int step) {
  auto model = seeded(PlainMlp(kSizes));
  loss_of(model->forward(random_batch(6, kSizes[0], static_cast<uint64_t>(step)))).backward();
  return gradients_of(*model);
}

// DDP-40, DDP-54: every parameter is ready once, whatever is run again.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, TrainsAsOneProcess, 2) {
  for (const auto& settings : {DdpOptions{}, DdpOptions{.find_unused_parameters = true},
                               DdpOptions{.static_graph = true}, DdpOptions{.gradient_as_bucket_view = true}}) {
    DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group(), settings);
    for (int step = 0; step < 4; ++step) {
      zero_grads(ddp);
      loss_of(ddp(rows_of(world, step))).backward();
      expect_close(gradients_of(ddp), whole_batch(step));
    }
  }
}

// The bits of the same wrapper without checkpoints.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, HasTheBitsOfPlainDdp, 3) {
  DistributedDataParallel plain(seeded(PlainMlp(kSizes)), world.group());
  DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group());
  for (int step = 0; step < 3; ++step) {
    zero_grads(plain);
    zero_grads(ddp);
    loss_of(plain(rows_of(world, step))).backward();
    loss_of(ddp(rows_of(world, step))).backward();
    expect_close(gradients_of(ddp), gradients_of(plain), 0);
  }
}

// DDP-40, DDP-54: forwards that share parameters, in one backward.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, ReducesSeveralForwardsOnce, 2) {
  for (const auto& settings : {DdpOptions{}, DdpOptions{.find_unused_parameters = true}}) {
    DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group(), settings);
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      (loss_of(ddp(rows_of(world, step))) + loss_of(ddp(rows_of(world, step + 10)))).backward();
      auto wanted = whole_batch(step);
      const auto second = whole_batch(step + 10);
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += second[i];
      expect_close(gradients_of(ddp), wanted);
    }
  }
}

LOCKSTEP_THREAD_TEST(CheckpointedDdp, AccumulatesWithoutSync, 2) {
  DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group());
  {
    const auto scope = ddp.no_sync();
    loss_of(ddp(rows_of(world, 0))).backward();
  }
  loss_of(ddp(rows_of(world, 1))).backward();
  auto wanted = whole_batch(0);
  const auto second = whole_batch(1);
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += second[i];
  expect_close(gradients_of(ddp), wanted);
}

/// A branch that only some forwards use, in a checkpoint.
struct SavingBranchyImpl : BranchyImpl {
  at::Tensor forward(const at::Tensor& input, bool uses_left, bool uses_right) {
    return checkpoint(
        options(), [this](const at::Tensor& in, bool l, bool r) { return BranchyImpl::forward(in, l, r); }, input,
        uses_left, uses_right);
  }
};
TORCH_MODULE(SavingBranchy);

// DDP-54: parameters of checkpoints that a forward did not use are found.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, FindsUnusedParametersInCheckpoints, 2) {
  DistributedDataParallel plain(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  DistributedDataParallel ddp(seeded(SavingBranchy()), world.group(), {.find_unused_parameters = true});
  for (int step = 0; step < 4; ++step) {
    const auto rows = my_rows(random_batch(6, 4, static_cast<uint64_t>(step)), world);
    const bool uses_left = step % 2 == 0;
    zero_grads(plain);
    zero_grads(ddp);
    plain(rows, uses_left, !uses_left || step == 2).sum().backward();
    ddp(rows, uses_left, !uses_left || step == 2).sum().backward();
    expect_close(gradients_of(ddp), gradients_of(plain), 0);
  }
}

// A wrapper inside of a checkpoint only computes when it runs again: no buffers are sent, nothing is armed.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, TheWrapperItselfMayBeCheckpointed, 2) {
  for (const bool early_stop : {true, false}) {
    for (const auto& settings :
         {DdpOptions{}, DdpOptions{.find_unused_parameters = true}, DdpOptions{.static_graph = true}}) {
      DistributedDataParallel ddp(seeded(PlainMlp(kSizes)), world.group(), settings);
      const auto run = [&](const at::Tensor& in) { return ddp(in); };
      for (int step = 0; step < 3; ++step) {
        zero_grads(ddp);
        const auto output =
            checkpoint({.preserve_rng_state = false, .early_stop = early_stop}, run, rows_of(world, step));
        const testing::Recorder recorder;
        loss_of(output).backward();
        testing::expect_none(recorder.events(), "ddp_forward");
        expect_close(gradients_of(ddp), whole_batch(step));
      }
    }
  }
}

/// Checkpointed where asked for.
struct NormedImpl : torch::nn::Module {
  explicit NormedImpl(bool saves) : saves_(saves) {}
  at::Tensor forward(const at::Tensor& input) {
    return head->forward(saves_ ? checkpoint(options(), inner, input) : inner->forward(input));
  }
  torch::nn::Sequential inner = register_module(
      "inner", torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Tanh()));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(6, 2));

 private:
  const bool saves_;
};
TORCH_MODULE(Normed);

// What runs again sees the copies of low precision that forward saw, and buffers are updated once.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, RunsAgainInLowPrecision, 2) {
  for (const std::optional<MixedPrecision>& precision :
       {std::optional<MixedPrecision>(),
        std::optional(MixedPrecision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16})}) {
    DistributedDataParallel plain(seeded(Normed(false)), world.group(), {.mixed_precision = precision});
    DistributedDataParallel ddp(seeded(Normed(true)), world.group(), {.mixed_precision = precision});
    for (int step = 0; step < 3; ++step) {
      zero_grads(plain);
      zero_grads(ddp);
      const auto rows = my_rows(random_batch(8, 4, static_cast<uint64_t>(step)), world);
      plain(rows).pow(2).sum().backward();
      ddp(rows).pow(2).sum().backward();
      expect_close(gradients_of(ddp), gradients_of(plain), 0);
      for (const auto& parameter : ddp.parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      for (std::size_t i = 0; i < plain.buffers().size(); ++i) {
        EXPECT_TRUE(ddp.buffers()[i].equal(plain.buffers()[i])) << i;
      }
    }
  }
}

// With the copies of the forward, also for a backward that comes after another forward.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, RunsAgainWithTheCopiesOfItsForward, 2) {
  const DdpOptions settings{.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}};
  DistributedDataParallel plain(seeded(PlainMlp(kSizes)), world.group(), settings);
  DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group(), settings);
  const auto step = [&](auto& wrapper) {
    const auto first = loss_of(wrapper(rows_of(world, 0)));
    const auto second = loss_of(wrapper(rows_of(world, 1)));
    (first + second).backward();
    return gradients_of(wrapper);
  };
  expect_close(step(ddp), step(plain), 0);
}

/// Computes with a mean over all ranks.
struct SyncedImpl : torch::nn::Module {
  SyncedImpl(bool saves, GroupPtr group) : saves_(saves), group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto run = [this](const at::Tensor& in) {
      const auto hidden = first->forward(in);
      return at::tanh(hidden * functional::all_reduce(hidden.exp().mean(0), group_));
    };
    return head->forward(saves_ ? checkpoint(options(), run, input) : run(input));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 2));

 private:
  const bool saves_;
  const GroupPtr group_;
};
TORCH_MODULE(Synced);

// Collectives inside of a checkpoint run again on all ranks, between those of the reducer.
LOCKSTEP_THREAD_TEST(CheckpointedDdp, RunsCollectivesAgain, 2) {
  DistributedDataParallel plain(seeded(Synced(false, world.group())), world.group());
  DistributedDataParallel ddp(seeded(Synced(true, world.group())), world.group());
  for (int step = 0; step < 3; ++step) {
    zero_grads(plain);
    zero_grads(ddp);
    const auto rows = my_rows(random_batch(8, 4, static_cast<uint64_t>(step)), world);
    plain(rows).pow(2).sum().backward();
    ddp(rows).pow(2).sum().backward();
    expect_close(gradients_of(ddp), gradients_of(plain), 0);
  }
}

LOCKSTEP_THREAD_TEST(CheckpointedDdp, IsMirroredByRanksThatRanOut, 3) {
  const auto train = [&](auto& ddp) {
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    Join({&ddp}).run([&] {
      for (int step = 0; step < 1 + world.rank(); ++step) {
        optimizer.zero_grad();
        loss_of(ddp(rows_of(world, step))).backward();
        optimizer.step();
      }
    });
  };
  DistributedDataParallel plain(seeded(PlainMlp(kSizes)), world.group());
  DistributedDataParallel ddp(seeded(SavingMlp(kSizes)), world.group());
  train(plain);
  train(ddp);
  for (std::size_t i = 0; i < plain.parameters().size(); ++i) {
    EXPECT_TRUE(ddp.parameters()[i].equal(plain.parameters()[i])) << i;
  }
}

}  // namespace lockstep::checkpointed_ddp_test
