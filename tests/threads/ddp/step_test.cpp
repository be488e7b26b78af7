// What one training step does: gradients are those of one process with the whole batch, buckets go in plan order, and
// steps that are not to be reduced are not.
#include <torch/serialize.h>

#include <atomic>
#include <sstream>
#include <thread>

#include "tests/support/ddp_models.h"
#include "tests/support/operator_counts.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

class DdpStep : public ::testing::TestWithParam<int> {};

/// Gradients of one process that has the whole batch.
std::vector<at::Tensor> reference(const std::vector<int64_t>& sizes, const at::Tensor& batch) {
  auto model = mlp(sizes);
  model->forward(batch).pow(2).mean().backward();
  return gradients_of(*model);
}

// DDP-11, DDP-36, DDP-39, DDP-44
TEST_P(DdpStep, GivesTheGradientsOfTheWholeBatch) {
  const auto batch = random_batch(12, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  testing::run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    for (const bool as_view : {false, true}) {
      for (const bool batched : {false, true}) {
        for (const double cap : {25.0, 0.0}) {
          DistributedDataParallel ddp(
              mlp({6, 5, 3}), world.group(),
              {.bucket_cap_mb = cap, .gradient_as_bucket_view = as_view, .batched_grad_copy = batched});
          for (int step = 0; step < 4; ++step) {
            zero_grads(ddp);
            ddp(my_rows(batch, world)).pow(2).mean().backward();
            expect_close(gradients_of(ddp), expected);
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, DdpStep, ::testing::Values(1, 2, 3, 4));

// DDP-11: not only close.
LOCKSTEP_THREAD_TEST(DdpStepOptions, BatchedCopiesGiveTheSameBits, 2) {
  const auto batch = random_batch(12, 6, 3);
  std::vector<at::Tensor> first;
  for (const bool batched : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 5, 3}), world.group(), {.batched_grad_copy = batched});
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      ddp(my_rows(batch, world)).pow(2).mean().backward();
    }
    if (first.empty()) first = gradients_of(ddp);
    expect_close(gradients_of(ddp), first, 0);
  }
}

// DDP-11: one operation per bucket, and none with create_graph.
LOCKSTEP_THREAD_TEST(DdpStepOptions, BatchedCopiesAreOnePerBucket, 2) {
  const Warnings quiet;
  for (const bool batched : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 5, 3}), world.group(), {.bucket_cap_mb = 0, .batched_grad_copy = batched});
    const auto copies = [&](bool creates_graph) {
      zero_grads(ddp);
      const auto loss = ddp(random_batch(2, 6, 3)).pow(2).mean();
      const testing::OperatorCounts counts;
      loss.backward({}, creates_graph, creates_graph);
      return counts.of("aten::_foreach_copy_");
    };
    EXPECT_EQ(copies(false), batched ? 1 : 0);
    EXPECT_EQ(copies(false), batched ? 4 : 0) << "buckets are rebuilt by now";
    EXPECT_EQ(copies(true), 0);
    zero_grads(ddp);
  }
}

// DDP-29, DDP-30, DDP-38
LOCKSTEP_THREAD_TEST(DdpStepOptions, BucketsAreRebuiltInOrderAndLaunchedWhileBackwardRuns, 2) {
  // 40,400 bytes a layer: every layer fills a bucket, and none does with its weight alone.
  DistributedDataParallel ddp(mlp({100, 100, 100, 100}), world.group(), {.bucket_cap_mb = 40'300.0 / (1 << 20)});
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 1U);
  const auto step = [&] {
    Recorder recorder;
    ddp(random_batch(3, 100, world.rank())).sum().backward();
    return recorder.events();
  };
  step();
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 1U);
  {
    const at::NoGradGuard no_grad;
    ddp(random_batch(3, 100, 1));
  }
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 1U) << "a forward without gradients must not rebuild";
  const auto events = step();
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 3U);
  EXPECT_TRUE(ddp.engine().reducer()->has_rebuilt_buckets());
  std::vector<std::string> order;
  for (const auto& event : events) {
    if (event.kind == "bucket" && event.state == "launch") order.push_back(event.unit);
    if (event.kind == "gradient" && event.unit == "layer0.weight") order.push_back("last gradient");
  }
  // The last gradient is the first layer's; by then the others are on their way.
  EXPECT_EQ(order, (std::vector<std::string>{"bucket 0", "bucket 1", "last gradient", "bucket 2"}));
  step();
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 3U);
}

// DDP-31: gradients that are kept move into the new buckets.
LOCKSTEP_THREAD_TEST(DdpStepOptions, GradientsSurviveARebuild, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.gradient_as_bucket_view = as_view});
    const auto batch = at::full({1, 4}, world.rank() + 1.0);
    for (int step = 1; step <= 3; ++step) {
      ddp(batch).sum().backward();  // never zeroed: reduced gradients add up
      // The mean of own and others' sums: 1.5 + what was there.
      EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5 * step))) << step;
    }
  }
}

/// Tells observers when it runs.
struct ToldImpl : MlpImpl {
  ToldImpl() : MlpImpl({4, 3}) { register_buffer("buffer", at::zeros({1})); }
  at::Tensor forward(const at::Tensor& input) {
    Event event;
    event.kind = "ddp_forward";
    event.state = "module";
    announce(std::move(event));
    return MlpImpl::forward(input);
  }
};
TORCH_MODULE(Told);

// DDP-33
LOCKSTEP_THREAD_TEST(DdpStepOptions, PhasesComeInOrder, 2) {
  using Phases = std::vector<std::string>;
  const auto phases_of_step = [](auto& ddp) {
    Phases seen;
    Recorder recorder;
    const testing::OperatorCounts ranges;
    const auto output = ddp(random_batch(2, 4, 1));
    EXPECT_EQ(ranges.of("DistributedDataParallel.forward"), 1);
    for (const auto& event : recorder.events()) {
      if (event.kind == "ddp_forward") seen.push_back(event.state);
    }
    output.sum().backward();
    return seen;
  };
  DistributedDataParallel ddp(Told(), world.group());
  EXPECT_EQ(phases_of_step(ddp), (Phases{"set_up", "stats", "sync_buffers", "module", "arm"}));
  EXPECT_EQ(phases_of_step(ddp), (Phases{"stats", "rebuild", "sync_buffers", "module", "arm"}));
  DistributedDataParallel hooked(Told(), world.group());
  hooked.register_buffer_comm_hook([](BufferMap&) { return std::vector<FuturePtr>{completed_future(at::ones({1}))}; },
                                   BufferHookLocation::kPostForward);
  EXPECT_EQ(phases_of_step(hooked), (Phases{"set_up", "stats", "module", "buffer_hook", "arm"}));
}

struct KeepingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input, const std::vector<at::Tensor>& others) {
    seen = {input, others[0]};
    return fc->forward(input);
  }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(4, 2));
  std::vector<at::Tensor> seen;
};
TORCH_MODULE(Keeping);

// DDP-34
LOCKSTEP_THREAD_TEST(DdpStepOptions, InputsAreLeftAloneWithoutDeviceIds, 2) {
  DistributedDataParallel ddp(Keeping(), world.group());
  const auto input = random_batch(2, 4, 1);
  const std::vector<at::Tensor> others = {at::ones({3})};
  ddp(input, others).sum().backward();
  EXPECT_TRUE(ddp.module()->seen[0].is_same(input));
  EXPECT_TRUE(ddp.module()->seen[1].is_same(others[0]));
}

// DDP-35
LOCKSTEP_THREAD_TEST(DdpStepOptions, ForwardWithoutGradientsArmsNothing, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  {
    const at::NoGradGuard no_grad;
    ddp(random_batch(2, 4, 1));
  }
  EXPECT_EQ(ddp.engine().reducer()->iterations(), 0);
  EXPECT_FALSE(ddp.engine().reducer()->is_armed());
  ddp(random_batch(2, 4, 1)).sum().backward();
  EXPECT_EQ(ddp.engine().reducer()->iterations(), 1);
}

/// Its gradient has other strides than the parameter.
struct ScaleByTransposed : torch::autograd::Function<ScaleByTransposed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight) {
    context->saved_data["unused"] = 0;
    return weight.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0].t().contiguous().t()};
  }
};
struct OddStridesImpl : torch::nn::Module {
  OddStridesImpl() : weight(register_parameter("weight", at::ones({3, 4}))) {}
  at::Tensor forward(const at::Tensor& input) { return at::matmul(input, ScaleByTransposed::apply(weight)); }
  at::Tensor weight;
};
TORCH_MODULE(OddStrides);

// DDP-37
LOCKSTEP_THREAD_TEST(DdpStepOptions, WarnsOnceOfOtherStridesAndIsRight, 2) {
  const Warnings warnings;
  DistributedDataParallel ddp(OddStrides(), world.group());
  for (int step = 0; step < 3; ++step) {
    // A dense one of other strides is kept as it comes only if something is there to add it to.
    ddp.module()->weight.mutable_grad() = at::zeros({4, 3}).t();
    ddp(at::full({1, 3}, world.rank() + 1.0)).sum().backward();
    EXPECT_TRUE(at::allclose(ddp.module()->weight.grad(), at::full({3, 4}, 1.5)));
  }
  EXPECT_EQ(warnings.count("'weight' has strides"), 1);
}

// DDP-37
LOCKSTEP_THREAD_TEST(DdpStepOptions, RefusesGradientsOfAnotherDtype, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto output = ddp(random_batch(2, 4, 1));
  // What a user who casts gradients by hand might leave behind.
  ddp.module()->layers[0]->bias.mutable_grad() = at::zeros({3}, at::kDouble);
  expect_error([&] { output.sum().backward(); }, {"'layer0.bias'", "Double", "Float"});
}

// DDP-40
LOCKSTEP_THREAD_TEST(DdpStepOptions, ParameterUsedOutsideForwardIsNamed, 2) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
  // As a checkpointed segment does: a layer's gradient comes in a backward inside the backward, and again outside.
  const auto outside = ddp.module()->layers[1]->forward(random_batch(2, 3, 1)).sum();
  auto output = ddp(random_batch(2, 4, 1));
  output.register_hook([&](const at::Tensor&) { outside.backward({}, /*retain_graph=*/true); });
  expect_error([&] { output.sum().backward(); }, {"second time", "'layer1.", "used outside of the wrapper's forward()",
                                                  "activation checkpointing", "static_graph"});
}

// DDP-41
LOCKSTEP_THREAD_TEST(DdpStepOptions, UnfinishedReductionIsNamedWithItsRemedy, 2) {
  DistributedDataParallel ddp(seeded(Branchy()), world.group());
  ddp(random_batch(2, 4, 1), true, false).sum().backward();
  expect_error([&] { ddp.check_finalized(); },
               {"rank " + std::to_string(world.rank()), "'right.weight', 'right.bias' (4, 5)"});
  expect_error([&] { ddp(random_batch(2, 4, 1), true, true); }, {"'right.weight'", "find_unused_parameters"});
  EXPECT_EQ(ddp.get_ddp_logging_data().ints_map.at("has_error"), 1);
  // With a search, only a backward that leaves out what it could reach.
  DistributedDataParallel searching(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
  const std::vector<at::Tensor> some = {searching.module()->left->weight};
  searching(random_batch(2, 4, 1), true, true).sum().backward({}, false, false, at::TensorList(some));
  expect_error([&] { searching(random_batch(2, 4, 1), true, true); }, {"'trunk.weight'", "could not look into"});
  barrier(world.group());
}

// DDP-42
LOCKSTEP_THREAD_TEST(DdpStepOptions, SecondBackwardStaysLocalAndIsWarnedOfOnce, 2) {
  const Warnings warnings;
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto output = ddp(at::full({1, 4}, world.rank() + 1.0)).sum();
  output.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5)));
  output.backward({}, true);
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5 + world.rank() + 1)));
  output.backward();
  EXPECT_EQ(warnings.count("without a forward pass"), 1);
  // The next step is reduced as ever.
  zero_grads(ddp);
  ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5)));
}

// DDP-43
LOCKSTEP_THREAD_TEST(DdpStepOptions, TwoForwardsAndOneBackwardAreOneReduction, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto one = ddp(at::full({1, 4}, world.rank() + 1.0));
  const auto other = ddp(at::full({1, 4}, 10.0));
  Recorder recorder;
  (one.sum() + other.sum()).backward();
  testing::expect_count(recorder.events("launch"), "all_reduce", 1);
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 11.5)));
}

// DDP-43
LOCKSTEP_THREAD_TEST(DdpStepOptions, AutogradGradSyncsNothing, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto output = ddp(at::full({1, 4}, world.rank() + 1.0)).sum();
  Recorder recorder;
  const auto gradients = torch::autograd::grad({output}, {ddp.module()->layers[0]->weight});
  EXPECT_TRUE(recorder.events("launch").empty());
  EXPECT_TRUE(at::allclose(gradients[0], at::full({3, 4}, world.rank() + 1.0)));
  ddp(at::full({1, 4}, world.rank() + 1.0)).sum().backward();
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5)));
}

// DDP-44
LOCKSTEP_THREAD_TEST(DdpStepOptions, ReadyTimesAreReadable, 2) {
  DistributedDataParallel ddp(mlp({4, 4, 3}), world.group());
  ddp(random_batch(2, 4, 1)).sum().backward();
  const auto times = ddp.engine().reducer()->last_step().ready_times_ns;
  ASSERT_EQ(times.size(), 4U);
  for (const auto time : times) EXPECT_GT(time, 0);
  EXPECT_LT(times[2], times[0]) << "the second layer's gradient comes first";
}

// DDP-44
LOCKSTEP_THREAD_TEST(DdpStepOptions, CreateGraphReducesFirstOrderOnly, 2) {
  const Warnings warnings;
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  const auto input = at::full({1, 4}, world.rank() + 1.0);
  ddp(input).pow(2).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  const auto all = at::empty({2, 12});
  all_gather_into_tensor(all, ddp.module()->layers[0]->weight.grad().detach().reshape({1, 12}), world.group());
  EXPECT_TRUE(at::equal(all[0], all[1]));
  EXPECT_GE(warnings.count("gradients of gradients are"), 1);
  zero_grads(ddp);
}

// DDP-44
LOCKSTEP_THREAD_TEST(DdpStepOptions, OtherThreadsMayAskWhileItTrains, 2) {
  DistributedDataParallel ddp(mlp({4, 4, 3}), world.group(), {.bucket_cap_mb = 0});
  std::atomic<bool> is_over = false;
  int64_t last = 0;
  std::thread asking([&] {
    while (!is_over) {
      const auto step = ddp.engine().reducer()->last_step();
      EXPECT_GE(step.iteration, last);
      EXPECT_LE(step.iteration, ddp.engine().reducer()->iterations());
      last = step.iteration;
      EXPECT_LE(ddp.get_ddp_logging_data().ints_map.at("iteration"), 50);
    }
  });
  for (int step = 0; step < 50; ++step) ddp(random_batch(2, 4, step)).sum().backward();
  is_over = true;
  asking.join();
  EXPECT_EQ(ddp.engine().reducer()->last_step().iteration, 50);
}

// DDP-45
LOCKSTEP_THREAD_TEST(DdpNoSync, MicroStepsEqualOneBigBatch, 2) {
  const auto batch = random_batch(12, 6, 3);
  auto model = mlp({6, 5, 3});
  model->forward(batch).pow(2).sum().backward();
  const auto expected = gradients_of(*model);
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 5, 3}), world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      const auto parts = my_rows(batch, world).tensor_split(3);
      {
        Recorder recorder;
        const auto guard = ddp.no_sync();
        for (int i = 0; i < 2; ++i) ddp(parts[i]).pow(2).sum().backward();
        testing::expect_none(recorder.events("launch"), "all_reduce");
      }
      ddp(parts[2]).pow(2).sum().backward();
      auto sums = gradients_of(ddp);
      for (auto& sum : sums) sum = sum * world.world_size();
      expect_close(sums, expected, 1e-4);  // DDP-59
    }
  }
}

// U-6: a guard that says when it counts, in a loop that accumulates
LOCKSTEP_THREAD_TEST(DdpNoSync, BySteps, 2) {
  const auto batch = random_batch(16, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  DistributedDataParallel ddp(mlp({6, 5, 3}), world.group());
  const auto parts = my_rows(batch, world).tensor_split(4);
  for (int step = 0; step < 12; ++step) {
    if (step % 4 == 0) zero_grads(ddp);
    Recorder recorder;
    const auto guard = ddp.no_sync(step % 4 != 3);
    (ddp(parts[static_cast<std::size_t>(step % 4)]).pow(2).mean() / 4).backward();
    if (step % 4 != 3) {
      testing::expect_none(recorder.events("launch"), "all_reduce");
    } else {
      expect_close(gradients_of(ddp), expected);
    }
  }
  const auto outer = ddp.no_sync();
  const auto inner = ddp.no_sync(false);
  EXPECT_FALSE(ddp.engine().is_sync_enabled()) << "inside of another one, false changes nothing";
}

// DDP-45
LOCKSTEP_THREAD_TEST(DdpNoSync, NestsAndIsUndoneByAnException, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group());
  {
    const auto outer = ddp.no_sync();
    try {
      const auto inner = ddp.no_sync();
      throw std::runtime_error("leaves the scope");
    } catch (const std::runtime_error&) {
    }
    EXPECT_FALSE(ddp.engine().is_sync_enabled());
  }
  EXPECT_TRUE(ddp.engine().is_sync_enabled());
  // With only backward inside, the step is reduced: its forward was armed.
  const auto output = ddp(at::full({1, 4}, world.rank() + 1.0)).sum();
  const auto guard = ddp.no_sync();
  output.backward();
  EXPECT_TRUE(at::allclose(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 1.5)));
}

// DDP-46
LOCKSTEP_THREAD_TEST(DdpNoSync, AlsoSkipsBuffersOfTheNextForward, 2) {
  auto module = mlp({4, 3});
  module->register_buffer("buffer", at::zeros({1}));
  DistributedDataParallel ddp(module, world.group());
  const auto broadcasts = [&](bool is_synced) {
    Recorder recorder;
    const auto guard = ddp.no_sync(!is_synced);
    ddp(random_batch(2, 4, 1)).sum().backward();
    int count = 0;
    for (const auto& event : recorder.events("launch")) count += event.kind == "broadcast" && event.bytes == 4 ? 1 : 0;
    return count;
  };
  EXPECT_EQ(broadcasts(true), 1);
  EXPECT_EQ(broadcasts(false), 1);  // the former forward synced
  EXPECT_EQ(broadcasts(false), 0);
  EXPECT_EQ(broadcasts(true), 0);
  EXPECT_EQ(broadcasts(true), 1);
}

// Beyond Python: ranks with different numbers of samples.
LOCKSTEP_THREAD_TEST(DdpWeights, GiveTheExactMeanOverAllSamples, 3) {
  const auto batch = random_batch(12, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  const std::vector<int64_t> cuts = {2, 9};  // 2, 7 and 3 samples
  const auto mine = batch.tensor_split(at::IntArrayRef(cuts))[world.rank()];
  for (const bool has_hook : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 5, 3}), world.group());
    if (has_hook) {
      ddp.register_comm_hook([group = world.group()](GradBucket& bucket) {
        bucket.buffer().div_(group->getSize());
        return all_reduce_future(bucket.buffer(), group);
      });
    }
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      ddp.backward(ddp(mine).pow(2).mean(), static_cast<double>(mine.size(0)));
      expect_close(gradients_of(ddp), expected);
      // And in several pieces of different sizes.
      zero_grads(ddp);
      const auto first = mine.narrow(0, 0, 1);
      const auto rest = mine.narrow(0, 1, mine.size(0) - 1);
      {
        const auto guard = ddp.no_sync();
        ddp.backward(ddp(first).pow(2).mean(), 1);
      }
      ddp.backward(ddp(rest).pow(2).mean(), static_cast<double>(rest.size(0)));
      expect_close(gradients_of(ddp), expected);
    }
    // An ordinary step afterwards is an ordinary mean.
    zero_grads(ddp);
    ddp(my_rows(batch, world)).pow(2).mean().backward();
    expect_close(gradients_of(ddp), expected);
    expect_error([&] { ddp.backward(ddp(mine).sum(), -1); }, {"-1", "negative"});
  }
}

// A rank without samples: its mean is NaN, and counts nothing.
LOCKSTEP_THREAD_TEST(DdpWeights, LeaveOutRanksWithoutSamples, 3) {
  const auto batch = random_batch(8, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  const auto mask = at::zeros({8, 1});
  mask.narrow(0, world.rank() * 4, world.rank() < 2 ? 4 : 0).fill_(1);
  const auto samples = mask.sum();
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 5, 3}), world.group(), {.gradient_as_bucket_view = as_view});
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      const auto loss = (ddp(batch).pow(2).mean(1, /*keepdim=*/true) * mask).sum() / samples;
      EXPECT_EQ(loss.isnan().item<bool>(), world.rank() == 2);
      ddp.backward(loss, samples.item<double>());
      expect_close(gradients_of(ddp), expected);
    }
    // And is there again in the next step.
    zero_grads(ddp);
    ddp.backward(ddp(batch).pow(2).mean(), 1);
    expect_close(gradients_of(ddp), expected);
  }
}

// Gradients that are there already are averages, and stay what they are.
LOCKSTEP_THREAD_TEST(DdpWeights, AddToGradientsOfEarlierSteps, 2) {
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({6, 3}), world.group(), {.gradient_as_bucket_view = as_view});
    const auto batch = random_batch(4, 6, world.rank());
    ddp.backward(ddp(batch).sum(), 1 + 3 * world.rank());
    auto twice = gradients_of(ddp);
    for (auto& gradient : twice) gradient = gradient * 2;
    ddp.backward(ddp(batch).sum(), 1 + 3 * world.rank());
    expect_close(gradients_of(ddp), twice);
  }
}

LOCKSTEP_THREAD_TEST(DdpWeights, AreNotMixedWithPlainBackwards, 2) {
  DistributedDataParallel ddp(mlp({6, 3}), world.group());
  {
    const auto guard = ddp.no_sync();
    ddp.backward(ddp(random_batch(2, 6, 1)).sum(), 2);
  }
  const auto output = ddp(random_batch(2, 6, 2));
  expect_error([&] { output.sum().backward(); }, {"backward(loss, weight)", "no_sync"});
  expect_error([&] { ddp.backward(output.sum(), std::numeric_limits<double>::infinity()); }, {"finite"});
}

// torch::load() gives parameters other accumulators, which have no hooks
LOCKSTEP_THREAD_TEST(DdpStep, AveragesAfterLoadingIntoAWrappedModule, 2) {
  std::stringstream file;
  torch::save(mlp({6, 5, 3}), file);
  const auto batch = random_batch(8, 6, 3);
  const auto expected = reference({6, 5, 3}, batch);
  const std::vector<DdpOptions> ways = {{},
                                        {.find_unused_parameters = true},
                                        {.static_graph = true},
                                        {.gradient_as_bucket_view = true},
                                        {.per_parameter = true}};
  for (const auto& options : ways) {
    const Warnings quiet;
    auto model = mlp({6, 5, 3}, 99);
    DistributedDataParallel ddp(model, world.group(), options);
    ddp(my_rows(batch, world)).sum().backward();
    file.clear();
    file.seekg(0);
    torch::load(model, file);
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      expect_close(gradients_of(ddp), expected);
    }
  }
}

}  // namespace
}  // namespace lockstep
