// DistributedDataParallel in Join scopes: ranks with different numbers of inputs. Most tests say how many iterations
// each rank has and compare with what one process, or arithmetic, gives.
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/power_sgd.h"
#include "tests/support/ddp_models.h"

namespace lockstep::join_test {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::run_threads_in_gtest;

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

/// EXPECTs every rank to hold the same bits.
void expect_equal_on_all_ranks(const std::vector<at::Tensor>& tensors, const World& world) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto mine = tensors[i].detach().contiguous();
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world.world_size(); ++rank) all.push_back(at::empty_like(mine));
    all_gather(all, mine, world.group());
    for (const auto& other : all) EXPECT_TRUE(at::equal(other, mine)) << "tensor " << i;
  }
}

/// One layer, whose gradient is its input.
torch::nn::Linear plain_layer() {
  torch::nn::Linear layer(torch::nn::LinearOptions(5, 5).bias(false));
  return seeded(layer);
}

class DdpJoinWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, DdpJoinWorlds, ::testing::Values(2, 3, 4));

// JOIN-33, DDP-94: [Linear(5, 5), input 50] rank 0 has 2 inputs, the others 4
TEST_P(DdpJoinWorlds, DividesByAllRanksOrByThoseWithInputs) {
  const int ranks = GetParam();
  for (const bool by_all : {true, false}) {
    run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
      auto layer = plain_layer();
      DistributedDataParallel ddp(layer, world.group());
      ddp.join(by_all).run([&] {
        for (int step = 0; step < (world.rank() == 0 ? 2 : 4); ++step) {
          zero_grads(ddp);
          ddp(at::full({1, 5}, 50.0)).sum().backward();
          const double live = step < 2 ? ranks : ranks - 1;
          const auto expected = by_all ? 50 * live / ranks : 50.0;
          EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({5, 5}, expected))) << step;
        }
      });
    });
  }
}

// JOIN-50: rank r has 2(r+1) inputs and W times the learning rate; one process has all of them
TEST_P(DdpJoinWorlds, EqualsOneProcessWithAllInputs) {
  const int ranks = GetParam();
  const auto input = random_batch(1, 5, 3);
  auto reference = plain_layer();
  torch::optim::SGD reference_optimizer(reference->parameters(), 0.01);
  for (int step = 0; step < ranks * (ranks + 1); ++step) {
    reference_optimizer.zero_grad();
    reference->forward(input).sum().backward();
    reference_optimizer.step();
  }
  run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
    auto layer = plain_layer();
    DistributedDataParallel ddp(layer, world.group());
    torch::optim::SGD optimizer(layer->parameters(), 0.01 * ranks);
    const auto report = ddp.join().run([&] {
      for (int step = 0; step < 2 * (world.rank() + 1); ++step) {
        optimizer.zero_grad();
        ddp(input).sum().backward();
        optimizer.step();
      }
    });
    EXPECT_EQ(report.own_iterations, 2 * (world.rank() + 1));
    EXPECT_EQ(report.mirrored_iterations, 2 * (ranks - 1 - world.rank()));
    EXPECT_EQ(report.authoritative_rank, ranks - 1);
    EXPECT_TRUE(at::allclose(layer->weight, reference->weight, 1e-5, 1e-5));
  });
}

// JOIN-25, JOIN-29, JOIN-30, JOIN-31, JOIN-39, JOIN-40, DDP-93, DDP-95, DDP-97: rank 0 has none at all, and rebuilds
// buckets with the others
TEST_P(DdpJoinWorlds, RanksWithoutAnyInputsEndWithTheSameModel) {
  const std::vector<int> inputs = {0, 2, 3, 10};
  run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    auto model = mlp({6, 5, 4, 3}, 7 + static_cast<uint64_t>(world.rank()));
    DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0.0001});
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    ddp.join().run([&] {
      for (int step = 0; step < inputs[world.rank()]; ++step) {
        optimizer.zero_grad();
        ddp(random_batch(2, 6, 10 * world.rank() + step)).pow(2).mean().backward();
        optimizer.step();
      }
    });
    expect_equal_on_all_ranks(model->parameters(), world);
    EXPECT_TRUE(ddp.engine().reducer()->has_rebuilt_buckets());
    EXPECT_EQ(ddp.get_ddp_logging_data().ints_map.at("join_uneven_inputs"), 1);
  });
}

struct NormedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    const auto hidden = at::relu(norm(conv(input.view({-1, 1, 4, 4}))));
    return head(hidden.mean({2, 3}));
  }
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 3, 3)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(3));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(3, 2));
};
TORCH_MODULE(Normed);

// JOIN-35, DDP-74: rank 0 is the first to leave; then rank W-1's buffers count
TEST_P(DdpJoinWorlds, BuffersFollowTheHighestRankWithInputs) {
  const int ranks = GetParam();
  run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
    auto model = seeded(Normed());
    DistributedDataParallel ddp(model, world.group());
    ddp.join().run([&] {
      for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
        ddp(random_batch(3, 16, 100 * world.rank() + step)).sum().backward();
      }
    });
    expect_equal_on_all_ranks(model->buffers(), world);
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 2 * ranks);
  });
}

// JOIN-39: without forward sync buffers stay as they are
LOCKSTEP_THREAD_TEST(DdpJoin, OwnBuffersStayAtTheEnd, 2) {
  auto model = seeded(Normed());
  DistributedDataParallel ddp(model, world.group(), {.broadcast_buffers = false});
  ddp.join().run([&] {
    for (int step = 0; step < 1 + world.rank(); ++step) {
      ddp(random_batch(3, 16, world.rank() + 5)).sum().backward();
    }
  });
  EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 1 + world.rank());
  expect_equal_on_all_ranks(model->parameters(), world);
}

// JOIN-31, JOIN-40, DDP-95: a rank without inputs makes the same calls, in the same order, with as many bytes
LOCKSTEP_THREAD_TEST(DdpJoin, RanksWithoutInputsMakeTheSameCalls, 3) {
  const auto pair = new_group(world.group(), {0, 2});
  if (world.rank() == 1) return;
  for (const bool searches : {false, true}) {
    auto model = seeded(Normed());
    DistributedDataParallel ddp(model, pair, {.bucket_cap_mb = 0.0001, .find_unused_parameters = searches});
    EXPECT_EQ(ddp.join_process_group(), pair);
    EXPECT_EQ(ddp.join_device(), c10::Device(c10::kCPU));
    testing::Recorder recorder;
    ddp.join().run([&] {
      for (int step = 0; step < 1 + 2 * world.rank(); ++step) {
        zero_grads(ddp);
        ddp(random_batch(3, 16, world.rank() + step)).sum().backward();
      }
    });
    std::string calls;
    for (const auto& event : recorder.events("launch")) {
      if (!event.dtype.empty() && event.kind != "bucket") {
        calls += str(event.kind, " ", event.bytes, " ", event.dtype, "\n");
      }
    }
    const auto all = all_gather_object(calls, pair);
    EXPECT_EQ(all[0], all[1]);
    EXPECT_GT(std::count(calls.begin(), calls.end(), '\n'), 5 * 4);
  }
}

// JOIN-32: what a comm hook is given there are zeros, in buckets like the others
LOCKSTEP_THREAD_TEST(DdpJoin, HooksOfRanksWithoutInputsSeeZeros, 2) {
  auto model = mlp({6, 5, 3});
  DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0.0001});
  std::string seen;
  ddp.register_comm_hook([&](GradBucket& bucket) {
    seen += str(bucket.index(), " ", bucket.buffer().numel(), " ", bucket.buffer().dtype().name(), "\n");
    EXPECT_EQ(bucket.buffer().abs().sum().item<float>() == 0, world.rank() == 0);
    bucket.buffer().div_(2);
    return all_reduce_future(bucket.buffer(), world.group());
  });
  ddp.join().run([&] {
    for (int step = 0; step < 3 * world.rank(); ++step) {
      zero_grads(ddp);
      ddp(random_batch(2, 6, step)).pow(2).mean().backward();
    }
  });
  const auto all = all_gather_object(seen, world.group());
  EXPECT_EQ(all[0], all[1]);
  EXPECT_GE(std::count(seen.begin(), seen.end(), '\n'), 5);
}

/// Communicates by itself, which others cannot mirror.
struct TalkingImpl : MlpImpl {
  explicit TalkingImpl(GroupPtr group) : MlpImpl({6, 4, 2}), group_(std::move(group)) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto mean = input.detach().mean().reshape({1});
    all_reduce(mean, group_);
    return MlpImpl::forward(input - mean / group_->getSize());
  }
  GroupPtr group_;
};

// JOIN-41
LOCKSTEP_THREAD_TEST(DdpJoin, ModulesThatCommunicateEndWithTheFewestInputs, 2) {
  const auto model = std::make_shared<TalkingImpl>(world.group());
  DistributedDataParallel ddp(model, world.group());
  int steps = 0;
  expect_error(
      [&] {
        ddp.join(true, true, /*throw_on_early_termination=*/true).run([&] {
          for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
            ddp(random_batch(2, 6, step)).pow(2).mean().backward();
            ++steps;
          }
        });
      },
      {"ran out of inputs"});
  EXPECT_EQ(steps, 2);
  ddp(random_batch(2, 6, 9)).pow(2).mean().backward();
  expect_equal_on_all_ranks(gradients_of(*model), world);
}

struct Way {
  std::string name;
  DdpOptions options = {};
  std::function<void(DistributedDataParallel<Mlp>&)> prepare = nullptr;
  /// To one process, in full precision; none: it is another method.
  std::optional<double> tolerance = 1e-5;
};
std::ostream& operator<<(std::ostream& out, const Way& way) {
  return out << way.name;
}

std::vector<Way> ways() {
  const auto power_sgd = [](auto& ddp) {
    ddp.register_comm_hook(power_sgd_hook(std::make_shared<PowerSGDState>(PowerSGDOptions{
        .start_power_sgd_iter = 2, .min_compression_rate = 0.5, .use_error_feedback = true, .warm_start = true})));
  };
  return {{.name = "plain"},
          {.name = "small_buckets", .options = {.bucket_cap_mb = 0.0001}},
          {.name = "views", .options = {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true}},
          {.name = "static_graph", .options = {.bucket_cap_mb = 0.0001, .static_graph = true}},
          {.name = "search", .options = {.bucket_cap_mb = 0.0001, .find_unused_parameters = true}},
          {.name = "batched", .options = {.bucket_cap_mb = 0.0001, .batched_grad_copy = true}},
          {.name = "bfloat16",
           .options = {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}},
           .tolerance = 2.5e-2},
          {.name = "allreduce_hook", .prepare = [](auto& ddp) { ddp.register_comm_hook(allreduce_hook()); }},
          {.name = "fp16_hook",
           .prepare = [](auto& ddp) { ddp.register_comm_hook(fp16_compress_hook()); },
           .tolerance = 1e-2},
          {.name = "power_sgd", .options = {.bucket_cap_mb = 0.0001}, .prepare = power_sgd, .tolerance = std::nullopt}};
}

class DdpJoinWays : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, DdpJoinWays, ::testing::ValuesIn(ways()),
                         [](const auto& info) { return info.param.name; });

// JOIN-26, JOIN-32, JOIN-43, JOIN-51, DDP-96: several epochs, in each another rank has fewest inputs or none
TEST_P(DdpJoinWays, EpochsEndWithOneModel) {
  const auto inputs_of = [](int rank, int epoch) { return 3 * ((rank + epoch) % 3); };
  const auto loss_of = [](auto& model, int rank, int epoch, int step) {
    return model.forward(random_batch(2, 6, 100 * epoch + 10 * rank + step)).pow(2).mean();
  };
  // One process with all inputs of a step; what has none gives nothing to the mean over three ranks.
  auto reference = mlp({6, 7, 5, 3});
  torch::optim::SGD reference_optimizer(reference->parameters(), 0.05);
  std::vector<std::vector<at::Tensor>> expected;
  for (int epoch = 0; epoch < 4; ++epoch) {
    for (int step = 0; step < 6; ++step) {
      reference_optimizer.zero_grad();
      for (int rank = 0; rank < 3; ++rank) {
        if (step < inputs_of(rank, epoch)) (loss_of(*reference, rank, epoch, step) / 3).backward();
      }
      reference_optimizer.step();
    }
    expected.push_back(copies_of(reference->parameters()));
  }
  run_threads_in_gtest({.world_size = 3}, [&](const World& world) {
    const Warnings quiet;
    auto model = mlp({6, 7, 5, 3});
    DistributedDataParallel ddp(model, world.group(), GetParam().options);
    if (GetParam().prepare) GetParam().prepare(ddp);
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    for (int epoch = 0; epoch < 4; ++epoch) {
      const int inputs = inputs_of(world.rank(), epoch);
      const auto report = ddp.join().run([&] {
        for (int step = 0; step < inputs; ++step) {
          optimizer.zero_grad();
          loss_of(ddp, world.rank(), epoch, step).backward();
          optimizer.step();
        }
      });
      EXPECT_EQ(inputs_of(report.authoritative_rank.value(), epoch), 6);
      if (const auto tolerance = GetParam().tolerance) {
        expect_close(copies_of(model->parameters()), expected[epoch], *tolerance);
      }
      EXPECT_EQ(report.own_iterations, inputs);
      EXPECT_EQ(report.mirrored_iterations, 6 - inputs);
      expect_equal_on_all_ranks(model->parameters(), world);
    }
  });
}

// JOIN-47: a rank without inputs has the averaged gradients in .grad, for an optimizer that owns part of them
TEST_P(DdpJoinWays, RanksWithoutInputsHoldTheGradientsToo) {
  run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const Warnings quiet;
    auto model = mlp({6, 7, 5, 3});
    DistributedDataParallel ddp(model, world.group(), GetParam().options);
    if (GetParam().prepare) GetParam().prepare(ddp);
    std::vector<std::vector<at::Tensor>> seen;
    Join scope({&ddp}, {.on_mirrored_step = [&] { seen.push_back(copies_of(gradients_of(*model))); }});
    for (int step = 0; step < 4 * world.rank(); ++step) {
      zero_grads(ddp);
      ddp(random_batch(2, 6, step)).pow(2).mean().backward();
      seen.push_back(copies_of(gradients_of(*model)));
    }
    scope.finish();
    ASSERT_EQ(seen.size(), 4U);
    for (const auto& gradients : seen) expect_equal_on_all_ranks(gradients, world);
  });
}

// JOIN-36, JOIN-51: local steps in between, every second, third and fourth one reduced
TEST_P(DdpJoinWays, LocalStepsAreMirroredAsSuch) {
  run_threads_in_gtest({.world_size = 3}, [](const World& world) {
    const Warnings quiet;
    for (int interval = 2; interval <= 4; ++interval) {
      auto model = mlp({6, 7, 5, 3});
      DistributedDataParallel ddp(model, world.group(), GetParam().options);
      if (GetParam().prepare) GetParam().prepare(ddp);
      torch::optim::SGD optimizer(model->parameters(), 0.05);
      ddp.join().run([&] {
        for (int step = 1; step <= 3 + 5 * world.rank(); ++step) {
          const bool is_reduced = step % interval == 1;
          const auto no_sync = ddp.no_sync(!is_reduced);
          ddp(random_batch(2, 6, 10 * world.rank() + step)).pow(2).mean().backward();
          if (!is_reduced) continue;
          optimizer.step();
          optimizer.zero_grad();
        }
      });
      expect_equal_on_all_ranks(model->parameters(), world);
    }
  });
}

// JOIN-38: forwards without gradients inside a scope
TEST_P(DdpJoinWays, EvaluationIsMirroredAsSuch) {
  run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const Warnings quiet;
    auto model = mlp({6, 7, 5, 3});
    DistributedDataParallel ddp(model, world.group(), GetParam().options);
    if (GetParam().prepare) GetParam().prepare(ddp);
    ddp.join().run([&] {
      for (int step = 0; step < 1 + 3 * world.rank(); ++step) {
        ddp(random_batch(2, 6, step)).pow(2).mean().backward();
        const at::NoGradGuard no_grad;
        ddp(random_batch(2, 6, step + 50));
      }
    });
    expect_equal_on_all_ranks(model->parameters(), world);
  });
}

// JOIN-37: what only one rank uses, and what only the rank that left would have used
LOCKSTEP_THREAD_TEST(DdpJoin, UnusedParametersAreThoseNobodyWithInputsUses, 2) {
  auto model = seeded(Branchy());
  DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true});
  const auto right = model->right->weight.detach().clone();
  ddp.join().run([&] {
    for (int step = 0; step < 1 + 2 * world.rank(); ++step) {
      zero_grads(ddp);
      ddp(random_batch(2, 4, step), /*uses_left=*/world.rank() == 1, /*uses_right=*/world.rank() == 0).sum().backward();
      EXPECT_TRUE(model->left->weight.grad().defined());
      EXPECT_EQ(model->right->weight.grad().defined(), step == 0) << "rank 0 has left";
    }
  });
}

// JOIN-52: the mean over samples, of which the last batches have fewer and ranks without inputs none
TEST_P(DdpJoinWorlds, WeightsGiveTheMeanOverSamples) {
  const int ranks = GetParam();
  const int steps = 4;
  const auto samples_of = [&](int rank, int step) {
    if (step > rank + 1) return 0;
    return step == rank + 1 ? 1 : 3 + rank;  // the last batch is short
  };
  const auto batch_of = [&](int rank, int step) { return random_batch(samples_of(rank, step), 6, 10 * rank + step); };
  auto reference = mlp({6, 4, 2});
  torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
  std::vector<std::vector<at::Tensor>> expected;
  for (int step = 0; step < std::min(steps, ranks + 1); ++step) {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < ranks; ++rank) {
      if (samples_of(rank, step) > 0) parts.push_back(batch_of(rank, step));
    }
    reference_optimizer.zero_grad();
    reference->forward(at::cat(parts)).pow(2).mean().backward();
    expected.push_back(copies_of(gradients_of(*reference)));
    reference_optimizer.step();
  }
  run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
    auto model = mlp({6, 4, 2});
    DistributedDataParallel ddp(model, world.group());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    ddp.join({.options = {.weighted = true}}).run([&] {
      for (int step = 0; step < std::min<int>(steps, world.rank() + 2); ++step) {
        optimizer.zero_grad();
        const auto mine = batch_of(world.rank(), step);
        ddp.backward(ddp(mine).pow(2).mean(), static_cast<double>(mine.size(0)));
        expect_close(gradients_of(*model), expected[step], 1e-6);
        optimizer.step();
      }
    });
    expect_equal_on_all_ranks(model->parameters(), world);
    // Without the option ranks that ran out would not know of the weights.
    auto scope = ddp.join();
    const auto output = ddp(random_batch(1, 6, 1));
    expect_error([&] { ddp.backward(output.sum(), 2); }, {"JoinOptions::weighted"});
    output.sum().backward();
    scope.finish();
  });
}

// JOIN-61: a rank that ran out in the middle of an accumulation gives what it has added up, with its weight, and once
// (U-6).
LOCKSTEP_THREAD_TEST(DdpJoin, WeightsOfUnreducedBackwardsCountWithTheirGradients, 2) {
  auto layer = plain_layer();
  DistributedDataParallel ddp(layer, world.group());
  ddp.join({.options = {.weighted = true}}).run([&] {
    {
      const auto local = ddp.no_sync();
      ddp.backward(ddp(at::full({1, 5}, 1.0)).sum(), 4);
    }
    if (world.rank() == 1) return;
    ddp.backward(ddp(at::full({1, 5}, 4.0)).sum(), 4);
    EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({5, 5}, 2.0))) << layer->weight.grad();
    zero_grads(ddp);
    ddp.backward(ddp(at::full({1, 5}, 3.0)).sum(), 4);
    EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({5, 5}, 3.0))) << layer->weight.grad();
  });
}

// A rank that only mirrored the first backward of a static graph counts in its own first one; the others rebuild then.
LOCKSTEP_THREAD_TEST(DdpJoin, ARankCountsItsStaticGraphAfterTheOthers, 2) {
  auto model = mlp({6, 4, 2});
  DistributedDataParallel ddp(model, world.group(), {.static_graph = true});
  for (const int inputs : {world.rank() == 0 ? 1 : 0, 3}) {
    ddp.join().run([&] {
      for (int step = 0; step < inputs; ++step) {
        zero_grads(ddp);
        ddp(random_batch(2, 6, step)).pow(2).mean().backward();
      }
    });
  }
  EXPECT_TRUE(ddp.engine().reducer()->has_rebuilt_buckets());
  expect_equal_on_all_ranks(gradients_of(*model), world);
}

// JOIN-14, JOIN-19, DDP-97: all ranks stop where the first one runs out, and agree
TEST_P(DdpJoinWorlds, ThrowingScopesEndAtTheFewestInputs) {
  run_threads_in_gtest({.world_size = GetParam()}, [](const World& world) {
    auto model = mlp({6, 4, 2});
    DistributedDataParallel ddp(model, world.group());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    int steps = 0;
    expect_error(
        [&] {
          ddp.join(true, true, /*throw_on_early_termination=*/true).run([&] {
            for (int step = 0; step < 3 + world.rank(); ++step) {
              optimizer.zero_grad();
              ddp(random_batch(2, 6, 10 * world.rank() + step)).pow(2).mean().backward();
              optimizer.step();
              ++steps;
            }
          });
        },
        {"ran out of inputs"});
    EXPECT_EQ(steps, 3);
    expect_equal_on_all_ranks(model->parameters(), world);
  });
}

// JOIN-14: so do wrappers that reduce each gradient on its own, or all of them later, which cannot be mirrored
LOCKSTEP_THREAD_TEST(DdpJoin, ThrowingScopesTakeWhatCannotBeMirrored, 2) {
  for (const bool is_delayed : {false, true}) {
    auto whole = mlp({6, 2});
    torch::optim::SGD expected(whole->parameters(), 0.1);
    auto model = mlp({6, 2});
    DdpOptions options = {.per_parameter = true};
    if (is_delayed) {
      options = {.delay_all_reduce_named_params = {{"layer0.weight", model->layers[0]->weight},
                                                   {"layer0.bias", model->layers[0]->bias}},
                 .param_to_hook_all_reduce = model->layers[0]->weight};
    }
    DistributedDataParallel ddp(model, world.group(), options);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      expected.zero_grad();
      whole->forward(random_batch(4, 6, step)).pow(2).mean().backward();
      expected.step();
    }
    expect_error(
        [&] {
          ddp.join(true, true, /*throw_on_early_termination=*/true).run([&] {
            for (int step = 0; step < 3 + world.rank(); ++step) {
              optimizer.zero_grad();
              ddp(my_rows(random_batch(4, 6, step), world)).pow(2).mean().backward();
              optimizer.step();
            }
          });
        },
        {"ran out of inputs"});
    expect_close(model->parameters(), whole->parameters());
  }
}

// JOIN-47: gradients that live ranks keep of parameters nobody uses are in full precision on joined ranks too, whatever
// they were reduced in
LOCKSTEP_THREAD_TEST(DdpJoin, KeptGradientsAreInFullPrecision, 2) {
  const Warnings quiet;
  const std::vector<int> inputs = {1, 6};
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
  const auto loss = [](auto& net, int rank, int step) {
    return net(random_batch(3, 4, 10 * rank + step), /*uses_left=*/step % 3 == 0, true).to(at::kFloat).pow(2).mean();
  };
  auto whole = seeded(Branchy());
  auto net = [&](auto&&... arguments) { return whole->forward(arguments...); };
  torch::optim::SGD expected(whole->parameters(), options);
  for (int step = 0; step < 6; ++step) {
    expected.zero_grad(/*set_to_none=*/false);
    ((loss(net, 1, step) + (step < inputs[0] ? loss(net, 0, step) : at::zeros({}))) / 2).backward();
    expected.step();
  }
  auto model = seeded(Branchy());
  DistributedDataParallel ddp(
      model, world.group(),
      {.find_unused_parameters = true, .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  torch::optim::SGD optimizer(model->parameters(), options);
  const auto update = [&] {
    for (const auto& gradient : gradients_of(*model)) {
      EXPECT_TRUE(gradient.defined() && gradient.scalar_type() == at::kFloat) << gradient.toString();
    }
    optimizer.step();
  };
  ddp.join().mirror(update).run([&] {
    for (int step = 0; step < inputs[world.rank()]; ++step) {
      optimizer.zero_grad(/*set_to_none=*/false);
      loss(ddp, world.rank(), step).backward();
      update();
    }
  });
  expect_close(model->parameters(), whole->parameters(), 0.02);
}

// JOIN-23, JOIN-16: a disabled scope costs nothing, and gradients are those of all ranks
LOCKSTEP_THREAD_TEST(DdpJoin, DisabledScopesDoNothing, 2) {
  auto layer = plain_layer();
  DistributedDataParallel ddp(layer, world.group());
  const auto calls = [&](bool is_enabled) {
    auto scope = ddp.join(true, is_enabled);
    const testing::Recorder recorder;
    zero_grads(ddp);
    ddp(at::full({1, 5}, 10.0 * (world.rank() + 1))).sum().backward();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({5, 5}, 15.0)));
    const auto events = recorder.events("launch");
    const auto count =
        std::count_if(events.begin(), events.end(), [](const auto& event) { return event.kind == "all_reduce"; });
    scope.finish();
    return count;
  };
  // Buckets are rebuilt in the second step, and replicas compared in the second and third.
  for (int step = 0; step < 3; ++step) calls(false);
  EXPECT_EQ(calls(false), 1);
  EXPECT_EQ(calls(true), 3) << "the control message, and replicas are compared in the fifth step";
  EXPECT_EQ(calls(true), 2) << "the control message";
}

// JOIN-15: the control message comes before buckets are rebuilt and before buffers are sent
TEST(DdpJoin, AForwardBeginsWithTheControlMessage) {
  run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel ddp(model, world.group());
    ddp.join().run([&] {
      for (int step = 0; step < 3; ++step) {
        const testing::Recorder recorder;
        const auto output = ddp(random_batch(2, 4, step));
        std::vector<std::string> kinds;
        for (const auto& event : recorder.events("launch")) kinds.push_back(event.kind);
        // The second forward finds out in which order gradients came.
        ASSERT_GE(kinds.size(), step == 1 ? 3U : 2U) << step;
        EXPECT_EQ(kinds.front(), "all_reduce") << step;
        EXPECT_EQ(std::count(kinds.begin(), kinds.end(), "all_reduce"), 1) << step;
        output.sum().backward();
      }
    });
  });
}

// JOIN-17: two forwards and backwards per batch
LOCKSTEP_THREAD_TEST(DdpJoin, EveryForwardIsAnIteration, 2) {
  auto model = mlp({6, 4, 2});
  DistributedDataParallel ddp(model, world.group());
  const auto report = ddp.join().run([&] {
    for (int step = 0; step < 1 + world.rank(); ++step) {
      ddp(random_batch(1, 6, step)).sum().backward();
      ddp(random_batch(1, 6, step + 9)).sum().backward();
    }
  });
  EXPECT_EQ(report.own_iterations, 2 * (1 + world.rank()));
}

// JOIN-42: what cannot be mirrored is refused on every rank, before anything is sent
LOCKSTEP_THREAD_TEST(DdpJoin, RefusesWhatCannotBeMirrored, 2) {
  const auto refuse = [&](auto& ddp, const std::string& what) {
    expect_error([&] { ddp.join().finish(); }, {"Join", what});
    EXPECT_FALSE(ddp.join_config().enable);
    ddp.join(true, /*enable=*/false).finish();
  };
  auto hooked_model = seeded(Normed());
  DistributedDataParallel hooked(hooked_model, world.group());
  hooked.register_buffer_comm_hook([](BufferMap&) { return std::vector<FuturePtr>(); });
  refuse(hooked, "buffer comm hook");
  DistributedDataParallel single(mlp({4, 2}), world.group(), {.per_parameter = true});
  refuse(single, "per_parameter");
  DistributedDataParallel skipping(mlp({4, 2}), world.group(),
                                   {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
  refuse(skipping, "skip_all_reduce_unused_params");
  auto delayed_model = mlp({4, 3, 2});
  DistributedDataParallel delayed(
      delayed_model, world.group(),
      {.delay_all_reduce_named_params = {{"layer0.weight", delayed_model->layers[0]->weight}},
       .param_to_hook_all_reduce = delayed_model->layers[0]->bias});
  refuse(delayed, "delay_all_reduce_named_params");
}

/// A joinable that does nothing but begin the iteration.
struct Opener : Joinable {
  explicit Opener(GroupPtr group_of_ranks) : group(std::move(group_of_ranks)) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override { return std::make_unique<JoinHook>(); }
  c10::Device join_device() const override { return c10::kCPU; }
  GroupPtr join_process_group() const override { return group; }
  GroupPtr group;
};

// JOIN-34: the divisor is that of ranks with inputs also if the wrapper is not first, or a hook divides
LOCKSTEP_THREAD_TEST(DdpJoin, DivisorHoldsBehindAnotherJoinableAndWithHooks, 3) {
  const std::vector<std::pair<std::string, std::function<CommHook()>>> hooks = {
      {"no hook", nullptr},
      {"allreduce", [] { return allreduce_hook(); }},
      {"fp16", [] { return fp16_compress_hook(); }},
      {"bf16", [] { return bf16_compress_hook(); }}};
  for (const auto& [name, made] : hooks) {
    for (const bool is_first : {true, false}) {
      auto layer = plain_layer();
      Opener opener(world.group());
      DistributedDataParallel ddp(layer, world.group());
      if (made) ddp.register_comm_hook(made());
      const auto joinables = is_first ? std::vector<Joinable*>{&ddp} : std::vector<Joinable*>{&opener, &ddp};
      Join(joinables, {.options = {.divide_by_initial_world_size = false}}).run([&] {
        for (int step = 0; step < 1 + world.rank(); ++step) {
          if (!is_first) Join::notify(opener);
          zero_grads(ddp);
          ddp(at::full({1, 5}, 50.0)).sum().backward();
          // In half precision a third of the sum is not a number of its own.
          EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({5, 5}, 50.0), made ? 1e-2 : 1e-5))
              << name << (is_first ? ", first" : ", behind another one") << layer->weight.grad();
        }
      });
      expect_equal_on_all_ranks(layer->parameters(), world);
    }
  }
}

// JOIN-24, JOIN-56: an exception passes through, and the others are told
TEST(DdpJoin, RanksHearOfAnExceptionInTraining) {
  testing::run_threads_in_gtest({.world_size = 2, .backend = "gloo"}, [](const World& world) {
    auto model = mlp({6, 4, 2});
    DistributedDataParallel ddp(model, world.group());
    const auto train = [&] {
      ddp.join().run([&] {
        for (int step = 0; step < 2; ++step) {
          ddp(random_batch(1, 6, step)).sum().backward();
          if (world.rank() == 1) throw std::out_of_range("no such sample");
        }
      });
    };
    if (world.rank() == 1) {
      EXPECT_THROW(train(), std::out_of_range);
    } else {
      expect_error(train, {"rank 1", "no such sample"});
    }
  });
}

}  // namespace
}  // namespace lockstep::join_test
