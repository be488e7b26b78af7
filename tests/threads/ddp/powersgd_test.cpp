// PowerSGD: what it keeps, what it loses and gets back, and that ranks stay together whatever the timing.
#include "lockstep/ddp/power_sgd.h"

#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/orthogonalize.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/ddp_models.h"

namespace lockstep::powersgd_test {
namespace {

using namespace ddp_models;

struct Where {
  std::string backend;
  int world_size;
};

void PrintTo(const Where& where, std::ostream* out) {
  *out << where.backend << ", " << where.world_size << " ranks";
}

class PowerSgd : public ::testing::TestWithParam<Where> {
 protected:
  static void run(const testing::RankBody& body) {
    testing::run_threads_in_gtest({.world_size = GetParam().world_size, .backend = GetParam().backend}, body);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, PowerSgd,
                         ::testing::Values(Where{"threads", 2}, Where{"threads", 3}, Where{"shm", 2}, Where{"shm", 3},
                                           Where{"gloo", 2}, Where{"gloo", 3}),
                         [](const auto& info) { return info.param.backend + std::to_string(info.param.world_size); });

std::shared_ptr<PowerSGDState> state_of(const PowerSGDOptions& options) {
  return std::make_shared<PowerSGDState>(options);
}

using HookOf = CommHook (*)(const std::shared_ptr<PowerSGDState>&);
const std::vector<HookOf> kForms = {power_sgd_hook, batched_power_sgd_hook};

/// Of the given sizes, the same ones each time.
const std::vector<at::Tensor>& parameters_of(const std::vector<std::vector<int64_t>>& sizes,
                                             const at::TensorOptions& options) {
  thread_local std::map<std::vector<std::vector<int64_t>>, std::vector<at::Tensor>> known;
  auto& parameters = known[sizes];
  if (!parameters.empty() && parameters[0].dtype() == options.dtype()) return parameters;
  parameters.clear();
  for (const auto& size : sizes) parameters.push_back(at::zeros(size, options));
  return parameters;
}

/// A bucket without a model: gradients of the given sizes, one after the other in `flat`.
GradBucket bucket_of(const at::Tensor& flat, const std::vector<std::vector<int64_t>>& sizes) {
  std::vector<int64_t> offsets;
  std::vector<int64_t> lengths;
  const auto& parameters = parameters_of(sizes, flat.options());
  int64_t offset = 0;
  for (const auto& parameter : parameters) {
    offsets.push_back(offset);
    lengths.push_back(parameter.numel());
    offset += lengths.back();
  }
  return GradBucket({.buffer = flat.clone(), .offsets = offsets, .lengths = lengths, .parameters = parameters});
}

/// What the hook makes of `flat`, as a step of one bucket.
at::Tensor reduced(const CommHook& hook, const at::Tensor& flat, const std::vector<std::vector<int64_t>>& sizes) {
  auto bucket = bucket_of(flat, sizes);
  return tensor_of(*hook.run(bucket)).clone();
}

at::Tensor mean_over_ranks(const at::Tensor& tensor, const World& world) {
  auto sum = tensor.clone();
  all_reduce(sum, world.group());
  return sum / world.world_size();
}

at::Tensor random_flat(int64_t length, uint64_t seed) {
  return random_batch(1, length, seed).view({-1});
}

// DDP-70
TEST(PowerSgdState, HasPythonsDefaults) {
  const PowerSGDState state;
  const auto& options = state.options();
  EXPECT_EQ(options.process_group, nullptr);
  EXPECT_EQ(options.matrix_approximation_rank, 1);
  EXPECT_EQ(options.start_power_sgd_iter, 1000);
  EXPECT_EQ(options.min_compression_rate, 2);
  EXPECT_TRUE(options.use_error_feedback);
  EXPECT_TRUE(options.warm_start);
  EXPECT_EQ(options.orthogonalization_epsilon, 0);
  EXPECT_EQ(options.random_seed, 0U);
  EXPECT_EQ(options.compression_stats_logging_frequency, 10000);
  EXPECT_FALSE(options.batch_tensors_with_same_shape);
  EXPECT_EQ(state.iter(), 0);
  EXPECT_EQ(state.compression_stats().rate, 0);
}

// DDP-70
TEST(PowerSgdState, RefusesToStartBeforeBucketsAreRebuilt) {
  for (const int64_t start : {0, 1}) {
    testing::expect_error([&] { PowerSGDState({.start_power_sgd_iter = start, .warm_start = false}); },
                          {"start_power_sgd_iter must be above 1", "but is " + std::to_string(start)});
    testing::expect_error([&] { PowerSGDState({.start_power_sgd_iter = start, .use_error_feedback = false}); },
                          {"start_power_sgd_iter must be above 1"});
    PowerSGDState({.start_power_sgd_iter = start, .use_error_feedback = false, .warm_start = false});
  }
  PowerSGDState({.start_power_sgd_iter = 2});
  testing::expect_error([] { PowerSGDState({.matrix_approximation_rank = 0}); }, {"must be 1 or more"});
}

// DDP-71
TEST(PowerSgdState, DrawsTheSeedsPythonDraws) {
  // np.random.RandomState(5).randint(1_000_000_000), five times
  PowerSGDState state({.random_seed = 5});
  for (const uint64_t seed : {953453411, 236996814, 518541295, 349300413, 887852006}) {
    EXPECT_EQ(state.next_seed(), seed);
  }
}

// DDP-70
TEST_P(PowerSgd, AveragesPlainlyUntilItStarts) {
  run([](const World& world) {
    for (const auto form : kForms) {
      const auto state = state_of({.start_power_sgd_iter = 2});
      const auto hook = form(state);
      const std::vector<std::vector<int64_t>> sizes = {{12, 15}, {12}};
      for (int step = 0; step < 3; ++step) {
        const auto mine = random_flat(192, 10 * step + world.rank());
        const auto mean = mean_over_ranks(mine, world);
        const auto result = reduced(hook, mine, sizes);
        EXPECT_EQ(at::allclose(result, mean), step < 2) << "step " << step;
        EXPECT_EQ(state->iter(), step + 1);
        EXPECT_EQ(state->error_dict().empty(), step < 2);
      }
    }
  });
}

// DDP-71
TEST_P(PowerSgd, IsExactForMatricesOfItsRank) {
  run([](const World& world) {
    for (const int64_t rank : {1, 2, 4}) {
      for (const bool is_batched : {false, true}) {
        const auto state = state_of({.matrix_approximation_rank = rank,
                                     .start_power_sgd_iter = 0,
                                     .use_error_feedback = false,
                                     .warm_start = false,
                                     .batch_tensors_with_same_shape = is_batched});
        const auto hook = power_sgd_hook(state);
        // Two of one shape, one of another, with dims to spare, and a bias. All ranks' rows lie in one line.
        const auto row = random_batch(1, 40, 1);
        const auto a = at::matmul(random_batch(30, 1, 2 + world.rank()), row);
        const auto b = at::matmul(random_batch(30, 1, 20 + world.rank()), row);
        const auto c = at::matmul(random_batch(40, 1, 40 + world.rank()), random_batch(1, 36, 3));
        const auto bias = random_flat(30, 60 + world.rank());
        const auto flat = at::cat({a.view({-1}), bias, b.view({-1}), c.view({-1})});
        const auto result = reduced(hook, flat, {{30, 40}, {30}, {30, 5, 8}, {40, 6, 6}});
        EXPECT_TRUE(at::allclose(result, mean_over_ranks(flat, world), 1e-3, 1e-4))
            << "rank " << rank << " batched " << is_batched;
        // P and Q of each, and the bias as it is.
        EXPECT_EQ(state->compression_stats().numel_before, 3 * 1200 + 240 + 30);
        EXPECT_EQ(state->compression_stats().numel_after, (70 + 70 + 76) * rank + 30);
      }
    }
  });
}

// DDP-71
TEST_P(PowerSgd, CompressesWhereItPays) {
  run([](const World& world) {
    // (10 + 10) * 1 * rate < 100: 5 is not enough, a little less is.
    struct Case {
      int64_t rank;
      double rate;
      bool compresses;
    };
    for (const auto& [rank, rate, compresses] : {Case{1, 5, false}, Case{1, 4.99, true}, Case{2, 2.5, false},
                                                 Case{2, 2.49, true}, Case{64, 0.4, true}, Case{64, 0.5, false}}) {
      const auto state = state_of({.matrix_approximation_rank = rank,
                                   .start_power_sgd_iter = 0,
                                   .min_compression_rate = rate,
                                   .use_error_feedback = false,
                                   .warm_start = false});
      const auto mine = random_flat(100, 3 + world.rank());
      const auto result = reduced(power_sgd_hook(state), mine, {{10, 10}});
      const auto used = std::min<int64_t>(rank, 10);
      EXPECT_EQ(state->compression_stats().numel_after, compresses ? 20 * used : 100) << rank << " " << rate;
      // As many columns as the matrix has lose nothing.
      const bool is_exact = !compresses || used == 10;
      EXPECT_EQ(at::allclose(result, mean_over_ranks(mine, world), 1e-3, 1e-4), is_exact) << rank << " " << rate;
    }
    // No matrix, a vector, and nothing at all.
    const auto state = state_of({.start_power_sgd_iter = 0, .use_error_feedback = false, .warm_start = false});
    const auto mine = random_flat(6, 9 + world.rank());
    EXPECT_TRUE(at::allclose(reduced(power_sgd_hook(state), mine, {{}, {5}, {0, 3}}), mean_over_ranks(mine, world)));
  });
}

// DDP-71
TEST_P(PowerSgd, NothingIsLostWithErrorFeedback) {
  run([](const World& world) {
    for (const auto form : kForms) {
      for (const bool is_warm : {false, true}) {
        const auto state = state_of({.start_power_sgd_iter = 2, .warm_start = is_warm});
        const auto hook = form(state);
        const std::vector<std::vector<int64_t>> sizes = {{12, 15}, {12}, {20, 10}};
        auto given = at::zeros({392});
        auto got = at::zeros({392});
        for (int step = 0; step < 6; ++step) {
          const auto mine = random_flat(392, 10 * step + world.rank());
          given += mean_over_ranks(mine, world);
          got += reduced(hook, mine, sizes);
        }
        // What has not come yet is in the ranks' errors.
        const auto missing = mean_over_ranks(state->error_dict().at(0), world).narrow(0, 0, 392);
        EXPECT_FALSE(at::allclose(got, given, 1e-2, 1e-2));
        EXPECT_TRUE(at::allclose(got + missing, given, 1e-4, 1e-4));
      }
    }
  });
}

// DDP-71
TEST_P(PowerSgd, WarmStartComesCloserEveryStep) {
  run([](const World& world) {
    const auto mine = random_flat(400, 3 + world.rank());
    const auto mean = mean_over_ranks(mine, world);
    const auto best = std::get<1>(at::linalg_svd(mean.view({20, 20}))).narrow(0, 2, 18).norm().item<double>();
    for (const bool is_warm : {false, true}) {
      const auto state = state_of({.matrix_approximation_rank = 2,
                                   .start_power_sgd_iter = 2,
                                   .use_error_feedback = false,
                                   .warm_start = is_warm});
      double error = 0;
      for (int step = 0; step < 40; ++step) {
        error = (reduced(power_sgd_hook(state), mine, {{20, 20}}) - mean).norm().item<double>();
      }
      // Steps of a power iteration end at the best there is; random ones do not.
      EXPECT_EQ(error < 1.02 * best, is_warm) << error << " against " << best;
      EXPECT_EQ(state->q_memory_dict().empty(), !is_warm);
      EXPECT_EQ(state->p_memory_dict().empty(), !is_warm);
    }
  });
}

// DDP-71
TEST_P(PowerSgd, AllRanksGetTheSameBitsInEveryRun) {
  run([](const World& world) {
    for (const auto form : kForms) {
      for (const bool is_warm : {false, true}) {
        std::vector<at::Tensor> results;
        for (int repeat = 0; repeat < 2; ++repeat) {
          const auto state =
              state_of({.matrix_approximation_rank = 2, .start_power_sgd_iter = 2, .warm_start = is_warm});
          const auto hook = form(state);
          for (int step = 0; step < 5; ++step) {
            results.push_back(reduced(hook, random_flat(392, 10 * step + world.rank()), {{12, 15}, {12}, {20, 10}}));
          }
        }
        for (int step = 0; step < 5; ++step) {
          EXPECT_TRUE(at::equal(results[step], results[step + 5])) << "two runs differ in step " << step;
          auto of_rank_0 = results[step].clone();
          broadcast(of_rank_0, 0, world.group());
          EXPECT_TRUE(at::equal(results[step], of_rank_0)) << "ranks differ in step " << step;
        }
        EXPECT_FALSE(at::equal(results[3], results[4]));
      }
    }
  });
}

// DDP-71
TEST(PowerSgdAlone, LeavesTheGlobalGeneratorAlone) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World&) {
    const auto state = state_of({.start_power_sgd_iter = 0, .use_error_feedback = false, .warm_start = false});
    auto generator = at::detail::getDefaultCPUGenerator();
    const auto before = generator.get_state();
    reduced(power_sgd_hook(state), random_flat(400, 1), {{20, 20}});
    reduced(batched_power_sgd_hook(state), random_flat(400, 1), {{20, 20}});
    EXPECT_TRUE(at::equal(before, generator.get_state()));
  });
}

// DDP-72
TEST(Orthogonalize, MakesColumnsOrthonormal) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const double tolerance = dtype == at::kFloat || dtype == at::kDouble ? 1e-5 : 3e-2;
    for (const int64_t rank : {1, 2, 3, 5}) {
      const auto original = random_batch(2 * 9, rank, 4).view({2, 9, rank}).to(dtype);
      const auto matrices = original.clone();
      detail::orthogonalize(matrices, 0);
      const auto wide = matrices.to(at::kDouble);
      const auto products = at::bmm(wide.transpose(1, 2), wide);
      EXPECT_TRUE(at::allclose(products, at::eye(rank, at::kDouble).expand({2, rank, rank}), tolerance, tolerance))
          << dtype << " " << rank;
      // The space is the same: the columns of before can be made of those of now.
      const auto before = original.to(at::kDouble);
      const auto projected = at::bmm(wide, at::bmm(wide.transpose(1, 2), before));
      EXPECT_TRUE(at::allclose(projected, before, 3 * tolerance, 3 * tolerance)) << dtype << " " << rank;
    }
  }
}

// DDP-72
TEST(Orthogonalize, ColumnsOfZerosStayZero) {
  auto matrices = at::zeros({1, 5, 2});
  detail::orthogonalize(matrices, 0);
  EXPECT_TRUE(at::equal(matrices, at::zeros({1, 5, 2})));
  matrices.select(2, 1).fill_(3);
  detail::orthogonalize(matrices, 0);
  EXPECT_TRUE(at::equal(matrices.select(2, 0), at::zeros({1, 5})));
  EXPECT_NEAR(matrices.select(2, 1).norm().item<double>(), 1, 1e-6);
  // QR gives what it gives, but no NaN.
  auto three = at::zeros({1, 5, 3});
  detail::orthogonalize(three, 0);
  EXPECT_FALSE(three.isnan().any().item<bool>());
  // Half types do not overflow where their squares would.
  auto large = at::full({1, 100, 1}, 6e4, at::kHalf);
  detail::orthogonalize(large, 0);
  EXPECT_NEAR(large.to(at::kFloat).norm().item<double>(), 1, 1e-2);
  // With an epsilon, as long as it is worth.
  auto small = at::full({1, 1, 1}, 1e-3);
  detail::orthogonalize(small, 1e-3);
  EXPECT_NEAR(small.item<double>(), 0.5, 1e-6);
}

// DDP-72
TEST(Orthogonalize, DependentColumnsDoNotCountTwice) {
  const auto column = random_batch(50, 1, 4);
  auto matrices = at::cat({column, column * 1.1}, 1).unsqueeze(0).contiguous();
  detail::orthogonalize(matrices, 0);
  const auto projected = at::matmul(matrices[0], at::matmul(matrices[0].t(), column));
  EXPECT_TRUE(at::allclose(projected, column, 1e-4, 1e-5));
}

// DDP-72
TEST_P(PowerSgd, ZeroGradientsStayZero) {
  run([](const World&) {
    for (const auto form : kForms) {
      for (const int64_t rank : {1, 2, 3}) {
        const auto state = state_of({.matrix_approximation_rank = rank, .start_power_sgd_iter = 2});
        const auto hook = form(state);
        const std::vector<std::vector<int64_t>> sizes = {{12, 15}, {12}};
        for (int step = 0; step < 4; ++step) {
          EXPECT_TRUE(at::equal(reduced(hook, at::zeros({192}), sizes), at::zeros({192}))) << rank << " " << step;
        }
        EXPECT_FALSE(reduced(hook, random_flat(192, 1), sizes).isnan().any().item<bool>());
      }
    }
  });
}

// DDP-72
TEST_P(PowerSgd, BatchedFormPadsToASquareAndCutsBack) {
  run([](const World& world) {
    for (const int64_t length : {1, 2, 81, 82, 99, 100}) {
      const auto state = state_of({.start_power_sgd_iter = 0, .use_error_feedback = false, .warm_start = false});
      const auto hook = batched_power_sgd_hook(state);
      const auto side = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(length))));
      // Of rank 1, up to its end: ranks share the row.
      auto matrix = at::matmul(at::ones({side, 1}) * (world.rank() + 1), random_batch(1, side, 7));
      auto flat = matrix.view({-1}).narrow(0, 0, length).clone();
      const auto result = reduced(hook, flat, {{length}});
      ASSERT_EQ(result.numel(), length);
      const auto mean = mean_over_ranks(flat, world);
      EXPECT_TRUE(length != side * side || at::allclose(result, mean, 1e-4, 1e-5)) << length;
      EXPECT_EQ(state->compression_stats().numel_before, length);
      EXPECT_EQ(state->compression_stats().numel_after, 2 * side);
    }
  });
}

// DDP-72
TEST(PowerSgdAlone, CountsElementsBeforeAndAfter) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World&) {
    const auto state = state_of({.start_power_sgd_iter = 2});
    const auto hook = power_sgd_hook(state);
    for (int step = 0; step < 5; ++step) reduced(hook, random_flat(410, 1), {{20, 20}, {10}});
    // Three steps count.
    EXPECT_EQ(state->compression_stats().numel_before, 3 * 410);
    EXPECT_EQ(state->compression_stats().numel_after, 3 * 50);
    EXPECT_DOUBLE_EQ(state->compression_stats().rate, 8.2);
  });
}

// DDP-72
TEST_P(PowerSgd, GoesOnWhereItWasSaved) {
  run([](const World& world) {
    for (const auto form : kForms) {
      for (const bool is_warm : {false, true}) {
        const std::vector<std::vector<int64_t>> sizes = {{12, 15}, {12}, {20, 10}};
        const auto input = [&](int step) { return random_flat(392, 10 * step + world.rank()); };
        auto state = state_of({.matrix_approximation_rank = 2, .start_power_sgd_iter = 2, .warm_start = is_warm});
        std::string saved;
        std::vector<at::Tensor> expected;
        for (int step = 0; step < 6; ++step) {
          if (step == 4) saved = state->save();
          expected.push_back(reduced(form(state), input(step), sizes));
        }
        const auto loaded = PowerSGDState::load(saved);
        EXPECT_EQ(loaded->group(), world.group());
        EXPECT_EQ(loaded->iter(), 4);
        EXPECT_EQ(loaded->options().matrix_approximation_rank, 2);
        for (int step = 4; step < 6; ++step) {
          EXPECT_TRUE(at::equal(reduced(form(loaded), input(step), sizes), expected[step])) << "step " << step;
        }
        EXPECT_EQ(loaded->compression_stats().numel_before, state->compression_stats().numel_before);
      }
    }
    testing::expect_error([] { PowerSGDState::load("nothing of the kind"); }, {});
  });
}

// DDP-70, DDP-72: of another length, or of the same one (D-19)
TEST_P(PowerSgd, MemoryOfAnotherLayoutIsDropped) {
  run([](const World& world) {
    for (const int64_t rows : {15, 10}) {
      const auto state = state_of({.start_power_sgd_iter = 2});
      for (int step = 0; step < 4; ++step) reduced(power_sgd_hook(state), random_flat(400, step), {{20, 20}});
      const auto flat = at::matmul(random_batch(rows, 1, 2 + world.rank()), random_batch(1, 40, 1)).view({-1});
      const auto result = reduced(power_sgd_hook(state), flat, {{rows, 40}});
      EXPECT_TRUE(at::allclose(result, mean_over_ranks(flat, world), 1e-3, 1e-4)) << rows << " rows";
    }
  });
}

/// Trains with small buckets; the last gradients.
std::vector<at::Tensor> train(const World& world, const CommHook& hook, const DdpOptions& options, int steps) {
  DistributedDataParallel ddp(mlp({24, 32, 32, 32, 8}), world.group(), options);
  ddp.register_comm_hook(hook);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    zero_grads(ddp);
    ddp(my_rows(random_batch(12, 24, step), world)).pow(2).mean().backward();
    optimizer.step();
  }
  return gradients_of(ddp);
}

// DDP-71, DDP-72: a bucket's second sum must not meet another call, of a bucket or of the map of used parameters
TEST_P(PowerSgd, ManyBucketsKeepTheirOrder) {
  run([](const World& world) {
    for (const auto form : kForms) {
      for (const bool searches : {false, true}) {
        const auto train_once = [&] {
          const auto state = state_of({.start_power_sgd_iter = 2, .min_compression_rate = 1});
          const auto gradients =
              train(world, form(state), {.bucket_cap_mb = 0, .find_unused_parameters = searches}, 12);
          EXPECT_EQ(state->iter(), 12);
          EXPECT_EQ(state->error_dict().size(), 8U);
          return gradients;
        };
        const auto once = train_once();
        const auto again = train_once();
        for (std::size_t i = 0; i < once.size(); ++i) {
          EXPECT_TRUE(at::equal(once[i], again[i])) << "tensor " << i;
          auto of_rank_0 = once[i].clone();
          broadcast(of_rank_0, 0, world.group());
          EXPECT_TRUE(at::equal(once[i], of_rank_0)) << "tensor " << i;
        }
      }
    }
  });
}

// DDP-71
TEST(PowerSgdChaos, TimingChangesNothing) {
  std::vector<at::Tensor> expected;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<at::Tensor> actual;
    testing::run_threads_in_gtest({.world_size = 3, .chaos_seed = seed}, [&](const World& world) {
      const auto state = state_of({.start_power_sgd_iter = 2, .min_compression_rate = 1});
      const auto gradients =
          train(world, power_sgd_hook(state), {.bucket_cap_mb = 0, .find_unused_parameters = true}, 6);
      if (world.rank() == 0) actual = gradients;
    });
    ASSERT_FALSE(actual.empty());
    if (expected.empty()) expected = actual;
    for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "seed " << seed;
  }
}

// DDP-71
TEST_P(PowerSgd, LearnsAsTheWholeGradientDoes) {
  run([](const World& world) {
    const auto inputs = random_batch(24, 16, 1);
    const auto targets = at::tanh(at::matmul(inputs, random_batch(16, 4, 2)));
    const auto final_loss = [&](const std::optional<CommHook>& hook) {
      DistributedDataParallel ddp(mlp({16, 32, 4}), world.group());
      if (hook) ddp.register_comm_hook(*hook);
      torch::optim::SGD optimizer(ddp.parameters(), 0.2);
      double loss_value = 0;
      for (int step = 0; step < 150; ++step) {
        zero_grads(ddp);
        const auto loss = (ddp(my_rows(inputs, world)) - my_rows(targets, world)).pow(2).mean();
        loss.backward();
        optimizer.step();
        loss_value = mean_over_ranks(loss.detach().view({1}), world).item<double>();
      }
      return loss_value;
    };
    const auto plain = final_loss(std::nullopt);
    const auto compressed =
        final_loss(power_sgd_hook(state_of({.start_power_sgd_iter = 10, .min_compression_rate = 1})));
    const auto wrapped = final_loss(
        fp16_compress_wrapper(power_sgd_hook(state_of({.start_power_sgd_iter = 10, .min_compression_rate = 1}))));
    EXPECT_NEAR(compressed, plain, 0.3 * plain);
    EXPECT_NEAR(wrapped, plain, 0.3 * plain);
  });
}

// DDP-65, DDP-71: what fails in a callback comes out of backward, with bucket and hook named
TEST(PowerSgdFailure, OfTheSecondRoundReachesTheCaller) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel ddp(mlp({24, 32, 8}), world.group());
    ddp.register_comm_hook(power_sgd_hook(state_of({.start_power_sgd_iter = 2, .min_compression_rate = 1})));
    for (int step = 0; step < 3; ++step) ddp(random_batch(4, 24, 1)).sum().backward();
    auto output = ddp(random_batch(4, 24, 1));
    {
      // The rest and P are summed first.
      const auto broken = testing::fail_call(CallKind::kAllReduce, 2, "the cable is out");
      const testing::SharedScope on_all_ranks(world.group());
      testing::expect_error([&] { output.sum().backward(); }, {"powerSGD_hook", "bucket 0", "the cable is out"});
    }
    // Neither the wrapper nor the hook is stuck.
    ddp(random_batch(4, 24, 1)).sum().backward();
  });
}

}  // namespace
}  // namespace lockstep::powersgd_test
