// The optimizers as torch::optim::Optimizer: groups, schedulers, refusals, and which kernels they use.
#include "lockstep/optim/optimizers.h"

#include <type_traits>

#include "lockstep/base/str.h"
#include "lockstep/optim/functional.h"
#include "tests/support/optim_parameters.h"

namespace lockstep::optimizers_test {
namespace {

using namespace optim_parameters;
using torch::optim::OptimizerParamGroup;

TEST(Optimizers, KeepLibtorchsStateTypes) {
  const auto parameters = made_parameters();
  optim::AdamW optimizer(parameters);
  train(optimizer, parameters, 2);
  const auto& state =
      dynamic_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameters[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 2);
  EXPECT_EQ(state.exp_avg().sizes(), parameters[0].sizes());
  EXPECT_FALSE(state.max_exp_avg_sq().defined());
}

// U-8: as Python takes it; {} and {.lr = 0.1} are options as ever
TEST(Optimizers, TakeALearningRateAlone) {
  const auto parameters = made_parameters();
  const auto options = [](const torch::optim::Optimizer& optimizer) {
    return optim::options_from<optim::SGDOptions>(optimizer.param_groups()[0].options());
  };
  EXPECT_EQ(options(optim::SGD(parameters, 0.1)), (optim::SGDOptions{.lr = 0.1}));
  EXPECT_EQ(options(optim::SGD(parameters, 1)), (optim::SGDOptions{.lr = 1}));
  EXPECT_EQ(options(optim::SGD(parameters, {0.1})), (optim::SGDOptions{.lr = 0.1}));
  EXPECT_EQ(options(optim::SGD(parameters, {})), optim::SGDOptions());
  EXPECT_EQ(options(optim::SGD({OptimizerParamGroup(parameters)}, 0.1)), (optim::SGDOptions{.lr = 0.1}));
  EXPECT_EQ(optim::AdamW(parameters, 0.1).param_groups()[0].options().get_lr(), 0.1);
}

TEST(Optimizers, MakeNoStateForParametersWithoutGradient) {
  const auto parameters = made_parameters();
  const auto before = parameters[1].detach().clone();
  optim::AdamW optimizer(parameters);
  fill_gradients({parameters[0], parameters[2]});
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 2U);
  EXPECT_TRUE(at::equal(parameters[1], before));
  optim::SGD plain(parameters);
  plain.step();
  EXPECT_TRUE(plain.state().empty());
  // Python's and libtorch's Adagrad have theirs from the beginning.
  optim::Adagrad adagrad(parameters, {.initial_accumulator_value = 0.5});
  EXPECT_EQ(adagrad.state().size(), 3U);
}

// ZERO-63
TEST(Optimizers, FollowSchedulers) {
  const auto ours = made_parameters();
  const auto theirs = made_parameters();
  optim::SGD optimizer(ours, {.lr = 0.4, .momentum = 0.9});
  torch::optim::SGD reference(theirs, torch::optim::SGDOptions(0.4).momentum(0.9));
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  torch::optim::StepLR reference_scheduler(reference, 2, 0.5);
  for (int step = 0; step < 5; ++step) {
    train(optimizer, ours, 1);
    train(reference, theirs, 1);
    scheduler.step();
    reference_scheduler.step();
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1);
  expect_close(ours, theirs);
}

TEST(Optimizers, KeepTheOptionsOfGroups) {
  const auto parameters = made_parameters();
  const std::vector<OptimizerParamGroup> groups = {
      OptimizerParamGroup({parameters[0]}),
      OptimizerParamGroup({parameters[1]}, optim::group_options(optim::AdamWOptions{.lr = 0.5, .weight_decay = 0})),
      // Libtorch's are taken too.
      OptimizerParamGroup({parameters[2]}, std::make_unique<torch::optim::AdamWOptions>(0.25))};
  optim::AdamW optimizer(groups, {.lr = 0.1, .maximize = true});
  const auto options = [&](std::size_t group) {
    return optim::options_from<optim::AdamWOptions>(optimizer.param_groups()[group].options());
  };
  EXPECT_EQ(options(0), (optim::AdamWOptions{.lr = 0.1, .maximize = true}));
  EXPECT_EQ(options(1), (optim::AdamWOptions{.lr = 0.5, .weight_decay = 0}));
  EXPECT_EQ(options(2), (optim::AdamWOptions{.lr = 0.25, .maximize = true}));
  optimizer.add_param_group(
      OptimizerParamGroup({at::zeros({2})}, optim::group_options(optim::AdamWOptions{.lr = 0.7})));
  EXPECT_EQ(options(3).lr, 0.7);
  expect_error(
      [&] {
        optimizer.add_param_group(OptimizerParamGroup({at::zeros({2})}, std::make_unique<torch::optim::SGDOptions>(1)));
      },
      "torch::optim::SGDOptions");
  EXPECT_EQ(optimizer.param_groups().size(), 4U);
}

TEST(Optimizers, RunTheClosureWithGradients) {
  const auto parameter = at::ones({3}).requires_grad_();
  optim::SGD optimizer({parameter}, {.lr = 0.5});
  const at::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto value = parameter.pow(2).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_TRUE(at::equal(parameter, at::zeros({3})));
}

// ZERO-59
TEST(Optimizers, NameBadOptions) {
  const auto parameters = made_parameters();
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto expect_both_betas = [&]<class Optimizer>(std::type_identity<Optimizer> /*unused*/) {
    using Options = typename Optimizer::Options;
    for (const double bad : {-0.1, 1.0, nan}) {
      expect_error([&] { Optimizer(parameters, Options{.betas = {bad, 0.9}}); },
                   str("Invalid beta parameter at index 0: ", bad));
      expect_error([&] { Optimizer(parameters, Options{.betas = {0.9, bad}}); },
                   str("Invalid beta parameter at index 1: ", bad));
    }
  };
  expect_both_betas(std::type_identity<optim::Adam>());
  expect_both_betas(std::type_identity<optim::AdamW>());
  expect_both_betas(std::type_identity<optim::Adamax>());
  // What must not be negative, nor no number.
  for (const double bad : {-1.0, nan}) {
    const auto refuses = [&](const auto& make, const std::string& what) {
      expect_error([&] { make(); }, str(what, ": ", bad));
    };
    refuses([&] { optim::Adam(parameters, {.lr = bad}); }, "Adam: Invalid learning rate");
    refuses([&] { optim::Adam(parameters, {.eps = bad}); }, "Adam: Invalid epsilon value");
    refuses([&] { optim::Adam(parameters, {.weight_decay = bad}); }, "Adam: Invalid weight_decay value");
    refuses([&] { optim::AdamW(parameters, {.lr = bad}); }, "AdamW: Invalid learning rate");
    refuses([&] { optim::AdamW(parameters, {.eps = bad}); }, "AdamW: Invalid epsilon value");
    refuses([&] { optim::AdamW(parameters, {.weight_decay = bad}); }, "AdamW: Invalid weight_decay value");
    refuses([&] { optim::Adamax(parameters, {.lr = bad}); }, "Adamax: Invalid learning rate");
    refuses([&] { optim::Adamax(parameters, {.eps = bad}); }, "Adamax: Invalid epsilon value");
    refuses([&] { optim::Adamax(parameters, {.weight_decay = bad}); }, "Adamax: Invalid weight_decay value");
    refuses([&] { optim::SGD(parameters, {.lr = bad}); }, "SGD: Invalid learning rate");
    refuses([&] { optim::SGD(parameters, {.momentum = bad}); }, "SGD: Invalid momentum value");
    refuses([&] { optim::SGD(parameters, {.weight_decay = bad}); }, "SGD: Invalid weight_decay value");
    refuses([&] { optim::Adagrad(parameters, {.lr = bad}); }, "Adagrad: Invalid learning rate");
    refuses([&] { optim::Adagrad(parameters, {.lr_decay = bad}); }, "Adagrad: Invalid lr_decay value");
    refuses([&] { optim::Adagrad(parameters, {.weight_decay = bad}); }, "Adagrad: Invalid weight_decay value");
    refuses([&] { optim::Adagrad(parameters, {.initial_accumulator_value = bad}); },
            "Adagrad: Invalid initial_accumulator_value value");
    refuses([&] { optim::Adagrad(parameters, {.eps = bad}); }, "Adagrad: Invalid epsilon value");
    refuses([&] { optim::Adadelta(parameters, {.lr = bad}); }, "Adadelta: Invalid learning rate");
    refuses([&] { optim::Adadelta(parameters, {.rho = bad}); }, "Adadelta: Invalid rho value");
    refuses([&] { optim::Adadelta(parameters, {.eps = bad}); }, "Adadelta: Invalid epsilon value");
    refuses([&] { optim::Adadelta(parameters, {.weight_decay = bad}); }, "Adadelta: Invalid weight_decay value");
    refuses([&] { optim::RMSprop(parameters, {.lr = bad}); }, "RMSprop: Invalid learning rate");
    refuses([&] { optim::RMSprop(parameters, {.alpha = bad}); }, "RMSprop: Invalid alpha value");
    refuses([&] { optim::RMSprop(parameters, {.eps = bad}); }, "RMSprop: Invalid epsilon value");
    refuses([&] { optim::RMSprop(parameters, {.weight_decay = bad}); }, "RMSprop: Invalid weight_decay value");
    refuses([&] { optim::RMSprop(parameters, {.momentum = bad}); }, "RMSprop: Invalid momentum value");
    refuses([&] { optim::Rprop(parameters, {.lr = bad}); }, "Rprop: Invalid learning rate");
  }
  expect_error([&] { optim::Adadelta(parameters, {.rho = 1.1}); }, "Invalid rho value: 1.1");
  expect_error([&] { optim::Rprop(parameters, {.etas = {1.5, 1.2}}); }, "Invalid eta values: 1.5, 1.2");
  expect_error([&] { optim::Rprop(parameters, {.etas = {0, 1.2}}); }, "Invalid eta values: 0, 1.2");
  expect_error([&] { optim::Rprop(parameters, {.etas = {1, 1.2}}); }, "Invalid eta values: 1, 1.2");
  expect_error([&] { optim::Rprop(parameters, {.etas = {0.5, 1}}); }, "Invalid eta values: 0.5, 1");
  expect_error([&] { optim::SGD(parameters, {.nesterov = true}); }, "Nesterov momentum requires a momentum");
  expect_error([&] { optim::SGD(parameters, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}); },
               "Nesterov momentum requires a momentum");
  // In a group too.
  expect_error(
      [&] { optim::AdamW({OptimizerParamGroup(parameters, optim::group_options(optim::AdamWOptions{.lr = -2}))}, {}); },
      "Invalid learning rate: -2");
}

// ZERO-59: the ends of what is allowed
TEST(Optimizers, TakeOptionsThatAreJustGoodEnough) {
  const auto parameters = made_parameters();
  optim::Adam(parameters, {.lr = 0, .betas = {0, 0}, .eps = 0, .weight_decay = 0});
  optim::Adamax(parameters, {.lr = 0, .betas = {0, 0}, .eps = 0, .weight_decay = 0});
  optim::SGD(parameters, {.lr = 0, .momentum = 0, .weight_decay = 0});
  optim::Adagrad(parameters, {.lr = 0, .lr_decay = 0, .weight_decay = 0, .initial_accumulator_value = 0, .eps = 0});
  optim::Adadelta(parameters, {.lr = 0, .rho = 0, .eps = 0, .weight_decay = 0});
  optim::Adadelta(parameters, {.rho = 1});
  optim::RMSprop(parameters, {.lr = 0, .alpha = 0, .eps = 0, .weight_decay = 0, .momentum = 0});
  optim::Rprop(parameters, {.lr = 0});
}

at::Tensor sparse_rows(const std::vector<int64_t>& rows, const at::Tensor& values, at::IntArrayRef sizes) {
  const auto indices = at::tensor(rows, at::kLong).unsqueeze(0);
  return at::sparse_coo_tensor(indices, values, sizes);
}

// Python warns, or throws
TEST(Optimizers, RefuseAParameterThatIsListedTwice) {
  const auto parameters = made_parameters();
  const std::vector<at::Tensor> twice = {parameters[0], parameters[1], parameters[0]};
  testing::expect_error([&] { optim::AdamW(twice, {}); }, {"AdamW", "parameters 0 and 2", "List it once"});
  testing::expect_error([&] { optim::FunctionalSGD(twice, {}); }, {"parameters 0 and 2"});
  optim::SGD optimizer(std::vector<at::Tensor>{parameters[0]});
  testing::expect_error([&] { optimizer.add_param_group({{parameters[1], parameters[1]}}); }, {"parameters 1 and 2"});
  testing::expect_error([&] { optimizer.add_param_group({{parameters[0]}}); }, {"parameters 0 and 1"});
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
}

TEST(Optimizers, TakeSparseGradientsWherePythonDoes) {
  const auto values = at::randn({3, 2});
  for (const bool maximize : {false, true}) {
    const auto sparse = at::ones({4, 2}).requires_grad_();
    const auto dense = at::ones({4, 2}).requires_grad_();
    optim::SGD sgd_sparse({sparse}, {.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = maximize});
    optim::SGD sgd_dense({dense}, {.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = maximize});
    optim::Adagrad adagrad_sparse({sparse}, {.lr = 0.1, .lr_decay = 0.5, .maximize = maximize});
    optim::Adagrad adagrad_dense({dense}, {.lr = 0.1, .lr_decay = 0.5, .maximize = maximize});
    for (int step = 0; step < 3; ++step) {
      sparse.mutable_grad() = sparse_rows({1, 3, 1}, values * (step + 1), {4, 2});  // row 1 twice
      dense.mutable_grad() = sparse.grad().to_dense();
      sgd_sparse.step();
      sgd_dense.step();
      adagrad_sparse.step();
      adagrad_dense.step();
      EXPECT_TRUE(at::allclose(sparse, dense)) << step;
    }
    EXPECT_TRUE(at::equal(sparse[0], at::ones({2})));
  }
}

TEST(Optimizers, RefuseBadGradientsBeforeAnyChange) {
  const auto parameters = made_parameters();
  std::vector<at::Tensor> before;
  for (const auto& parameter : parameters) before.push_back(parameter.detach().clone());
  const std::vector<OptimizerParamGroup> groups = {OptimizerParamGroup({parameters[1]}),
                                                   OptimizerParamGroup({parameters[0]})};
  fill_gradients(parameters);
  const auto expect_refusal = [&](torch::optim::Optimizer& optimizer, const std::string& part) {
    expect_error([&] { optimizer.step(); }, part);
    expect_equal(parameters, before);
    EXPECT_TRUE(optimizer.state().empty());
  };
  parameters[0].mutable_grad() = sparse_rows({1}, at::ones({1, 3}), {4, 3});
  optim::AdamW adamw(groups);
  expect_refusal(adamw, "AdamW: gradient 0 of 1 is sparse");
  optim::Rprop rprop(groups);
  expect_refusal(rprop, "Rprop: gradient 0 of 1 is sparse");
  optim::SGD sgd(groups, {.weight_decay = 0.1});
  expect_refusal(sgd, "SGD: gradient 0 of 1 is sparse");
  parameters[0].mutable_grad() = at::ones({1, 3});
  expect_refusal(adamw, "gradient 0 of 1 has sizes [1, 3], its parameter [4, 3]");
}

/// The same numbers, once as plain memory and once as every other column of a wider tensor.
template <class Optimizer>
void expect_same_by_both_ways(const typename Optimizer::Options& options) {
  torch::manual_seed(5);
  const auto dense = at::randn({6, 50}, at::kDouble).requires_grad_();
  const auto strided = at::empty({6, 100}, at::kDouble).slice(1, 0, 100, 2).copy_(dense).detach().requires_grad_();
  ASSERT_FALSE(strided.is_non_overlapping_and_dense());
  Optimizer fused({dense}, options);
  Optimizer loop({strided}, options);
  for (int step = 0; step < 5; ++step) {
    dense.mutable_grad() = at::randn({6, 50}, at::kDouble);
    strided.mutable_grad() = dense.grad().clone();
    fused.step();
    loop.step();
    EXPECT_TRUE(at::allclose(dense, strided, 1e-10, 1e-12)) << step;
  }
}

// ZERO-68
TEST(Optimizers, GiveTheSameWithAndWithoutFusedKernels) {
  expect_same_by_both_ways<optim::AdamW>({.lr = 0.1, .amsgrad = true});
  expect_same_by_both_ways<optim::Adam>({.lr = 0.1, .weight_decay = 0.1, .maximize = true});
  expect_same_by_both_ways<optim::SGD>({.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.1});
  expect_same_by_both_ways<optim::Adagrad>({.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1});
}

/// The names of the operators that ran, one after the other.
std::string operators_of(const std::function<void()>& body) {
  static thread_local std::string names;
  names.clear();
  const auto callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        names += std::string(function.name()) + " ";
        return nullptr;
      }));
  body();
  at::removeCallback(callback);
  return names;
}

// ZERO-68
TEST(Optimizers, UseFusedKernelsWhereTheParametersAllow) {
  const auto operators = [](auto optimizer, const std::vector<at::Tensor>& parameters) {
    fill_gradients(parameters);
    return operators_of([&] { optimizer.step(); });
  };
  using ::testing::HasSubstr;
  using ::testing::Not;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto parameters = made_parameters(1, dtype);
    EXPECT_THAT(operators(optim::AdamW(parameters), parameters), HasSubstr("aten::_fused_adamw_ "));
    EXPECT_THAT(operators(optim::Adam(parameters), parameters), HasSubstr("aten::_fused_adam_ "));
    EXPECT_THAT(operators(optim::Adagrad(parameters), parameters), HasSubstr("aten::_fused_adagrad_ "));
    // Libtorch's fused SGD is broken for half types on the CPU.
    const bool is_half = dtype == at::kBFloat16 || dtype == at::kHalf;
    const auto of_sgd = operators(optim::SGD(parameters), parameters);
    EXPECT_EQ(of_sgd.find("aten::_fused_sgd_ ") == std::string::npos, is_half) << of_sgd;
  }
  const std::vector<at::Tensor> strided = {at::ones({3, 8}).slice(1, 0, 8, 2).requires_grad_()};
  EXPECT_THAT(operators(optim::AdamW(strided), strided), Not(HasSubstr("_fused_")));
  // A gradient laid out otherwise than its parameter, which the kernels would take for the same.
  const auto transposed = at::randn({3, 4}).requires_grad_();
  transposed.mutable_grad() = at::randn({4, 3}).t();
  const auto expected = transposed.detach() - 0.1 * transposed.grad();
  optim::SGD sgd({transposed}, {.lr = 0.1});
  EXPECT_THAT(operators_of([&] { sgd.step(); }), Not(HasSubstr("_fused_")));
  EXPECT_TRUE(at::allclose(transposed, expected));
}

// ZERO-68: one call for all, not one for each
TEST(Optimizers, StepAGroupInOneCall) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 50; ++i) parameters.push_back(at::ones({7}).requires_grad_());
  optim::AdamW optimizer(parameters);
  fill_gradients(parameters);
  optimizer.step();
  const auto operators = operators_of([&] { optimizer.step(); });
  const std::string kernel = "aten::_fused_adamw_ ";
  const auto first = operators.find(kernel);
  ASSERT_NE(first, std::string::npos) << operators;
  EXPECT_EQ(operators.find(kernel, first + 1), std::string::npos) << operators;
  // Before it, the step count becomes a tensor, once.
  EXPECT_LE(std::count(operators.begin(), operators.begin() + static_cast<std::ptrdiff_t>(first), ' '), 3) << operators;
}

TEST(Optimizers, LeaveTheNumberOfThreadsAsItWas) {
  const auto before = at::get_num_threads();
  at::set_num_threads(2);
  const auto parameters = made_parameters();
  optim::AdamW optimizer(parameters);
  train(optimizer, parameters, 1);
  EXPECT_EQ(at::get_num_threads(), 2);
  at::set_num_threads(before);
}

}  // namespace
}  // namespace lockstep::optimizers_test
