// Parameters that arrive while the next forward runs: whoever touches one waits for it, and everything is as if step()
// had waited.
#include <c10/core/InferenceMode.h>
#include <torch/serialize.h>

#include <future>
#include <latch>
#include <sstream>

#include "lockstep/intercept/key.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/interpose.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::overlapped_sync_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using torch::optim::AdamW;

ZeroOptions overlapped(ZeroOptions options) {
  options.overlap_parameter_sync = true;
  return options;
}

/// Some that are sent together, some alone.
const std::vector<std::vector<int64_t>> kShapes = {{7, 5}, {400, 400}, {0}, {5}, {2, 70000}, {}};

template <class Body>
void for_each_way(const World& world, const Body& body) {
  for (const auto& [name, zero] : ways(world.group())) {
    SCOPED_TRACE(name);
    body(overlapped(zero));
  }
}

/// A program with all that may come between steps. Returns what it saw: losses, norms and parameters.
template <class Optim>
std::vector<at::Tensor> train(const World& world, const std::string& path, ZeroOptions options, at::ScalarType dtype,
                              const typename ZeroRedundancyOptimizer<Optim>::LocalOptions& local) {
  std::vector<at::Tensor> seen;
  const auto see = [&](const at::Tensor& value) { seen.push_back(value.detach().clone()); };
  auto model = ddp_models::mlp(kSizes);
  model->to(dtype);
  model->layers[2]->bias.requires_grad_(false);
  DistributedDataParallel ddp(model, world.group(), small_buckets());
  options.ddp = ddp;
  ZeroRedundancyOptimizer<Optim> optimizer(ddp.parameters(), local, options);
  const auto view = model->layers[1]->weight.detach().view({-1});
  const auto loss_at = [&](int step) {
    return ddp(ddp_models::random_batch(4, kSizes[0], 10 * step + world.rank()).to(dtype)).pow(2).mean();
  };
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    if (step % 3 == 1) {
      const auto local_only = ddp.no_sync();
      loss_at(100 + step).backward();
    }
    const auto loss = loss_at(step);
    loss.backward();
    see(loss);
    if (step % 2 == 0) see(optimizer.clip_grad_norm_(0.5));
    optimizer.step();
    if (step == 2) see(view);
    if (step == 3) {
      const c10::InferenceMode inference;
      see(model(at::ones({2, kSizes[0]}, at::TensorOptions(dtype))));
    }
    if (step == 5) {
      const at::NoGradGuard no_grad;
      model->layers[3]->weight.mul_(0.5);
      see(model->layers[3]->weight.norm());
    }
    if (step == 6) {
      optimizer.consolidate_state_dict(0);
      save_sharded(optimizer, path);
      load_sharded(optimizer, path);
    }
  }
  for (const auto& parameter : model->parameters()) see(parameter);
  return seen;
}

template <class Optim>
void expect_same_bits(const World& world, const std::string& path, const ZeroOptions& options, at::ScalarType dtype,
                      const typename ZeroRedundancyOptimizer<Optim>::LocalOptions& local) {
  expect_same(train<Optim>(world, path, overlapped(options), dtype, local),
              train<Optim>(world, path, options, dtype, local));
}

// ZERO-75
TEST(ZeroOverlappedSync, TrainsToTheBitsOfABlockingOne) {
  const testing::TempDir folder;
  const auto path = folder.file("state");
  const auto body = [&](const World& world) {
    auto all = ways(world.group());
    all.emplace_back("gradients", ZeroOptions{.stage = ZeroStage::kGradients});
    all.emplace_back("replicated", ZeroOptions{.stage = ZeroStage::kReplicated});
    for (auto [name, zero] : all) {
      SCOPED_TRACE(name);
      expect_same_bits<AdamW>(world, path, zero, at::kFloat, adamw());
      expect_same_bits<optim::AdamW>(world, path, zero, at::kFloat, {.lr = 0.02});
      zero.master_dtype = at::kFloat;
      expect_same_bits<AdamW>(world, path, zero, at::kBFloat16, adamw());
    }
  };
  on_ranks(body, {2, 3, 4}, {"threads"});
  on_ranks(body, {3}, {"shm", "gloo"});
}

// ZERO-75: where nothing is there before somebody has waited
TEST(ZeroOverlappedSync, WhoeverReadsAParameterWaits) {
  testing::run_threads_in_gtest({.world_size = 3, .completes_late = true}, [](const World& world) {
    for_each_way(world, [&](const ZeroOptions& zero) {
      const auto parameters = parameters_of(kShapes);
      const auto expected = copies_of(parameters);
      ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
      AdamW plain(expected, adamw());
      const auto view = parameters[1].detach().narrow(0, 100, 200).t();
      const auto data = parameters[4].data();
      for (int step = 0; step < 5; ++step) {
        set_gradients(parameters, step);
        set_gradients(expected, step);
        optimizer.step();
        plain.step();
        const auto read = std::vector<std::function<bool()>>{
            [&] { return at::equal(view, expected[1].narrow(0, 100, 200).t()); },
            [&] { return at::equal(data, expected[4]); },
            [&] { return parameters[5].item<float>() == expected[5].item<float>(); },
            [&] { return at::equal(at::stack({parameters[3], parameters[3]})[1], expected[3]); },
            [&] { return parameters[0].allclose(expected[0], 0, 0); },
        };
        EXPECT_TRUE(read[step]()) << step;
        // By another thread.
        auto norm = std::async(std::launch::async, [&] { return parameters[1].detach().norm(); });
        EXPECT_TRUE(at::equal(norm.get(), expected[1].detach().norm()));
        if (step == 4) expect_same(parameters, expected);
      }
    });
  });
}

// ZERO-75
TEST(ZeroOverlappedSync, AddressesAreGivenAwayOnceTheValuesAreThere) {
  on_ranks(
      [](const World& world) {
        for_each_way(world, [&](const ZeroOptions& zero) {
          const auto model = ddp_models::mlp(kSizes);
          const auto parameters = model->parameters();
          const auto expected = copies_of(parameters);
          const auto earlier = parameters[0].detach();  // before there is an optimizer
          ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
          AdamW plain(expected, adamw());
          set_gradients(parameters, 1);
          set_gradients(expected, 1);
          optimizer.step();
          plain.step();
          expect_error([&] { static_cast<void>(parameters[0].const_data_ptr()); }, {"wait_for_parameters()"});
          std::ostringstream none;
          expect_error([&] { torch::save(model, none); }, {"wait_for_parameters()"});
          // With buffers it was cut off when these were made.
          if (!zero.parameters_as_bucket_view && zero.partition != ZeroPartition::kElements) {
            expect_error([&] { static_cast<void>(earlier.sum()); }, {"wait_for_parameters()"});
          }
          optimizer.wait_for_parameters();
          EXPECT_EQ(*parameters[0].const_data_ptr<float>(), expected[0].flatten()[0].item<float>());
          std::ostringstream file;
          torch::save(model, file);
          std::istringstream read(file.str());
          auto loaded = ddp_models::mlp(kSizes);
          torch::load(loaded, read);
          expect_same(loaded->parameters(), expected);
        });
      },
      {2, 3});
}

// ZERO-75: rank 1 holds back what comes last until rank 0 has used what comes first
TEST(ZeroOverlappedSync, AForwardBeginsBeforeAllIsThere) {
  for (const auto& options : std::vector<ZeroOptions>{{}, {.partition = ZeroPartition::kElements}}) {
    std::promise<void> has_begun;
    auto begun = has_begun.get_future();
    testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
      auto zero = overlapped(options);
      zero.process_group = world.group();
      // By elements the first half belongs to rank 0, which reads it last then.
      const auto parameters = parameters_of({{400, 400}, {400, 400}, {400, 400}, {400, 400}});
      ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
      set_gradients(parameters, 1);
      optimizer.step();
      optimizer.wait_for_parameters();
      std::size_t sent = 0;
      const auto held_back = testing::replace_calls(CallKind::kBroadcast, [&](const Call& call, const NextCall& next) {
        const bool is_last = ++sent == (options.partition ? 2U : 4U);
        if (world.rank() == 1 && is_last) begun.wait();
        return next(call);
      });
      optimizer.step();
      if (world.rank() == 0) {
        static_cast<void>(at::linear(at::ones({1, 400}), parameters[0]));
        has_begun.set_value();
      }
      const auto last = parameters[3].detach().clone();
      optimizer.wait_for_parameters();
      EXPECT_TRUE(at::equal(last, parameters[3]));
    });
  }
}

struct Doomed : AdamW {
  static constexpr bool kIsElementwise = true;
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure) override {
    if (in_step) in_step();
    return AdamW::step(closure);
  }
  std::function<void()> in_step;
};

// ZERO-75, ZERO-25
TEST(ZeroOverlappedSync, WhatFailsToComeIsToldToWhoeverReadsIt) {
  const auto error_of = [](const std::function<void()>& action) -> std::string {
    // expect_error() leaves errors of woken ranks to the harness.
    try {
      action();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "none";
  };
  for (const std::string backend : {"threads", "shm", "gloo"}) {
    for (std::size_t way = 0; way < 3; ++way) {
      std::latch others_have_stepped(2);
      testing::run_threads_in_gtest({.world_size = 3, .backend = backend}, [&](const World& world) {
        const auto spare = new_group(world.group(), global_ranks(world.group()), {.name = "spare"});
        const auto parameters = parameters_of(kShapes);
        ZeroRedundancyOptimizer<Doomed> optimizer(parameters, adamw(), overlapped(ways(spare)[way].second));
        set_gradients(parameters, 1);
        optimizer.step();
        optimizer.wait_for_parameters();
        if (world.rank() == 1) {
          optimizer.local_optimizer().in_step = [&] {
            others_have_stepped.wait();
            throw std::runtime_error("the gradient is odd");
          };
          EXPECT_EQ(error_of([&] { optimizer.step(); }), "the gradient is odd");
        } else {
          EXPECT_EQ(error_of([&] { optimizer.step(); }), "none");
          others_have_stepped.count_down();
          const auto told = ::testing::HasSubstr("rank 1 left by an exception: the gradient is odd");
          // Each time.
          for (int i = 0; i < 2; ++i) EXPECT_THAT(error_of([&] { static_cast<void>(parameters[4].sum()); }), told);
          EXPECT_THAT(error_of([&] { optimizer.step(); }), told);
        }
        barrier(world.group());
      });
    }
  }
}

// ZERO-75
TEST(ZeroOverlappedSync, GoesWithJoinAndSeveralOptimizers) {
  on_ranks(
      [](const World& world) {
        const auto trained = [&](bool is_overlapped) {
          std::vector<at::Tensor> parameters;
          for (auto [name, zero] : ways(world.group())) {
            zero.overlap_parameter_sync = is_overlapped;
            const auto one = ddp_models::mlp(kSizes);
            const auto other = ddp_models::mlp({kSizes[0], 9, kSizes.back()});
            DistributedDataParallel ddp(one, world.group());
            DistributedDataParallel other_ddp(other, world.group());
            ZeroRedundancyOptimizer<AdamW> optimizer(one->parameters(), adamw(), zero);
            ZeroRedundancyOptimizer<AdamW> other_optimizer(other->parameters(), adamw(), zero);
            ZeroRedundancyOptimizer<torch::optim::SGD> again(one->parameters(), {0.1}, zero);
            for (int step = 0; step < 3; ++step) {
              const auto input = ddp_models::random_batch(4, kSizes[0], 10 * step + world.rank());
              optimizer.zero_grad();
              other_optimizer.zero_grad();
              (ddp(input) * other_ddp(input)).mean().backward();
              optimizer.step();
              other_optimizer.step();
              again.step();
            }
            Join({&ddp, &optimizer}).run([&] {
              for (int step = 0; step < 1 + world.rank(); ++step) {
                optimizer.zero_grad();
                ddp(ddp_models::random_batch(4, kSizes[0], 10 * step)).pow(2).mean().backward();
                optimizer.step();
              }
            });
            for (const auto& model : {one, other}) {
              for (const auto& parameter : model->parameters()) parameters.push_back(parameter.detach().clone());
            }
          }
          return parameters;
        };
        expect_same(trained(true), trained(false));
      },
      {2, 3});
}

// ZERO-75
TEST(ZeroOverlappedSync, ParametersOutliveTheOptimizerThatSentThem) {
  testing::run_threads_in_gtest({.world_size = 2, .completes_late = true}, [](const World& world) {
    for_each_way(world, [&](const ZeroOptions& zero) {
      const auto parameters = parameters_of(kShapes);
      const auto expected = copies_of(parameters);
      set_gradients(parameters, 1);
      set_gradients(expected, 1);
      ZeroRedundancyOptimizer<AdamW>(parameters, adamw(), zero).step();
      AdamW(expected, adamw()).step();
      EXPECT_NE(parameters[1].const_data_ptr(), nullptr);
      expect_same(parameters, expected);
    });
  });
}

// ZERO-75
TEST(ZeroOverlappedSync, CostsNothingAlone) {
  testing::run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    for_each_way(world, [&](const ZeroOptions& zero) {
      const auto parameters = parameters_of(kShapes);
      ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
      set_gradients(parameters, 1);
      optimizer.step();
      for (const auto& parameter : parameters) EXPECT_FALSE(is_marked_intercepted(parameter));
      EXPECT_NE(parameters[0].const_data_ptr(), nullptr);
    });
  });
}

// ZERO-60, ZERO-75
TEST(ZeroOverlappedSync, IsNotForStepsInBackward) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto zero = overlapped({.process_group = world.group(), .overlap_with_ddp = true});
    expect_error([&] { ZeroRedundancyOptimizer<AdamW>(parameters_of({{3}}), adamw(), zero); },
                 {"Leave overlap_parameter_sync out"});
  });
}

}  // namespace
}  // namespace lockstep::overlapped_sync_test
