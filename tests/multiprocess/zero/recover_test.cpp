// Going on without a rank that was killed: parameters stay the same on all who are left, and so does what they hold of
// the optimizer's state.
#include <csignal>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/observer.h"
#include "tests/support/ddp_models.h"
#include "tests/support/deaths.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using namespace std::chrono_literals;
using deaths::DiesAt;
using deaths::expect_same_bits;
using torch::optim::AdamW;

constexpr int kSteps = 10;

/// Of this process, also by local optimizers that recoveries have replaced.
int local_steps = 0;

struct CountedAdamW : AdamW {
  using AdamW::AdamW;
  static constexpr bool kIsElementwise = true;
  at::Tensor step(LossClosure closure = nullptr) override {
    ++local_steps;
    return AdamW::step(closure);
  }
};

struct Outcome {
  GroupPtr group;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> lost = {};
  int failures = 0;
};

/// The loop of docs/zero.md.
Outcome train(const World& world, ZeroOptions options, const std::function<void(int step)>& before_step) {
  Outcome outcome{.group = world.group(), .parameters = {}};
  const auto model = ddp_models::mlp({5, 40, 30, 2});
  DistributedDataParallel ddp(model, outcome.group, {.bucket_cap_mb = 0.002, .recoverable = true});
  ZeroRedundancyOptimizer<CountedAdamW> optimizer(model->parameters(), {0.01}, options);
  local_steps = 0;
  for (int step = 0; step < kSteps; ++step) {
    before_step(step);
    bool must_recover = false;
    bool has_gradients = false;
    for (bool is_over = false; !is_over;) {
      try {
        if (must_recover) {
          outcome.group = surviving_group(outcome.group, {.patience = 20s});
          const auto recovered = ddp.recover(outcome.group);
          if (!has_gradients) has_gradients = recovered == Recovered::kStep;
          const auto lost = optimizer.recover(outcome.group);
          outcome.lost.insert(outcome.lost.end(), lost.begin(), lost.end());
          must_recover = false;
        }
        if (!has_gradients) {
          optimizer.zero_grad();
          ddp(ddp_models::random_batch(4, 5, 100 * step + world.rank())).pow(2).mean().backward();
          has_gradients = true;
        }
        optimizer.step();
        is_over = true;
      } catch (const c10::DistBackendError&) {
        must_recover = true;
        ++outcome.failures;
      }
    }
  }
  // What a rank has sent last may still fail to come.
  for (bool must_recover = false, is_over = false; !is_over;) {
    try {
      if (must_recover) {
        outcome.group = surviving_group(outcome.group, {.patience = 20s});
        ddp.recover(outcome.group);
        optimizer.recover(outcome.group);
      }
      optimizer.wait_for_parameters();
      is_over = true;
    } catch (const c10::DistBackendError&) {
      must_recover = true;
      ++outcome.failures;
    }
  }
  EXPECT_EQ(local_steps, kSteps) << "none is lost, none taken twice";
  outcome.parameters = model->parameters();
  return outcome;
}

/// One process with the batches of all four ranks in the first steps, then of those in `left`.
std::vector<at::Tensor> trained_by(const std::vector<int>& left, int steps_of_all) {
  auto model = ddp_models::mlp({5, 40, 30, 2});
  AdamW optimizer(model->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    const auto ranks = step < steps_of_all ? std::vector<int>{0, 1, 2, 3} : left;
    optimizer.zero_grad();
    for (const int rank : ranks) {
      const auto loss = model->forward(ddp_models::random_batch(4, 5, 100 * step + rank)).pow(2).mean();
      (loss / static_cast<double>(ranks.size())).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

// A recut of state by whoever is left.
TEST(ZeroRecover, GoesOnWhereverARankIsKilled) {
  // LOCKSTEP_RECOVER_TRIALS=100 for a long look.
  const int trials = std::stoi(env("LOCKSTEP_RECOVER_TRIALS").value_or("6"));
  for (int trial = 0; trial < trials && !::testing::Test::HasFailure(); ++trial) {
    deaths::run(
        4,
        [&](const World& world) {
          std::mt19937 random(static_cast<unsigned>(trial));
          const int victim = std::uniform_int_distribution<int>(0, 3)(random);
          DiesAt end(std::uniform_int_distribution<int>(0, 250)(random));
          std::optional<ObserverScope> watched;
          const auto all = ways(world.group());
          auto options = all[static_cast<std::size_t>(trial) % all.size()].second;
          options.overlap_parameter_sync = trial % 2 == 1;
          const auto outcome = train(world, options, [&](int step) {
            if (step == 0 && world.rank() == victim) watched.emplace(end);
          });
          if (world.rank() == victim) ::raise(SIGKILL);
          if (outcome.failures > 0) expect_same_bits(outcome.parameters, outcome.group);
        },
        40s, str("trial ", trial));
  }
}

/// Rank 1 of 4 dies in the fourth step, when a collective with this label comes.
void expect_trained(const ZeroOptions& options, const std::string& label, int steps_of_all, bool loses_state) {
  deaths::run(4, [&](const World& world) {
    DiesAt end(label, "launch");
    std::optional<ObserverScope> watched;
    auto own = options;
    own.process_group = world.group();
    const auto outcome = train(world, own, [&](int step) {
      if (step == 3 && world.rank() == 1) watched.emplace(end);
    });
    expect_same_bits(outcome.parameters, outcome.group);
    EXPECT_EQ(outcome.lost.empty(), !loses_state);
    if (!loses_state) {
      const auto reference = trained_by({0, 2, 3}, steps_of_all);
      for (std::size_t i = 0; i < reference.size(); ++i) {
        EXPECT_TRUE(at::allclose(outcome.parameters[i], reference[i], 1e-3, 1e-4));
      }
    }
  });
}

TEST(ZeroRecover, LosesNothingIfStateIsReplicated) {
  expect_trained({.stage = ZeroStage::kReplicated}, "DDP's vote", 4, /*loses_state=*/false);
}

TEST(ZeroRecover, NamesWhoseStateIsLost) {
  expect_trained({.partition = ZeroPartition::kElements}, "DDP's vote", 4, /*loses_state=*/true);
}

TEST(ZeroRecover, FinishesAStepThatSomeHaveTaken) {
  expect_trained({}, "ZeRO's step", 4, /*loses_state=*/true);
}

// ZERO-75: the others have ended that step when they notice, in the next forward
TEST(ZeroRecover, GivesParametersThatDidNotComeToAll) {
  expect_trained({.overlap_parameter_sync = true}, "ZeRO's step", 4, /*loses_state=*/true);
  expect_trained({.overlap_parameter_sync = true, .partition = ZeroPartition::kElements}, "ZeRO's step", 4,
                 /*loses_state=*/true);
}

// State of ranks that live is what it was: with one parameter each, only the dead rank's begins anew.
TEST(ZeroRecover, KeepsTheStateOfThoseWhoLive) {
  deaths::run(3, [&](const World& world) {
    std::vector<at::Tensor> parameters;
    for (int i = 0; i < 3; ++i) parameters.push_back(at::ones({4 + i}).requires_grad_());
    ZeroRedundancyOptimizer<AdamW> optimizer(parameters, {0.1}, {.process_group = world.group()});
    AdamW plain({parameters[0].detach().clone().requires_grad_(), parameters[1].detach().clone().requires_grad_(),
                 parameters[2].detach().clone().requires_grad_()},
                0.1);
    const auto set_gradients = [&](int step) {
      for (std::size_t i = 0; i < 3; ++i) {
        parameters[i].mutable_grad() = at::full_like(parameters[i], 1.0 + static_cast<double>(i) - 0.3 * step);
        plain.param_groups()[0].params()[i].mutable_grad() = parameters[i].grad().clone();
      }
    };
    for (int step = 0; step < 3; ++step) {
      set_gradients(step);
      optimizer.step();
      plain.step();
    }
    const auto& of_one = optimizer.partition().partition()[1][0].params();
    ASSERT_EQ(of_one.size(), 1U);
    const auto dead = static_cast<std::size_t>(of_one[0].size(0) - 4);
    if (world.rank() == 1) ::raise(SIGKILL);
    EXPECT_THROW(barrier(world.group()), c10::DistBackendError);
    const auto group = surviving_group(world.group());
    const auto lost = optimizer.recover(group);
    EXPECT_EQ(lost, std::vector<std::string>{"parameter " + std::to_string(dead)});
    set_gradients(3);
    optimizer.step();
    plain.step();
    for (std::size_t i = 0; i < 3; ++i) {
      const bool is_same = at::equal(parameters[i], plain.param_groups()[0].params()[i]);
      EXPECT_EQ(is_same, i != dead) << "parameter " << i;
    }
    optimizer.consolidate_state_dict();
    if (group->getRank() == 0) {
      EXPECT_EQ(optimizer.state_dict().state.size(), 3U);
    }
  });
}

}  // namespace
}  // namespace lockstep
