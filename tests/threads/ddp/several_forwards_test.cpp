// Several forwards before their backwards, some under no_sync(), some without any backward: each backward does what its
// forwards were to do, and gradients are those of one process with the whole batch.
#include <thread>

#include "tests/support/ddp_models.h"

namespace lockstep::several_forwards_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

const std::vector<int64_t> kSizes = {4, 5, 4};
const std::vector<DdpOptions> kWays = {{},
                                       {.bucket_cap_mb = 0},
                                       {.find_unused_parameters = true},
                                       {.static_graph = true},
                                       {.gradient_as_bucket_view = true},
                                       {.batched_grad_copy = true}};

at::Tensor part(int rank, int number) {
  return random_batch(3, 4, static_cast<uint64_t>(10 * rank + number));
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

/// The mean over the ranks of what `loss(forward, rank)` gives.
template <class M>
std::vector<at::Tensor> whole_batch(M model, int ranks, const auto& loss) {
  at::Tensor sum = at::zeros({});
  for (int rank = 0; rank < ranks; ++rank) sum = sum + loss(*model, rank);
  (sum / ranks).backward();
  return gradients_of(*model);
}

// D-6: a forward under no_sync() leaves what an earlier one was to do alone, in either order and one after the other.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, OneUnderNoSyncLeavesASyncedOneArmed, 2) {
  const Warnings quiet;
  const auto expected = whole_batch(mlp(kSizes), 2, [](auto& model, int rank) {
    return loss_of(model.forward(part(rank, 0))) + loss_of(model.forward(part(rank, 1)));
  });
  const auto expected_in_a_row = whole_batch(
      mlp(kSizes), 2, [](auto& model, int rank) { return loss_of(model.forward(model.forward(part(rank, 0)))); });
  for (const auto& options : kWays) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    const auto forward = [&](const at::Tensor& input, bool is_synced) {
      const auto guard = ddp.no_sync(!is_synced);
      return ddp(input);
    };
    for (int step = 0; step < 3; ++step) {
      for (const bool synced_first : {true, false}) {
        zero_grads(ddp);
        const auto one = forward(part(world.rank(), 0), synced_first);
        const auto other = forward(part(world.rank(), 1), !synced_first);
        (loss_of(one) + loss_of(other)).backward();
        expect_close(gradients_of(ddp), expected);
        zero_grads(ddp);
        loss_of(forward(forward(part(world.rank(), 0), synced_first), !synced_first)).backward();
        expect_close(gradients_of(ddp), expected_in_a_row);
      }
    }
  }
}

// D-6: with a backward of its own each is local, or reduced with what the local ones have left.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, LocalBackwardsMayComeBeforeASyncedOnes, 2) {
  const Warnings warnings;
  const auto both = whole_batch(mlp(kSizes), 2, [](auto& model, int rank) {
    return loss_of(model.forward(part(rank, 0))) + loss_of(model.forward(part(rank, 1)));
  });
  auto alone = mlp(kSizes);
  loss_of(alone->forward(part(world.rank(), 1))).backward();
  for (const auto& options : kWays) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      const auto synced = ddp(part(world.rank(), 0));
      at::Tensor local;
      {
        const auto guard = ddp.no_sync();
        local = ddp(part(world.rank(), 1));
      }
      Recorder recorder;
      loss_of(local).backward();
      testing::expect_none(recorder.events("launch"), "all_reduce");
      expect_close(gradients_of(ddp), gradients_of(*alone));
      loss_of(synced).backward();
      expect_close(gradients_of(ddp), both);
    }
  }
  EXPECT_EQ(warnings.count("not averaged"), 0);
}

// DDP-43: Python reduces the first of the backwards and leaves the others local.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, SyncedOnesMayHaveABackwardEach, 2) {
  const Warnings warnings;
  const auto both = whole_batch(mlp(kSizes), 2, [](auto& model, int rank) {
    return loss_of(model.forward(part(rank, 0))) + loss_of(model.forward(part(rank, 1)));
  });
  for (const auto& options : kWays) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    for (int step = 0; step < 4; ++step) {
      zero_grads(ddp);
      const auto one = ddp(part(world.rank(), 0));
      const auto other = ddp(part(world.rank(), 1));
      loss_of(step % 2 == 0 ? one : other).backward();
      loss_of(step % 2 == 0 ? other : one).backward();
      expect_close(gradients_of(ddp), both);
    }
  }
  EXPECT_EQ(warnings.count("not averaged"), 0);
}

// A forward for the log, with gradients on: neither the steps around it nor what is added up locally notice.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, OnesWithoutBackwardLeaveNothing, 2) {
  const Warnings warnings;
  const auto expected = whole_batch(mlp(kSizes), 2, [](auto& model, int rank) {
    return loss_of(model.forward(part(rank, 0))) + loss_of(model.forward(part(rank, 1)));
  });
  for (const auto& options : kWays) {
    DistributedDataParallel ddp(mlp(kSizes), world.group(), options);
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      const auto kept = ddp(part(world.rank(), 5));
      ddp(part(world.rank(), 6));
      {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), 7));
        Recorder recorder;
        loss_of(ddp(part(world.rank(), 0))).backward();
        testing::expect_none(recorder.events("launch"), "all_reduce");
      }
      const auto output = ddp(part(world.rank(), 1));
      {
        const auto guard = ddp.no_sync();
        ddp(part(world.rank(), 8));
      }
      loss_of(output).backward();
      expect_close(gradients_of(ddp), expected);
    }
  }
  EXPECT_EQ(warnings.count("not averaged"), 0);
}

// Which parameters are unused belongs to the forwards of a backward, not to the last one.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, EachKnowsWhatItLeavesUnused, 2) {
  const Warnings quiet;
  const auto run = [](auto& model, int rank, bool left) { return loss_of(model.forward(part(rank, 0), left, !left)); };
  const auto both = whole_batch(
      seeded(Branchy()), 2, [&](auto& model, int rank) { return run(model, rank, true) + run(model, rank, false); });
  const auto left = whole_batch(seeded(Branchy()), 2, [&](auto& model, int rank) { return run(model, rank, true); });
  for (const double cap : {0.0, 25.0}) {
    DistributedDataParallel ddp(seeded(Branchy()), world.group(),
                                {.bucket_cap_mb = cap, .find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      // Both in one backward.
      zero_grads(ddp);
      auto first = run(ddp, world.rank(), true);
      auto second = run(ddp, world.rank(), false);
      (first + second).backward();
      expect_close(gradients_of(ddp), both);
      // The later one has none, kept and dropped.
      zero_grads(ddp);
      first = run(ddp, world.rank(), true);
      second = run(ddp, world.rank(), false);
      first.backward();
      expect_close(gradients_of(ddp), left);
      zero_grads(ddp);
      first = run(ddp, world.rank(), true);
      run(ddp, world.rank(), false);
      first.backward();
      expect_close(gradients_of(ddp), left);
      // The later one is local.
      zero_grads(ddp);
      first = run(ddp, world.rank(), true);
      {
        const auto guard = ddp.no_sync();
        second = run(ddp, world.rank(), false);
      }
      (first + second).backward();
      expect_close(gradients_of(ddp), both);
    }
  }
}

/// Shows its tensor to nobody.
struct Hidden {
  at::Tensor tensor;
};
struct HidingImpl : MlpImpl {
  HidingImpl() : MlpImpl(kSizes) {}
  Hidden forward(const at::Tensor& input) { return {MlpImpl::forward(input)}; }
};
TORCH_MODULE(Hiding);

// What cannot be recognized is as in Python: the last synced forward arms the next backward.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, OutputsThatShowNoTensorAreReducedToo, 2) {
  const Warnings quiet;
  const auto both = whole_batch(mlp(kSizes), 2, [](auto& model, int rank) {
    return loss_of(model.forward(part(rank, 0))) + loss_of(model.forward(part(rank, 1)));
  });
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(seeded(Hiding()), world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      const auto one = ddp(part(world.rank(), 0));
      std::optional<NoSyncGuard> guard(std::in_place, ddp.engine());
      const auto other = ddp(part(world.rank(), 1));
      guard.reset();
      (loss_of(one.tensor) + loss_of(other.tensor)).backward();
      expect_close(gradients_of(ddp), both);
      zero_grads(ddp);
      guard.emplace(ddp.engine());
      loss_of(ddp(part(world.rank(), 0)).tensor).backward();
      guard.reset();
      loss_of(ddp(part(world.rank(), 1)).tensor).backward();
      expect_close(gradients_of(ddp), both);
    }
  }
}

// A reduction that lacks gradients is not made up for by another forward's.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, AnUnfinishedReductionIsNamedByTheNextBackward, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group());
  const auto one = ddp(part(world.rank(), 0), true, false).sum();
  const auto other = ddp(part(world.rank(), 1), true, true).sum();
  one.backward();
  expect_error([&] { other.backward(); }, {"'right.weight'", "find_unused_parameters"});
  barrier(world.group());
}

// One for an evaluation, on a thread of the program's own, in the middle of a backward.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, OneOnAnotherThreadLeavesARunningBackwardAlone, 2) {
  const auto batch = random_batch(8, 4, 1);
  auto reference = mlp({4, 3, 3, 2});
  reference->forward(batch).pow(2).mean().backward();
  DistributedDataParallel ddp(mlp({4, 3, 3, 2}), world.group());
  int evaluations = 0;
  // When its gradient comes, those of later layers are in their buckets.
  ddp.module()->layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
    std::thread([&] {
      const at::NoGradGuard no_grad;
      ddp(batch);
      ++evaluations;
    }).join();
    return gradient;
  });
  for (int step = 0; step < 3; ++step) {
    zero_grads(ddp);
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    expect_close(gradients_of(ddp), gradients_of(*reference));
  }
  EXPECT_EQ(evaluations, 3);
}

// One with gradients begins a step of its own, so the backward is refused instead of averaged in part, and can be
// repeated.
LOCKSTEP_THREAD_TEST(DdpSeveralForwards, OneWithGradientsOnAnotherThreadIsRefused, 2) {
  const auto batch = random_batch(8, 4, 1);
  auto reference = mlp({4, 3, 3, 2});
  reference->forward(batch).pow(2).mean().backward();
  DistributedDataParallel ddp(mlp({4, 3, 3, 2}), world.group());
  bool interferes = false;
  ddp.module()->layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
    if (interferes) std::thread([&] { ddp(batch); }).join();
    return gradient;
  });
  for (int step = 0; step < 4; ++step) {
    zero_grads(ddp);
    interferes = step == 2;
    const auto run = [&] { ddp(my_rows(batch, world)).pow(2).mean().backward(); };
    if (interferes) {
      expect_error(run, {"another thread", "NoGradGuard"});
    } else {
      run();
      expect_close(gradients_of(ddp), gradients_of(*reference));
    }
  }
}

}  // namespace
}  // namespace lockstep::several_forwards_test
