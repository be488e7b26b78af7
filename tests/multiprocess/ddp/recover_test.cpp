// Going on without a rank that was killed: DdpOptions::recoverable, surviving_group() and recover(). Finding: after a
// failed step nothing but a restart helped.
#include <gmock/gmock.h>
#include <torch/optim/adam.h>

#include <csignal>
#include <random>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "lockstep/testing/seeds.h"
#include "tests/support/ddp_models.h"
#include "tests/support/deaths.h"
#include "tests/support/error_text.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using ddp_models::Mlp;
using deaths::DiesAt;
using deaths::expect_same_bits;
using ::testing::HasSubstr;

constexpr int kSteps = 12;

Mlp make_model() {
  torch::manual_seed(3);
  Mlp model(std::vector<int64_t>{6, 16, 16, 3});
  model->to(at::kDouble);  // so that another order of summing is no difference
  return model;
}

at::Tensor input_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 * rank + step));
  return at::randn({4, 6}, generator, at::kDouble);
}

/// What one process computes if these ranks take part in each step.
std::vector<at::Tensor> trained_by(const std::vector<std::vector<int>>& ranks_of_step) {
  auto model = make_model();
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  for (std::size_t step = 0; step < ranks_of_step.size(); ++step) {
    optimizer.zero_grad();
    for (const int rank : ranks_of_step[step]) {
      const auto loss = model->forward(input_of(rank, static_cast<int>(step))).pow(2).mean();
      (loss / static_cast<double>(ranks_of_step[step].size())).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

double distance(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  double most = 0;
  for (std::size_t i = 0; i < some.size(); ++i) {
    most = std::max(most, (some[i] - others[i]).abs().max().item<double>());
  }
  return most;
}

struct Outcome {
  GroupPtr group;
  std::vector<at::Tensor> parameters;
  int failures = 0;
};

/// The loop of docs/ddp.md.
Outcome train(const World& world, const DdpOptions& options, const std::function<void(int step)>& before_step = {}) {
  Outcome outcome{.group = world.group(), .parameters = {}};
  auto model = make_model();
  auto all = options;
  all.recoverable = true;
  DistributedDataParallel<Mlp> ddp(model, outcome.group, all);
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  const SurvivorOptions patient{.patience = 20s};
  for (int step = 0; step < kSteps; ++step) {
    if (before_step) before_step(step);
    bool has_gradients = false;
    bool must_recover = false;
    while (!has_gradients) {
      try {
        if (must_recover) {
          outcome.group = surviving_group(outcome.group, patient);
          has_gradients = ddp.recover(outcome.group) == Recovered::kStep;
          must_recover = false;
          continue;
        }
        optimizer.zero_grad();
        ddp(input_of(world.rank(), step)).pow(2).mean().backward();
        has_gradients = true;
      } catch (const c10::DistBackendError&) {
        must_recover = true;
        ++outcome.failures;
      }
    }
    optimizer.step();
  }
  outcome.parameters = model->parameters();
  return outcome;
}

/// Equal to one process in which the dead rank took part up to some step.
void expect_trained_until_death(const Outcome& outcome, int world_size) {
  const auto left = global_ranks(outcome.group);
  std::vector<int> all(static_cast<std::size_t>(world_size));
  std::iota(all.begin(), all.end(), 0);
  double best = 1;
  for (int last = -1; last < kSteps; ++last) {
    std::vector<std::vector<int>> ranks_of_step(kSteps, left);
    std::fill(ranks_of_step.begin(), ranks_of_step.begin() + last + 1, all);
    best = std::min(best, distance(outcome.parameters, trained_by(ranks_of_step)));
  }
  EXPECT_LT(best, 1e-9) << "no step at which rank " << lost_ranks(current_world()->group(), outcome.group).at(0)
                        << " could have died gives these parameters";
}

void run_and_kill(unsigned seed, const DdpOptions& options) {
  deaths::run(
      4,
      [&](const World& world) {
        std::mt19937 random(seed);
        const int victim = std::uniform_int_distribution<int>(0, 3)(random);
        // A step has some twenty events on a rank, or more with many buckets.
        DiesAt end(std::uniform_int_distribution<int>(0, 220)(random));
        std::optional<ObserverScope> watched;
        const auto outcome = train(world, options, [&](int step) {
          if (step == 0 && world.rank() == victim) watched.emplace(end);
        });
        if (world.rank() == victim) ::raise(SIGKILL);  // it outlived its events
        EXPECT_EQ(global_ranks(outcome.group).size(), outcome.failures == 0 ? 4U : 3U);
        for (const auto& parameter : outcome.parameters) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
        if (outcome.failures > 0) {
          expect_same_bits(outcome.parameters, outcome.group);
          expect_trained_until_death(outcome, 4);
        }
      },
      40s, str("seed ", seed));
}

TEST(DdpRecover, GoesOnWhereverARankIsKilled) {
  // LOCKSTEP_RECOVER_TRIALS=100 for a long look.
  const int trials = std::stoi(env("LOCKSTEP_RECOVER_TRIALS").value_or("4"));
  for (int trial = 0; trial < trials && !::testing::Test::HasFailure(); ++trial) {
    DdpOptions options;
    options.bucket_cap_mb = trial % 2 == 0 ? 0.0005 : 25;
    options.find_unused_parameters = trial % 4 == 3;
    run_and_kill(static_cast<unsigned>(trial), options);
  }
}

/// Rank 1 of 3 dies when `label` comes to `state` in step 3.
void die_at(const std::string& label, const std::string& state, const std::function<void(const Outcome&)>& check) {
  deaths::run(3, [&](const World& world) {
    DiesAt end(-1);
    std::optional<ObserverScope> watched;
    if (world.rank() == 1) watched.emplace(end);
    const auto outcome = train(world, {.bucket_cap_mb = 0.0005}, [&](int step) {
      if (step == 3) end.at(label, state);
    });
    EXPECT_EQ(lost_ranks(world.group(), outcome.group), std::vector<int>{1});
    expect_same_bits(outcome.parameters, outcome.group);
    check(outcome);
  });
}

void expect_three_steps_of_all(const Outcome& outcome, int steps_of_all) {
  std::vector<std::vector<int>> ranks_of_step(kSteps, {0, 2});
  std::fill(ranks_of_step.begin(), ranks_of_step.begin() + steps_of_all, std::vector<int>{0, 1, 2});
  EXPECT_LT(distance(outcome.parameters, trained_by(ranks_of_step)), 1e-9);
}

TEST(DdpRecover, ReducesAgainWhatWasUnderWay) {
  // Its last bucket never comes: the survivors' own gradients are averaged over the two of them.
  die_at("layer0", "ready", [](const Outcome& outcome) { expect_three_steps_of_all(outcome, 3); });
}

TEST(DdpRecover, KeepsSumsThatHaveArrived) {
  // It dies when it has given everything: its gradients of that step count.
  die_at("DDP's vote", "launch", [](const Outcome& outcome) { expect_three_steps_of_all(outcome, 4); });
}

TEST(DdpRecover, KeepsGradientsOfAStepThatHadEnded) {
  deaths::run(3, [&](const World& world) {
    auto model = make_model();
    DistributedDataParallel<Mlp> ddp(model, world.group(), {.recoverable = true});
    ddp(input_of(world.rank(), 0)).pow(2).mean().backward();
    if (world.rank() == 1) ::raise(SIGKILL);
    std::vector<at::Tensor> before;
    for (const auto& parameter : model->parameters()) before.push_back(parameter.grad().clone());
    // Between backward and step: a loss for the log, clipping, an optimizer's own messages.
    EXPECT_THROW(barrier(world.group()), c10::DistBackendError);
    EXPECT_EQ(ddp.recover(surviving_group(world.group())), Recovered::kStep);
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(before[i], model->parameters()[i].grad()));
    }
  });
}

TEST(DdpRecover, CountsWhatARankWithoutInputsStillHadToGive) {
  for (const bool by_all : {true, false}) {
    deaths::run(3, [&](const World& world) {
      auto model = make_model();
      DistributedDataParallel<Mlp> ddp(model, world.group(), {.recoverable = true});
      // Rank 0 runs out with a backward that nobody has reduced; rank 2 dies in the reduction.
      const int inputs = world.rank() == 0 ? 1 : 2;
      const auto weight = 1.0 + world.rank();
      DiesAt end(-1);
      end.at("DDP(Mlp) bucket", "launch");
      std::optional<ObserverScope> watched;
      if (world.rank() == 2) watched.emplace(end);
      try {
        ddp.join({.options = {.divide_by_initial_world_size = by_all, .weighted = true}}).run([&] {
          for (int i = 0; i < inputs; ++i) {
            const auto guard = ddp.no_sync(i == 0);
            ddp.backward(ddp(input_of(world.rank(), i)).pow(2).mean(), weight);
          }
        });
        ADD_FAILURE() << "rank 2 did not die";
      } catch (const c10::DistBackendError&) {
        EXPECT_EQ(ddp.recover(surviving_group(world.group())), Recovered::kStep);
      }
      auto reference = make_model();
      (reference->forward(input_of(0, 0)).pow(2).mean() / 5.0).backward();
      for (const int i : {0, 1}) (reference->forward(input_of(1, i)).pow(2).mean() * (2.0 / 5)).backward();
      for (std::size_t i = 0; i < reference->parameters().size(); ++i) {
        EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-9, 1e-12));
      }
    });
  }
}

TEST(DdpRecover, GoesOnAfterEachOfSeveralDeaths) {
  deaths::run(4, [&](const World& world) {
    const auto outcome = train(world, {}, [&](int step) {
      if (step == 2 && world.rank() == 0) ::raise(SIGKILL);
      if (step == 5 && world.rank() == 3) ::raise(SIGKILL);
    });
    EXPECT_EQ(global_ranks(outcome.group), (std::vector<int>{1, 2}));
    EXPECT_THAT(group_name(outcome.group), HasSubstr("after 2 failures"));
    expect_same_bits(outcome.parameters, outcome.group);
    std::vector<std::vector<int>> ranks_of_step(kSteps, {1, 2});
    std::fill(ranks_of_step.begin(), ranks_of_step.begin() + 5, std::vector<int>{1, 2, 3});
    std::fill(ranks_of_step.begin(), ranks_of_step.begin() + 2, std::vector<int>{0, 1, 2, 3});
    EXPECT_LT(distance(outcome.parameters, trained_by(ranks_of_step)), 1e-9);
  });
}

TEST(DdpRecover, DividesByTheWeightsOfThoseWhoAreLeft) {
  deaths::run(3, [&](const World& world) {
    auto model = make_model();
    DistributedDataParallel<Mlp> ddp(model, world.group(), {.bucket_cap_mb = 0.0005, .recoverable = true});
    DiesAt end(-1);
    end.at("layer0", "ready");
    std::optional<ObserverScope> watched;
    if (world.rank() == 1) watched.emplace(end);
    const auto weight = 1.0 + world.rank();
    try {
      ddp.backward(ddp(input_of(world.rank(), 0)).pow(2).mean(), weight);
      ADD_FAILURE() << "rank 1 did not die";
    } catch (const c10::DistBackendError&) {
      EXPECT_EQ(ddp.recover(surviving_group(world.group())), Recovered::kStep);
    }
    auto reference = make_model();
    for (const int rank : {0, 2}) {
      (reference->forward(input_of(rank, 0)).pow(2).mean() * ((1.0 + rank) / 4)).backward();
    }
    for (std::size_t i = 0; i < reference->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(model->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-5, 1e-6));
    }
  });
}

TEST(DdpRecover, AnotherJoinScopeTakesTheInputsThatAreLeft) {
  deaths::run(3, [&](const World& world) {
    auto group = world.group();
    auto model = make_model();
    DistributedDataParallel<Mlp> ddp(model, group, {.recoverable = true});
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    // Rank 0 runs out of inputs first; rank 2 is killed when it has.
    const int inputs = world.rank() == 0 ? 2 : 6;
    int step = 0;
    bool must_step = false;
    for (bool is_over = false; !is_over;) {
      try {
        ddp.join().run([&] {
          for (; step < inputs; ++step) {
            if (step == 4 && world.rank() == 2) ::raise(SIGKILL);
            if (!std::exchange(must_step, false)) {
              optimizer.zero_grad();
              ddp(input_of(world.rank(), step)).pow(2).mean().backward();
            }
            optimizer.step();
          }
        });
        is_over = true;
      } catch (const c10::DistBackendError&) {
        group = surviving_group(group);
        must_step = ddp.recover(group) == Recovered::kStep && step < inputs;
      }
    }
    EXPECT_EQ(step, inputs);
    EXPECT_EQ(global_ranks(group), (std::vector<int>{0, 1}));
    expect_same_bits(model->parameters(), group);
  });
}

TEST(Survivors, LeaveARankBehindThatDoesNotAnswer) {
  deaths::run(
      3,
      [&](const World& world) {
        if (world.rank() == 2) {
          std::this_thread::sleep_for(4s);  // alive, but late
          testing::expect_error([&] { surviving_group(world.group(), {.patience = 500ms}); },
                                {"went on without this one", "SurvivorOptions::patience"});
          return;
        }
        EXPECT_THROW(all_reduce(at::ones({3}), world.group()), c10::DistBackendError);
        const auto group = surviving_group(world.group(), {.patience = 500ms});
        EXPECT_EQ(global_ranks(group), (std::vector<int>{0, 1}));
        const auto sum = at::ones({3});
        all_reduce(sum, group);
        EXPECT_TRUE(at::equal(sum, at::full({3}, 2.0F)));
        std::this_thread::sleep_for(4s);  // the store stays until the late one has asked
      },
      1s);
}

TEST(Survivors, ThatAreTooFewSayso) {
  deaths::run(3, [&](const World& world) {
    barrier(world.group());
    if (world.rank() == 1) ::raise(SIGKILL);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THROW(all_reduce(at::ones({3}), world.group()), c10::DistBackendError);
    testing::expect_error([&] { surviving_group(world.group(), {.at_least = 3}); },
                          {"only 2 of 3 ranks", "at least 3 are needed"});
    // A process that is known to have ended is not waited for.
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  });
}

/// Rank threads share libtorch's generator.
Mlp built_alike() {
  Mlp model{nullptr};
  testing::build_deterministically([&] { model = make_model(); });
  return model;
}

LOCKSTEP_THREAD_TEST(DdpRecover, IsAskedForWhenTheModuleIsWrapped, 2) {
  DistributedDataParallel<Mlp> plain(built_alike(), world.group(), {});
  testing::expect_error([&] { plain.recover(world.group()); }, {"DdpOptions::recoverable"});
  const auto refused = [&](DdpOptions options, const std::string& why) {
    options.recoverable = true;
    testing::expect_error([&] { DistributedDataParallel<Mlp>(built_alike(), world.group(), options); },
                          {"recoverable does not go with", why});
  };
  refused({.gradient_as_bucket_view = true}, "gradient_as_bucket_view");
  refused({.per_parameter = true}, "per_parameter");
  refused({.skip_all_reduce_unused_params = true}, "skip_all_reduce_unused_params");
  DistributedDataParallel<Mlp> ddp(built_alike(), world.group(), {.recoverable = true});
  testing::expect_error([&] { ddp.register_comm_hook(allreduce_hook()); }, {"recoverable"});
  // It trains as any other.
  ddp(input_of(world.rank(), 0)).sum().backward();
  plain(input_of(world.rank(), 0)).sum().backward();
  for (std::size_t i = 0; i < plain.parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(plain.parameters()[i].grad(), ddp.parameters()[i].grad()));
  }
}

}  // namespace
}  // namespace lockstep
