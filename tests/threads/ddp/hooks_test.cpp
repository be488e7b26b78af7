// The ready comm hooks, on every backend for CPU tensors.
#include "lockstep/ddp/default_hooks.h"

#include "lockstep/ddp/hook_registry.h"
#include "lockstep/ddp/optimizer_overlap_hook.h"
#include "lockstep/ddp/post_local_sgd.h"
#include "lockstep/ddp/power_sgd.h"
#include "lockstep/ddp/quantization_hooks.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;

const std::vector<int64_t> kSizes = {6, 40, 30, 3};
constexpr int64_t kRows = 12;

struct Where {
  std::string backend;
  int world_size;
};

void PrintTo(const Where& where, std::ostream* out) {
  *out << where.backend << ", " << where.world_size << " ranks";
}

class DdpHooks : public ::testing::TestWithParam<Where> {
 protected:
  static void run(const testing::RankBody& body) {
    testing::run_threads_in_gtest({.world_size = GetParam().world_size, .backend = GetParam().backend}, body);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, DdpHooks,
                         ::testing::Values(Where{"threads", 2}, Where{"threads", 3}, Where{"shm", 2}, Where{"shm", 3},
                                           Where{"gloo", 2}, Where{"gloo", 3}),
                         [](const auto& info) { return info.param.backend + std::to_string(info.param.world_size); });

at::Tensor loss_of(const at::Tensor& output) {
  return output.pow(2).mean();
}

/// Gradients of each rank's own rows, by rank.
std::vector<std::vector<at::Tensor>> local_gradients(int world_size, const at::Tensor& batch) {
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& rows : batch.tensor_split(world_size)) {
    auto model = mlp(kSizes);
    loss_of(model->forward(rows)).backward();
    all.push_back(gradients_of(*model));
  }
  return all;
}

std::vector<at::Tensor> mean_of(const std::vector<std::vector<at::Tensor>>& by_rank) {
  std::vector<at::Tensor> mean;
  for (std::size_t i = 0; i < by_rank[0].size(); ++i) {
    auto sum = at::zeros_like(by_rank[0][i]);
    for (const auto& rank : by_rank) sum += rank[i];
    mean.push_back(sum / static_cast<int64_t>(by_rank.size()));
  }
  return mean;
}

/// Gradients after `steps` identical steps; small buckets, so that there are several.
std::vector<at::Tensor> gradients_with(const World& world, std::optional<CommHook> hook, int steps = 3) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), {.bucket_cap_mb = 0.002});
  if (hook) ddp.register_comm_hook(*hook);
  for (int step = 0; step < steps; ++step) {
    zero_grads(ddp);
    loss_of(ddp(my_rows(random_batch(kRows, kSizes[0], 3), world))).backward();
  }
  EXPECT_GT(ddp.bucket_plan().buckets().size(), 1);
  return gradients_of(ddp);
}

void expect_same_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

// DDP-66
TEST_P(DdpHooks, BuiltinAllReduceEqualsNoHook) {
  run([](const World& world) {
    const auto without = gradients_with(world, std::nullopt);
    for (const auto& hook : {builtin_hook(BuiltinCommHookType::kAllReduce, world.group()), allreduce_hook()}) {
      const auto with = gradients_with(world, hook);
      // Halves are exact; thirds are not, and without a hook it is a product with a third.
      world.world_size() == 2 ? expect_same_bits(with, without) : expect_close(with, without, 1e-6);
    }
  });
}

// DDP-66, DDP-68
TEST_P(DdpHooks, CompressionCastsDividesSumsAndCastsBack) {
  const auto local = local_gradients(GetParam().world_size, random_batch(kRows, kSizes[0], 3));
  const auto exact = mean_of(local);
  run([&](const World& world) {
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      auto low = local;
      for (auto& rank : low) {
        for (auto& gradient : rank) gradient = gradient.to(dtype).div_(world.world_size());
      }
      const auto hook = dtype == at::kHalf ? fp16_compress_hook(world.group()) : bf16_compress_hook(world.group());
      const auto actual = gradients_with(world, hook);
      if (world.world_size() == 2) {
        // One sum of two: there is one way to round it.
        for (std::size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(at::equal(actual[i], (low[0][i] + low[1][i]).to(at::kFloat))) << "tensor " << i;
        }
      }
      const auto precision = dtype == at::kHalf ? 1e-3 : 8e-3;
      expect_close(actual, exact, 2 * precision);
      EXPECT_GT(largest_difference(actual, exact), 0) << "nothing was compressed";
      EXPECT_EQ(actual[0].scalar_type(), at::kFloat);
    }
    expect_same_bits(gradients_with(world, builtin_hook(BuiltinCommHookType::kFp16Compress)),
                     gradients_with(world, fp16_compress_hook()));
  });
}

// DDP-66
TEST(DdpHookTypes, UnknownBuiltinTypesAreRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World&) {
    testing::expect_error([] { builtin_hook(static_cast<BuiltinCommHookType>(7)); }, {"7 is no built-in comm hook"});
    testing::expect_error([] { ddp_comm_hook(static_cast<DDPCommHookType>(77)); }, {"77 is no DDPCommHookType"});
  });
}

// DDP-67
TEST(DdpHookTypes, BfloatHooksAreRefusedAtRegistrationIfTheBackendCannotSumThem) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    {
      const auto without_bfloat =
          testing::replace_calls(CallKind::kAllReduce, [](const Call& call, const NextCall& next) {
            TORCH_CHECK(call.inputs[0].scalar_type() != at::kBFloat16, "Invalid scalar type");
            return next(call);
          });
      const testing::SharedScope on_all_ranks(world.group());
      testing::expect_error([&] { ddp.register_comm_hook(bf16_compress_hook(world.group())); },
                            {"bf16_compress_hook needs sums of BFloat16 on cpu"});
      testing::expect_error([&] { ddp.register_comm_hook(bf16_compress_wrapper(allreduce_hook())); },
                            {"bf16_compress_wrapper(allreduce_hook) needs sums of BFloat16 on cpu"});
    }
    // Nothing was registered, and the group is as before.
    ddp.register_comm_hook(bf16_compress_hook(world.group()));
    EXPECT_EQ(ddp.get_ddp_logging_data().strs_map.at("comm_hook"), "bf16_compress_hook");
    loss_of(ddp(random_batch(2, kSizes[0], 3))).backward();
  });
}

// DDP-68
TEST_P(DdpHooks, NoopLeavesEveryRankItsOwn) {
  const auto local = local_gradients(GetParam().world_size, random_batch(kRows, kSizes[0], 3));
  run([&](const World& world) { expect_same_bits(gradients_with(world, noop_hook()), local[world.rank()]); });
}

// DDP-68
TEST_P(DdpHooks, WrappersShowTheHookLowPrecision) {
  run([](const World& world) {
    expect_same_bits(gradients_with(world, fp16_compress_wrapper(allreduce_hook())),
                     gradients_with(world, fp16_compress_hook()));
    expect_same_bits(gradients_with(world, bf16_compress_wrapper(allreduce_hook())),
                     gradients_with(world, bf16_compress_hook()));
    std::vector<at::ScalarType> seen;
    CommHook spy{.name = "spy", .run = [&](GradBucket& bucket) {
                   seen.push_back(bucket.buffer().scalar_type());
                   for (const auto& gradient : bucket.gradients()) seen.push_back(gradient.scalar_type());
                   return completed_future(bucket.buffer() * 2);
                 }};
    const auto doubled = gradients_with(world, bf16_compress_wrapper(fp16_compress_wrapper(spy)));
    EXPECT_FALSE(seen.empty());
    for (const auto dtype : seen) EXPECT_EQ(dtype, at::kHalf);
    EXPECT_EQ(doubled[0].scalar_type(), at::kFloat);
    const auto local = gradients_with(world, noop_hook());
    for (std::size_t i = 0; i < local.size(); ++i) {
      EXPECT_TRUE(at::allclose(doubled[i], 2 * local[i], 2e-2, 1e-4)) << "tensor " << i;
    }
  });
}

// DDP-69
TEST_P(DdpHooks, EveryNameIsAHookOnTheDefaultGroup) {
  const auto local = local_gradients(GetParam().world_size, random_batch(kRows, kSizes[0], 3));
  const auto exact = mean_of(local);
  run([&](const World& world) {
    const std::vector<std::string> names = {
        "ALLREDUCE", "FP16_COMPRESS",   "BF16_COMPRESS",     "QUANTIZE_PER_TENSOR",     "QUANTIZE_PER_CHANNEL",
        "POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2", "NOOP"};
    std::vector<std::string> found;
    for (const auto type : ddp_comm_hook_types()) found.push_back(name_of(type));
    EXPECT_EQ(found, names);
    for (const auto& name : names) {
      EXPECT_EQ(name_of(ddp_comm_hook_type(name)), name);
      DistributedDataParallel ddp(mlp(kSizes), world.group());
      register_ddp_comm_hook(name, ddp);
      for (int step = 0; step < 2; ++step) {
        zero_grads(ddp);
        loss_of(ddp(my_rows(random_batch(kRows, kSizes[0], 3), world))).backward();
      }
      if (name == "NOOP") {
        expect_same_bits(gradients_of(ddp), local[world.rank()]);
      } else {
        EXPECT_LT(largest_difference(gradients_of(ddp), exact), 5e-3) << name;
      }
      // One hook, whatever its kind.
      testing::expect_error([&] { register_ddp_comm_hook(DDPCommHookType::kNoop, ddp); }, {"registered already"});
    }
    testing::expect_error([] { ddp_comm_hook_type("FP8"); },
                          {"there is no comm hook 'FP8'. There are ALLREDUCE, FP16"});
  });
}

/// Half a step of the coarsest byte of each rank, averaged: how far quantised means may be off.
double bound_of(const std::vector<std::vector<at::Tensor>>& by_rank) {
  double scales = 0;
  for (const auto& rank : by_rank) {
    double low = 0;
    double high = 0;
    for (const auto& gradient : rank) {
      low = std::min(low, gradient.min().item<double>());
      high = std::max(high, gradient.max().item<double>());
    }
    scales += (high - low) / 255;
  }
  return scales / static_cast<double>(by_rank.size()) / 2 * 1.001;
}

// DDP-73
TEST_P(DdpHooks, QuantisedMeansStayWithinHalfAStep) {
  const auto local = local_gradients(GetParam().world_size, random_batch(kRows, kSizes[0], 3));
  const auto exact = mean_of(local);
  run([&](const World& world) {
    const auto per_tensor = largest_difference(gradients_with(world, quantization_per_tensor_hook()), exact);
    EXPECT_GT(per_tensor, 0);
    EXPECT_LE(per_tensor, bound_of(local));
    const auto per_channel = largest_difference(gradients_with(world, quantization_per_channel_hook()), exact);
    EXPECT_LE(per_channel, bound_of(local));
    const auto fine = largest_difference(gradients_with(world, quantization_per_channel_hook(nullptr, 4)), exact);
    EXPECT_LT(fine, per_tensor);
    testing::expect_error([] { quantization_per_channel_hook(nullptr, 0); }, {"bucket_size must be 1 or more"});
  });
}

/// A bucket without a model: one flat gradient.
GradBucket bucket_of(const at::Tensor& buffer) {
  return GradBucket(
      {.buffer = buffer.clone(), .offsets = {0}, .lengths = {buffer.numel()}, .parameters = {at::zeros_like(buffer)}});
}

// DDP-73
TEST_P(DdpHooks, RowsOf512HaveScalesOfTheirOwn) {
  run([](const World& world) {
    // 512 small values and one large: with one scale for all, the small would be nothing.
    for (const int64_t length : {513, 512, 1024, 1, 1500}) {
      auto values = random_batch(1, length, 5 + world.rank()).view({-1}) * 1e-3;
      if (length > 512) values[512] = 100;
      auto sum = values.clone();
      all_reduce(sum, world.group());
      auto bucket = bucket_of(values);
      const auto mean = tensor_of(*quantization_per_channel_hook().run(bucket));
      ASSERT_EQ(mean.numel(), length);
      const auto first = std::min<int64_t>(length, 512);
      const auto expected = sum.narrow(0, 0, first) / world.world_size();
      EXPECT_LT((mean.narrow(0, 0, first) - expected).abs().max().item<double>(), 3e-5) << length;
    }
    // All equal, or nothing at all.
    for (const double value : {0.0, 3.0, -3.0}) {
      auto bucket = bucket_of(at::full({7}, value));
      EXPECT_TRUE(at::allclose(tensor_of(*quantization_per_tensor_hook().run(bucket)), at::full({7}, value)));
    }
  });
}

// DDP-73
TEST_P(DdpHooks, PostLocalSgdSwitchesFromAllRanksToASubgroupOrToNone) {
  const auto batch = random_batch(kRows, kSizes[0], 3);
  const auto local = local_gradients(GetParam().world_size, batch);
  const auto exact = mean_of(local);
  run([&](const World& world) {
    // Rank 0 on its own, the others together.
    std::vector<int> others;
    for (int rank = 1; rank < world.world_size(); ++rank) others.push_back(rank);
    const auto subgroup = new_subgroups(world.group(), {{0}, others});
    const auto within = world.rank() == 0 ? local[0] : mean_of({local.begin() + 1, local.end()});
    struct Case {
      PostLocalSGDOptions options;
      std::vector<at::Tensor> afterwards;
    };
    const std::vector<Case> cases = {
        {{.process_group = world.group(), .subgroup = subgroup, .start_local_sgd_iter = 2}, within},
        {{.start_local_sgd_iter = 2, .post_local_gradient_allreduce = false}, local[world.rank()]},
        {{.start_local_sgd_iter = 2}, exact},  // all ranks are on this host
    };
    for (const auto& [options, afterwards] : cases) {
      const auto state = std::make_shared<PostLocalSGDState>(options);
      DistributedDataParallel ddp(mlp(kSizes), world.group(), {.bucket_cap_mb = 0.002});
      ddp.register_comm_hook(post_local_sgd_hook(state));
      for (int step = 0; step < 4; ++step) {
        zero_grads(ddp);
        loss_of(ddp(my_rows(batch, world))).backward();
        EXPECT_EQ(state->iter(), std::min(step + 1, 2));
        expect_close(gradients_of(ddp), step < 2 ? exact : afterwards, 1e-6);
      }
    }
  });
}

// DDP-73
TEST_P(DdpHooks, HookThenStepEqualsStepAfterBackward) {
  const auto batch = random_batch(kRows, kSizes[0], 3);
  run([&](const World& world) {
    DistributedDataParallel expected(mlp(kSizes), world.group(), {.bucket_cap_mb = 0.002});
    torch::optim::SGD optimizer(expected.parameters(), 0.1);
    DistributedDataParallel ddp(mlp(kSizes), world.group(), {.bucket_cap_mb = 0.002});
    const auto sgd = [](const at::Tensor& parameter, const at::Tensor& gradient) { parameter.sub_(gradient * 0.1); };
    ddp.register_comm_hook(hook_then_optimizer(fp16_compress_hook(), sgd));
    expected.register_comm_hook(fp16_compress_hook());
    for (int step = 0; step < 3; ++step) {
      zero_grads(expected);
      loss_of(expected(my_rows(batch, world))).backward();
      optimizer.step();
      zero_grads(ddp);
      loss_of(ddp(my_rows(batch, world))).backward();
      expect_close(ddp.parameters(), expected.parameters(), 1e-6);
    }
    // A part of them.
    DistributedDataParallel partial(mlp(kSizes), world.group());
    const auto before = mlp(kSizes);
    partial.register_comm_hook(hook_then_optimizer(allreduce_hook(), sgd, std::vector{partial.parameters()[0]}));
    loss_of(partial(my_rows(batch, world))).backward();
    EXPECT_FALSE(at::equal(partial.parameters()[0], before->parameters()[0]));
    for (std::size_t i = 1; i < partial.parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(partial.parameters()[i], before->parameters()[i]));
    }
  });
}

/// Gradients of the fourth step, on the host.
std::vector<at::Tensor> gradients_on(c10::Device device, const World& world, const CommHook& hook) {
  auto model = mlp({32, 40, 40, 8});
  model->to(device);
  DistributedDataParallel ddp(model, world.group(), {.bucket_cap_mb = 0.002});
  ddp.register_comm_hook(hook);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    zero_grads(ddp);
    loss_of(ddp(my_rows(random_batch(kRows, 32, step), world).to(device))).backward();
    if (step < 3) optimizer.step();
  }
  auto gradients = gradients_of(ddp);
  for (auto& gradient : gradients) gradient = gradient.cpu();
  return gradients;
}

// DDP-66, DDP-68, DDP-71 to DDP-73: on an accelerator as on the host
TEST(DdpHookTypes, WorkOnCudaTensors) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  for (const auto& backend : {"threads", "gloo"}) {
    testing::run_threads_in_gtest({.world_size = 2, .backend = backend}, [](const World& world) {
      if (!serves_device(world.group(), at::kCUDA)) return;
      const auto power_sgd = [](bool is_stacked, int64_t rank) {
        return std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = rank,
                                                               .start_power_sgd_iter = 2,
                                                               .min_compression_rate = 1,
                                                               .batch_tensors_with_same_shape = is_stacked});
      };
      // Made anew for each device: some remember things.
      const std::vector<std::function<CommHook()>> hooks = {
          [] { return allreduce_hook(); },
          [] { return fp16_compress_hook(); },
          [] { return bf16_compress_hook(); },
          [] { return noop_hook(); },
          [] { return quantization_per_tensor_hook(); },
          [] { return quantization_per_channel_hook(); },
          [&] { return power_sgd_hook(power_sgd(false, 1)); },
          [&] { return power_sgd_hook(power_sgd(true, 4)); },
          [&] { return batched_power_sgd_hook(power_sgd(false, 2)); },
          [&] { return fp16_compress_wrapper(power_sgd_hook(power_sgd(false, 1))); },
      };
      for (const auto& hook : hooks) {
        const auto name = hook().name;
        const auto on_host = gradients_on(at::kCPU, world, hook());
        const auto on_device = gradients_on(world.device(), world, hook());
        EXPECT_LT(largest_difference(on_device, on_host), 3e-3) << name;
      }
    });
  }
}

struct PermutedImpl : torch::nn::Module {
  PermutedImpl() {
    // Its elements lie in another order than its sizes say.
    weight = register_parameter("weight", at::zeros({3, 4}).t());
  }
  at::Tensor forward(const at::Tensor& input) { return at::matmul(input, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Permuted);

// DDP-64
TEST(DdpHookTypes, GradientsOfStridedParametersAreInTheirPlaces) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel ddp(seeded(Permuted()), world.group());
    at::Tensor seen;
    ddp.register_comm_hook([&](GradBucket& bucket) {
      seen = bucket.gradients()[0].clone();
      return completed_future(bucket.buffer());
    });
    loss_of(ddp(random_batch(2, 4, 3))).backward();
    EXPECT_TRUE(at::equal(seen, ddp.module()->weight.grad()));
    EXPECT_EQ(seen.sizes(), ddp.module()->weight.sizes());
  });
}

struct SparseImpl : torch::nn::Module {
  SparseImpl()
      : rows(register_module("rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 3).sparse(true)))),
        head(register_module("head", torch::nn::Linear(3, 2))) {}
  at::Tensor forward(const at::Tensor& ids) { return head->forward(rows->forward(ids)); }
  torch::nn::Embedding rows;
  torch::nn::Linear head;
};
TORCH_MODULE(Sparse);

// DDP-68
TEST(DdpHookTypes, SparseGradientsAreAveragedToo) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto ids = at::tensor({0, 3, 3, 5, 8, 1}, at::kLong).view({3, 2});
    auto whole = seeded(Sparse());
    loss_of(whole->forward(ids)).backward();
    for (const auto& name : {"ALLREDUCE", "FP16_COMPRESS", "QUANTIZE_PER_CHANNEL", "POWER_SGD", "BATCHED_POWER_SGD"}) {
      DistributedDataParallel ddp(seeded(Sparse()), world.group());
      register_ddp_comm_hook(name, ddp);
      loss_of(ddp(ids)).backward();
      ASSERT_TRUE(ddp.module()->rows->weight.grad().is_sparse()) << name;
      EXPECT_TRUE(
          at::allclose(ddp.module()->rows->weight.grad().to_dense(), whole->rows->weight.grad().to_dense(), 2e-3, 1e-5))
          << name;
    }
  });
}

}  // namespace
}  // namespace lockstep
