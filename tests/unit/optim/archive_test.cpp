// Archives: interchangeable with libtorch's, complete, and refused if they do not fit.
#include <c10/util/Type.h>

#include <sstream>

#include "lockstep/optim/optimizers.h"
#include "lockstep/state/optimizer_state.h"
#include "tests/support/optim_parameters.h"

namespace lockstep {
namespace {

using namespace optim_parameters;
using torch::optim::OptimizerParamGroup;

void move_by_archive(const torch::optim::Optimizer& from, torch::optim::Optimizer& into) {
  std::stringstream file;
  torch::serialize::OutputArchive out;
  from.save(out);
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  into.load(in);
}

/// Trains `from`, hands its state to `into`, which has other options, and trains both on: they must stay together.
template <class From, class Into>
void expect_archive_opens(From& from, const std::vector<at::Tensor>& from_parameters, Into& into,
                          const std::vector<at::Tensor>& into_parameters) {
  train(from, from_parameters, 3);
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < from_parameters.size(); ++i) into_parameters[i].copy_(from_parameters[i]);
  }
  move_by_archive(from, into);
  EXPECT_EQ(into.param_groups()[0].options().get_lr(), from.param_groups()[0].options().get_lr());
  EXPECT_EQ(into.state().size(), from.state().size());
  train(from, from_parameters, 3);
  train(into, into_parameters, 3);
  expect_close(into_parameters, from_parameters);
}

/// Both ways, with libtorch's class of that name.
template <class Ours, class Theirs, class TheirOptions>
void expect_interchangeable(const typename Ours::Options& options, const TheirOptions& their_options,
                            const TheirOptions& their_other_options) {
  {
    const auto from = made_parameters(1);
    const auto into = made_parameters(2);
    Theirs theirs(from, their_options);
    Ours ours(into, typename Ours::Options{});
    expect_archive_opens(theirs, from, ours, into);
  }
  {
    const auto from = made_parameters(1);
    const auto into = made_parameters(2);
    Ours ours(from, options);
    Theirs theirs(into, their_other_options);
    expect_archive_opens(ours, from, theirs, into);
  }
}

// ZERO-41
TEST(OptimArchive, OpensInLibtorchsOptimizerOfThatNameAndTheReverse) {
  namespace theirs = torch::optim;
  expect_interchangeable<optim::AdamW, theirs::AdamW>({.lr = 0.03, .betas = {0.8, 0.9}, .amsgrad = true},
                                                      theirs::AdamWOptions(0.03).betas({0.8, 0.9}).amsgrad(true),
                                                      theirs::AdamWOptions(1.0));
  expect_interchangeable<optim::Adam, theirs::Adam>({.lr = 0.03, .eps = 1e-4, .weight_decay = 0.1},
                                                    theirs::AdamOptions(0.03).eps(1e-4).weight_decay(0.1),
                                                    theirs::AdamOptions(1.0));
  expect_interchangeable<optim::SGD, theirs::SGD>({.lr = 0.03, .momentum = 0.9, .nesterov = true},
                                                  theirs::SGDOptions(0.03).momentum(0.9).nesterov(true),
                                                  theirs::SGDOptions(1.0));
  expect_interchangeable<optim::Adagrad, theirs::Adagrad>(
      {.lr = 0.03, .lr_decay = 0.1}, theirs::AdagradOptions(0.03).lr_decay(0.1), theirs::AdagradOptions(1.0));
  expect_interchangeable<optim::RMSprop, theirs::RMSprop>({.lr = 0.03, .momentum = 0.5, .centered = true},
                                                          theirs::RMSpropOptions(0.03).momentum(0.5).centered(true),
                                                          theirs::RMSpropOptions(1.0));
}

template <class Optimizer>
void expect_own_archive_opens(const typename Optimizer::Options& options) {
  const auto from = made_parameters(1);
  const auto into = made_parameters(2);
  Optimizer first(from, options);
  Optimizer second(into);
  expect_archive_opens(first, from, second, into);
  EXPECT_EQ(optim::options_from<typename Optimizer::Options>(second.param_groups()[0].options()), options);
}

TEST(OptimArchive, HoldsTheOptionsLibtorchLacks) {
  expect_own_archive_opens<optim::AdamW>({.lr = 0.03, .maximize = true});
  expect_own_archive_opens<optim::SGD>({.lr = 0.03, .maximize = true});
  expect_own_archive_opens<optim::Adadelta>({.lr = 0.5, .rho = 0.8, .maximize = true});
  expect_own_archive_opens<optim::Rprop>({.lr = 0.5, .etas = {0.4, 1.3}});
  expect_own_archive_opens<optim::Adamax>({.lr = 0.5, .betas = {0.8, 0.9}});
}

TEST(OptimArchive, OfLibtorchLeavesMaximizeAsItIs) {
  const auto parameters = made_parameters();
  torch::optim::AdamW theirs(parameters, torch::optim::AdamWOptions(0.5));
  optim::AdamW ours(parameters, {.maximize = true});
  move_by_archive(theirs, ours);
  EXPECT_EQ(optim::options_from<optim::AdamWOptions>(ours.param_groups()[0].options()),
            (optim::AdamWOptions{.lr = 0.5, .maximize = true}));
}

TEST(OptimArchive, ThatDoesNotFitChangesNothing) {
  const auto parameters = made_parameters();
  optim::AdamW one(parameters, {.lr = 0.5});
  train(one, parameters, 1);
  optim::AdamW two({OptimizerParamGroup({parameters[0]}), OptimizerParamGroup({parameters[1]})}, {.lr = 0.1});
  expect_error([&] { move_by_archive(one, two); }, "has 1 parameter groups, the optimizer 2");
  optim::AdamW fewer({parameters[0]}, {.lr = 0.1});
  expect_error([&] { move_by_archive(one, fewer); }, "has 3 parameters, that of the optimizer 1");
  EXPECT_EQ(fewer.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_TRUE(fewer.state().empty());
}

template <class From, class Into>
void expect_refused(const From& from, const std::vector<at::Tensor>& parameters, const std::string& kind) {
  using OptionsOfInto = typename Into::Options;
  auto options = OptionsOfInto{.lr = 0.25};
  if constexpr (requires { options.momentum; }) options.momentum = 0.5;
  Into into(parameters, options);
  train(into, parameters, 1);
  const auto before = state_dict_of(into);
  const std::vector<std::string> words = {"state of " + kind, c10::demangle_type<Into>()};
  testing::expect_error([&] { move_by_archive(from, into); }, words);
  testing::expect_error([&] { load_state_dict(into, state_dict_of(from)); }, words);
  EXPECT_EQ(into.param_groups()[0].options().get_lr(), 0.25);
  const auto after = state_dict_of(into);
  ASSERT_EQ(after.state.size(), before.state.size());
  for (const auto& [name, value] : before.state.at(0)) {
    if (!value.isTensor()) continue;
    EXPECT_TRUE(at::equal(after.state.at(0).at(name).toTensor(), value.toTensor())) << name;
  }
}

template <class From, class... Into>
void expect_refused_by(const typename From::Options& options, const std::string& kind) {
  SCOPED_TRACE(kind);
  const auto parameters = made_parameters();
  From from(parameters, options);
  train(from, parameters, 2);
  (expect_refused<From, Into>(from, parameters, kind), ...);
}

// Momenta of another kind would be dropped, and the rest go on with an empty state
TEST(OptimArchive, OfAnotherKindIsRefusedNamingBoth) {
  using namespace optim;
  expect_refused_by<AdamW, Adadelta, Adagrad, Adamax, RMSprop, Rprop, SGD>({}, "Adam or AdamW");
  expect_refused_by<SGD, Adadelta, Adagrad, Adamax, Adam, RMSprop, Rprop>({.momentum = 0.9}, "SGD");
  expect_refused_by<RMSprop, Adadelta, Adagrad, Adamax, Adam, Rprop, SGD>({}, "RMSprop");
  expect_refused_by<RMSprop, Adadelta, AdamW, SGD>({.momentum = 0.9, .centered = true}, "RMSprop");
  expect_refused_by<Adadelta, Adagrad, Adamax, Adam, RMSprop, Rprop, SGD>({}, "Adadelta");
  expect_refused_by<Adagrad, Adadelta, Adamax, Adam, RMSprop, Rprop, SGD>({}, "Adagrad");
  expect_refused_by<Adamax, Adadelta, Adagrad, Adam, RMSprop, Rprop, SGD>({}, "Adamax");
  expect_refused_by<Rprop, Adadelta, Adagrad, Adamax, Adam, RMSprop, SGD>({}, "Rprop");
}

// Libtorch's own classes, where a dictionary is loaded by us
TEST(OptimArchive, OfAnotherKindIsRefusedForLibtorchsOptimizersToo) {
  const auto parameters = made_parameters();
  optim::AdamW from(parameters);
  train(from, parameters, 1);
  torch::optim::SGD into(parameters, torch::optim::SGDOptions(0.25).momentum(0.9));
  testing::expect_error([&] { load_state_dict(into, state_dict_of(from)); },
                        {"state of Adam or AdamW", "torch::optim::SGD", "'exp_avg', 'exp_avg_sq'"});
  EXPECT_EQ(into.param_groups()[0].options().get_lr(), 0.25);
}

// Without state there is nothing to lose, and Adam and AdamW keep the same.
TEST(OptimArchive, OfAnotherKindOpensWhereNothingIsLost) {
  const auto parameters = made_parameters();
  optim::AdamW fresh(parameters, {.lr = 0.5});
  optim::SGD sgd(parameters, {.lr = 0.1, .momentum = 0.9});
  move_by_archive(fresh, sgd);
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.5);
  train(fresh, parameters, 1);
  optim::Adam adam(parameters);
  move_by_archive(fresh, adam);
  EXPECT_EQ(adam.state().size(), parameters.size());
}

TEST(OptimArchive, IsTheSameForTheSameState) {
  const auto bytes = [] {
    const auto parameters = made_parameters();
    optim::AdamW optimizer(parameters);
    train(optimizer, parameters, 2);
    std::ostringstream file;
    torch::serialize::OutputArchive out;
    optimizer.save(out);
    out.save_to(file);
    return file.str();
  };
  const auto kept = made_parameters();  // so that addresses differ
  EXPECT_EQ(bytes(), bytes());
}

}  // namespace
}  // namespace lockstep
