// State by Python's names, of libtorch's optimizers and ours.
#include "lockstep/optim/named_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/optim/functional.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;

void step(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, double gradient) {
  parameter.mutable_grad() = at::full_like(parameter, gradient);
  optimizer.step();
}

/// Libtorch's, ours and the functional form go on from each other's state.
TEST(NamedState, MovesBetweenAllForms) {
  const auto theirs_parameter = at::ones({3}).requires_grad_();
  const auto ours_parameter = at::ones({3}).requires_grad_();
  const auto functional_parameter = at::ones({3});
  torch::optim::AdamW theirs({theirs_parameter}, torch::optim::AdamWOptions(0.1));
  optim::AdamW ours({ours_parameter}, {.lr = 0.1});
  optim::FunctionalAdamW functional({functional_parameter}, {.lr = 0.1});
  for (const double gradient : {0.5, -2.0, 1.0}) step(theirs, theirs_parameter, gradient);
  {
    const at::NoGradGuard no_grad;
    ours_parameter.copy_(theirs_parameter);
    functional_parameter.copy_(theirs_parameter);
  }
  optim::load_named_state(ours, ours_parameter, optim::named_state(theirs, theirs_parameter));
  functional.load_state(0, optim::named_state(ours, ours_parameter));
  step(theirs, theirs_parameter, 0.7);
  step(ours, ours_parameter, 0.7);
  functional.step({at::full({3}, 0.7)});
  EXPECT_TRUE(at::allclose(theirs_parameter, ours_parameter));
  EXPECT_TRUE(at::equal(functional_parameter, ours_parameter));
  EXPECT_EQ(optim::named_state(theirs, theirs_parameter).at("step").toInt(), 4);
  optim::load_named_state(theirs, theirs_parameter, functional.state(0));
  EXPECT_EQ(optim::named_state(theirs, theirs_parameter).size(), 3U);
}

TEST(NamedState, IsEmptyWithoutState) {
  const auto parameter = at::ones({3}).requires_grad_();
  optim::Rprop optimizer({parameter});
  EXPECT_TRUE(optim::named_state(optimizer, parameter).empty());
  step(optimizer, parameter, 1);
  EXPECT_EQ(optim::named_state(optimizer, parameter).size(), 3U);
  optim::load_named_state(optimizer, parameter, {});
  EXPECT_TRUE(optim::named_state(optimizer, parameter).empty());
}

TEST(NamedState, RefusesWhatDoesNotFit) {
  const auto parameter = at::ones({3}).requires_grad_();
  torch::optim::SGD sgd({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_error([&] { optim::load_named_state(sgd, parameter, {{"exp_avg", at::ones({3})}}); },
               {"SGD", "exp_avg", "momentum_buffer"});
  expect_error([&] { optim::load_named_state(sgd, parameter, {{"momentum_buffer", at::ones({2})}}); }, {"[2]", "[3]"});
  EXPECT_TRUE(sgd.state().empty());
  torch::optim::LBFGS lbfgs({parameter});
  expect_error([&] { optim::named_state(lbfgs, parameter); }, {"torch::optim::LBFGS"});
}

}  // namespace
}  // namespace lockstep
