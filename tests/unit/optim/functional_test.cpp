// Functional optimizers and their registry.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <thread>

#include "lockstep/optim/functional_registry.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/testing/checks.h"

namespace lockstep::functional_test {
namespace {

void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts) {
  testing::expect_error(action, parts);
}

std::vector<at::Tensor> made_parameters() {
  return {at::full({3}, 1.0), at::full({2, 2}, 2.0), at::full({}, 3.0)};
}

std::vector<at::Tensor> gradients_for(const std::vector<at::Tensor>& parameters, double value) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(at::full_like(parameter, value));
  return gradients;
}

std::unique_ptr<torch::optim::OptimizerOptions> adamw_options(const optim::AdamWOptions& options) {
  return optim::group_options(options);
}

template <class Rule>
void expect_general_behaviour() {
  SCOPED_TRACE(Rule::kName);
  using Optimizer = optim::Functional<Rule>;
  const auto parameters = made_parameters();
  const auto before = parameters[1].clone();
  Optimizer optimizer(parameters);
  auto gradients = gradients_for(parameters, 0.5);
  gradients[1] = at::Tensor();
  for (int step = 0; step < 3; ++step) optimizer.step(gradients);
  EXPECT_TRUE(at::equal(parameters[1], before));
  EXPECT_TRUE(optimizer.state(1).empty());
  EXPECT_FALSE(at::equal(parameters[0], at::full({3}, 1.0)));

  gradients.pop_back();
  expect_error([&] { optimizer.step(gradients); }, {Rule::kName, "2 gradients", "3 parameters"});

  Optimizer empty({});
  empty.step({});
  EXPECT_TRUE(empty.parameters().empty());
  expect_error([&] { empty.step({at::ones({1})}); }, {"1 gradients", "0 parameters"});
  expect_error([&] { Optimizer(parameters, {.lr = -1}); }, {Rule::kName, "Invalid learning rate: -1"});
}

// ZERO-59
TEST(Functional, SkipsUndefinedGradientsAndCountsThem) {
  expect_general_behaviour<optim::AdadeltaRule>();
  expect_general_behaviour<optim::AdagradRule>();
  expect_general_behaviour<optim::AdamRule>();
  expect_general_behaviour<optim::AdamaxRule>();
  expect_general_behaviour<optim::AdamWRule>();
  expect_general_behaviour<optim::RMSpropRule>();
  expect_general_behaviour<optim::RpropRule>();
  expect_general_behaviour<optim::SGDRule>();
}

// ZERO-59: ZeroRedundancyOptimizer takes torch::optim::Optimizers only, so without overlap these are refused
template <class Rule>
constexpr bool kIsOrdinary = std::is_base_of_v<torch::optim::Optimizer, optim::Functional<Rule>>;
static_assert(!kIsOrdinary<optim::AdadeltaRule> && !kIsOrdinary<optim::AdagradRule> && !kIsOrdinary<optim::AdamRule> &&
              !kIsOrdinary<optim::AdamaxRule> && !kIsOrdinary<optim::AdamWRule> && !kIsOrdinary<optim::RMSpropRule> &&
              !kIsOrdinary<optim::RpropRule> && !kIsOrdinary<optim::SGDRule>);

// ZERO-59
TEST(Functional, NamesBadOptions) {
  const auto parameters = made_parameters();
  expect_error([&] { optim::FunctionalAdam(parameters, {.betas = {0.9, 1.0}}); },
               {"Adam", "Invalid beta parameter at index 1: 1"});
  expect_error([&] { optim::FunctionalAdamW(parameters, {.eps = -1}); }, {"AdamW", "Invalid epsilon value: -1"});
  expect_error([&] { optim::FunctionalAdamW(parameters, {.weight_decay = -1}); }, {"Invalid weight_decay value: -1"});
  expect_error([&] { optim::FunctionalAdamax(parameters, {.eps = -1}); }, {"Adamax", "Invalid epsilon value: -1"});
  expect_error([&] { optim::FunctionalAdagrad(parameters, {.lr_decay = -1}); }, {"Adagrad", "lr_decay value: -1"});
  expect_error([&] { optim::FunctionalAdadelta(parameters, {.rho = 2}); }, {"Adadelta", "rho value: 2"});
  expect_error([&] { optim::FunctionalRMSprop(parameters, {.alpha = -1}); }, {"RMSprop", "alpha value: -1"});
  expect_error([&] { optim::FunctionalRprop(parameters, {.etas = {2, 3}}); }, {"Rprop", "Invalid eta values: 2, 3"});
  expect_error([&] { optim::FunctionalSGD(parameters, {.nesterov = true}); }, {"SGD", "Nesterov"});
}

// ZERO-59
TEST(Functional, KeepsTheOptionsOfOrdinaryOptimizers) {
  const auto parameters = made_parameters();
  const auto adam =
      optim::functional_form_of<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.5).amsgrad(true));
  EXPECT_EQ(optim::options_from<optim::AdamOptions>(adam->options()), (optim::AdamOptions{.lr = 0.5, .amsgrad = true}));
  const auto adamw = optim::functional_form_of<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(0.5).betas({0.5, 0.75}).eps(0.25).weight_decay(2).amsgrad(true));
  EXPECT_EQ(optim::options_from<optim::AdamWOptions>(adamw->options()),
            (optim::AdamWOptions{.lr = 0.5, .betas = {0.5, 0.75}, .eps = 0.25, .weight_decay = 2, .amsgrad = true}));
  const auto sgd = optim::functional_form_of<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.5).momentum(0.9).nesterov(true));
  EXPECT_EQ(optim::options_from<optim::SGDOptions>(sgd->options()),
            (optim::SGDOptions{.lr = 0.5, .momentum = 0.9, .nesterov = true}));
  const auto ours =
      optim::functional_form_of<optim::Rprop>(parameters, *optim::group_options(optim::RpropOptions{.maximize = true}));
  EXPECT_TRUE(optim::options_from<optim::RpropOptions>(ours->options()).maximize);
}

// ZERO-59
TEST(Functional, RefusesBadGradientsBeforeAnyChange) {
  const auto parameters = made_parameters();
  optim::FunctionalAdamW optimizer(parameters);
  auto gradients = gradients_for(parameters, 1);
  gradients[2] = at::ones({2});
  expect_error([&] { optimizer.step(gradients); }, {"gradient 2 of 3", "[2]"});
  EXPECT_TRUE(at::equal(parameters[0], at::full({3}, 1.0)));
  EXPECT_TRUE(optimizer.state(0).empty());
  expect_error([&] { optim::FunctionalAdamW({at::Tensor()}); }, {"parameter 0 of 1 is undefined"});
}

// ZERO-63
TEST(Functional, TakesOptionsAsSchedulersChangeThem) {
  const auto parameters = made_parameters();
  optim::FunctionalSGD optimizer(parameters, {.lr = 0.5, .maximize = true});
  // An ordinary optimizer's groups, of libtorch and ours.
  torch::optim::SGD exposed(parameters, torch::optim::SGDOptions(0.25).momentum(0.9));
  optimizer.set_options(exposed.param_groups()[0].options());
  EXPECT_EQ(static_cast<optim::SGDOptions&>(optimizer.options()),
            (optim::SGDOptions{.lr = 0.25, .momentum = 0.9, .maximize = true}));
  optim::SGD ours(parameters, {.lr = 0.125});
  optimizer.set_options(ours.param_groups()[0].options());
  EXPECT_EQ(static_cast<optim::SGDOptions&>(optimizer.options()), optim::SGDOptions{.lr = 0.125});
  optimizer.step(gradients_for(parameters, 1));
  EXPECT_TRUE(at::equal(parameters[0], at::full({3}, 0.875)));
  optimizer.options().set_lr(1);
  optimizer.step(gradients_for(parameters, 1));
  EXPECT_TRUE(at::equal(parameters[0], at::full({3}, -0.125)));
  expect_error([&] { optimizer.set_options(torch::optim::AdamOptions()); }, {"torch::optim::AdamOptions"});
}

TEST(Functional, HasStateByPythonsNames) {
  const auto parameters = made_parameters();
  optim::FunctionalAdamW optimizer(parameters, {.amsgrad = true});
  optimizer.step(gradients_for(parameters, 1));
  const auto state = optimizer.state(0);
  ASSERT_EQ(state.size(), 4U);
  EXPECT_EQ(state.at("step").toInt(), 1);
  EXPECT_EQ(state.at("exp_avg").toTensor().sizes(), parameters[0].sizes());
  EXPECT_EQ(state.count("exp_avg_sq") + state.count("max_exp_avg_sq"), 2U);

  optim::FunctionalSGD without(parameters);
  without.step(gradients_for(parameters, 1));
  EXPECT_TRUE(without.state(0).empty());
  optim::FunctionalSGD with(parameters, {.momentum = 0.9});
  with.step(gradients_for(parameters, 1));
  EXPECT_EQ(with.state(0).size(), 1U);
  EXPECT_EQ(with.state(0).count("momentum_buffer"), 1U);
  expect_error([&] { with.state(3); }, {"no parameter 3 of 3"});
}

TEST(Functional, GoesOnFromLoadedState) {
  const auto first = made_parameters();
  const auto second = made_parameters();
  optim::FunctionalAdamW from(first, {.lr = 0.1});
  optim::FunctionalAdamW into(second, {.lr = 0.1});
  for (int step = 0; step < 3; ++step) from.step(gradients_for(first, 0.5 - step));
  into.step(gradients_for(second, 7));
  for (std::size_t i = 0; i < first.size(); ++i) {
    second[i].copy_(first[i]);
    into.load_state(i, from.state(i));
    EXPECT_FALSE(into.state(i).at("exp_avg").toTensor().is_alias_of(from.state(i).at("exp_avg").toTensor()));
  }
  from.step(gradients_for(first, 2));
  into.step(gradients_for(second, 2));
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i]));
  into.load_state(0, {});
  EXPECT_TRUE(into.state(0).empty());
}

TEST(Functional, RefusesStateThatDoesNotFit) {
  const auto parameters = made_parameters();
  optim::FunctionalAdamW optimizer(parameters);
  optimizer.step(gradients_for(parameters, 1));
  auto state = optimizer.state(0);
  expect_error([&] { optimizer.load_state(3, state); }, {"no parameter 3 of 3"});
  expect_error([&] { optimizer.load_state(1, state); }, {"state of parameter 1", "[3]", "[2, 2]"});
  state["momentum_buffer"] = at::ones({3});
  expect_error([&] { optimizer.load_state(0, state); }, {"momentum_buffer", "exp_avg"});
  state.erase("momentum_buffer");
  state.erase("step");
  expect_error([&] { optimizer.load_state(0, state); }, {"no 'step'"});
  EXPECT_EQ(optimizer.state(0).at("step").toInt(), 1);
}

TEST(Functional, StepsDifferentParametersAtTheSameTime) {
  constexpr std::size_t kThreads = 4;
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < kThreads; ++i) parameters.push_back(at::ones({1000}));
  optim::FunctionalAdamW optimizer(parameters, {.lr = 0.1});
  std::vector<std::thread> threads;
  for (std::size_t mine = 0; mine < kThreads; ++mine) {
    threads.emplace_back([&, mine] {
      for (int step = 0; step < 100; ++step) {
        std::vector<at::Tensor> gradients(kThreads);
        gradients[mine] = at::full({1000}, 0.5);
        optimizer.step(gradients);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t i = 0; i < kThreads; ++i) {
    EXPECT_EQ(optimizer.state(i).at("step").toInt(), 100);
    EXPECT_TRUE(at::equal(parameters[i], parameters[0]));
  }
}

template <class Ordinary>
void expect_form(const torch::optim::OptimizerOptions& options, const std::string& name) {
  const auto optimizer = optim::functional_form_of<Ordinary>(made_parameters(), options);
  EXPECT_EQ(optimizer->name(), name);
  EXPECT_EQ(optimizer->parameters().size(), 3U);
  EXPECT_EQ(optimizer->options().get_lr(), options.get_lr());
}

// ZERO-58
TEST(FunctionalRegistry, KnowsTheFormsOfOrdinaryOptimizers) {
  expect_form<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.5), "Adagrad");
  expect_form<torch::optim::Adam>(torch::optim::AdamOptions(0.5), "Adam");
  expect_form<torch::optim::AdamW>(torch::optim::AdamWOptions(0.5), "AdamW");
  expect_form<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.5), "RMSprop");
  expect_form<torch::optim::SGD>(torch::optim::SGDOptions(0.5), "SGD");
  expect_form<optim::Adadelta>(*optim::group_options(optim::AdadeltaOptions{.lr = 0.5}), "Adadelta");
  expect_form<optim::Adagrad>(*optim::group_options(optim::AdagradOptions{.lr = 0.5}), "Adagrad");
  expect_form<optim::Adam>(*optim::group_options(optim::AdamOptions{.lr = 0.5}), "Adam");
  expect_form<optim::Adamax>(*optim::group_options(optim::AdamaxOptions{.lr = 0.5}), "Adamax");
  expect_form<optim::AdamW>(*optim::group_options(optim::AdamWOptions{.lr = 0.5}), "AdamW");
  expect_form<optim::RMSprop>(*optim::group_options(optim::RMSpropOptions{.lr = 0.5}), "RMSprop");
  expect_form<optim::Rprop>(*optim::group_options(optim::RpropOptions{.lr = 0.5}), "Rprop");
  expect_form<optim::SGD>(*optim::group_options(optim::SGDOptions{.lr = 0.5}), "SGD");
}

// ZERO-58
TEST(FunctionalRegistry, SaysInTheLogWhatItMade) {
  const auto level = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = 0;
  ::testing::internal::CaptureStderr();
  optim::functional_form_of<torch::optim::SGD>({}, torch::optim::SGDOptions(0.5));
  const auto text = ::testing::internal::GetCapturedStderr();
  FLAGS_caffe2_log_level = level;
  EXPECT_THAT(text, ::testing::HasSubstr("torch::optim::SGD steps in its functional form"));
}

struct Stranger : torch::optim::SGD {
  using SGD::SGD;
};

// ZERO-58
TEST(FunctionalRegistry, RefusesTypesWithoutAFormByName) {
  expect_error([] { optim::functional_form_of<torch::optim::LBFGS>({}, torch::optim::LBFGSOptions(1)); },
               {"torch::optim::LBFGS has no functional form", "register_functional"});
  // A class of its own may step otherwise than its base.
  expect_error([] { optim::functional_form_of<Stranger>({}, torch::optim::SGDOptions(1)); }, {"Stranger"});
  EXPECT_FALSE(optim::has_functional_form("nobody's"));
}

struct Other : torch::optim::SGD {
  using SGD::SGD;
};

// ZERO-58
TEST(FunctionalRegistry, KeepsTheFirstOfAKey) {
  int used = 0;
  const auto factory = [&](int number) {
    return [&used, number](std::vector<at::Tensor> parameters, const torch::optim::OptimizerOptions& options) {
      used = number;
      return std::make_unique<optim::FunctionalSGD>(std::move(parameters),
                                                    optim::options_from<optim::SGDOptions>(options));
    };
  };
  optim::register_functional<Other>(factory(1));
  optim::register_functional<Other>(factory(2));
  optim::functional_form_of<Other>(made_parameters(), torch::optim::SGDOptions(0.5));
  EXPECT_EQ(used, 1);
  optim::register_functional("a name", factory(3));
  optim::functional_form_of("a name", {}, torch::optim::SGDOptions(0.5));
  EXPECT_EQ(used, 3);
  optim::register_functional<optim::AdamW>(factory(4));
  expect_form<optim::AdamW>(*adamw_options({.lr = 0.5}), "AdamW");
  expect_error([] { optim::register_functional("nothing", nullptr); }, {"no factory", "nothing"});
  EXPECT_TRUE(optim::has_functional_form("a name"));
}

}  // namespace
}  // namespace lockstep::functional_test
