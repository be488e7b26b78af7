// Compares the optimizers and their functional forms with PyTorch's, parameter by parameter after every step: bit by
// bit with fused=True where the fused kernels are used here, and with the implementation PyTorch takes by default where
// not; fused ones with that implementation to the last digits.
#include "lockstep/optim/optimizers.h"

#include "lockstep/optim/functional_registry.h"
#include "tests/oracle/optim/reference.h"

namespace lockstep {
namespace {

using namespace optim_oracle;

/// What the script divides learning rates by, and when.
constexpr std::size_t kChangesLrAt = 6;
constexpr double kLrDivisor = 3;

struct Case {
  std::string optimizer;
  std::vector<c10::IValue> options;  // of each group
  std::string kernel;
  std::vector<at::Tensor> before;
  std::vector<std::vector<at::Tensor>> gradients;
  std::vector<std::vector<at::Tensor>> after;
  std::vector<c10::IValue> state;
  std::string description;

  explicit Case(const c10::IValue& saved)
      : optimizer(at_key(saved, "optimizer").toStringRef()),
        options(at_key(saved, "options").toListRef().vec()),
        kernel(at_key(saved, "kernel").toStringRef()),
        before(tensors_of(at_key(saved, "before"))),
        state(at_key(saved, "state").toListRef().vec()) {
    for (const c10::IValue& step : at_key(saved, "gradients").toListRef()) gradients.push_back(tensors_of(step));
    for (const c10::IValue& step : at_key(saved, "after").toListRef()) after.push_back(tensors_of(step));
    std::ostringstream text;
    text << optimizer << " " << options.front() << (options.size() == 2 ? " and a second group" : "") << ", " << kernel
         << ", " << before.front().scalar_type() << ", " << at_key(saved, "layout").toStringRef();
    description = text.str();
  }

  double tolerance() const {
    const auto& parameter = before.front();
    const bool is_fused_here =
        parameter.scalar_type() == at::kFloat && parameter.is_non_overlapping_and_dense() &&
        (optimizer == "Adam" || optimizer == "AdamW" || optimizer == "SGD" || optimizer == "Adagrad");
    // Here complex numbers are pairs of real ones from the start, for PyTorch after the weight decay.
    return (kernel == "single" && is_fused_here) || parameter.is_complex() ? 2e-6 : 0;
  }
};

template <class Options>
Options options_of(const c10::IValue& saved) {
  Options options;
  std::size_t used = 0;
  Options::visit(options, [&]<class Value>(const char* name, Value& value) {
    const auto dict = saved.toGenericDict();
    if (!dict.contains(name)) return;
    value = dict.at(name).template to<Value>();
    ++used;
  });
  EXPECT_EQ(used, saved.toGenericDict().size()) << "an option of " << saved << " is unknown";
  return options;
}

/// Leaves of the same layout, which the case may be run on again.
std::vector<at::Tensor> parameters_of(const Case& subject) {
  std::vector<at::Tensor> parameters;
  for (const auto& each : subject.before) {
    auto parameter = at::empty_strided(each.sizes(), each.strides(), each.options()).copy_(each);
    parameters.push_back(parameter.requires_grad_());
  }
  return parameters;
}

void expect_parameters(const Case& subject, const std::vector<at::Tensor>& parameters, std::size_t step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    expect_agreement(parameters[i].detach(), subject.after[step][i], subject.tolerance(),
                     str("parameter ", i, " after step ", step));
  }
}

template <class Optimizer>
void step_ordinary(const Case& subject) {
  using Options = typename Optimizer::Options;
  const auto parameters = parameters_of(subject);
  const auto first = options_of<Options>(subject.options.front());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (subject.options.size() == 1) {
    groups.emplace_back(parameters);
  } else {
    groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 2));
    groups.emplace_back(std::vector<at::Tensor>(parameters.begin() + 2, parameters.end()),
                        optim::group_options(options_of<Options>(subject.options.back())));
  }
  Optimizer optimizer(groups, first);
  for (std::size_t step = 0; step < subject.gradients.size(); ++step) {
    if (step == kChangesLrAt) {
      for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() / kLrDivisor);
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = subject.gradients[step][i];
      // Layouts decide on the kernel: clone() would make them dense.
      parameters[i].mutable_grad() = gradient;
    }
    const auto gradients_before = parameters.front().grad().clone();
    optimizer.step();
    expect_agreement(parameters.front().grad(), gradients_before, 0, "the gradient");
    expect_parameters(subject, parameters, step);
  }
}

void expect_state(const Case& subject, const optim::FunctionalOptimizer& optimizer) {
  for (std::size_t i = 0; i < subject.state.size(); ++i) {
    const auto actual = optimizer.state(i);
    const auto expected = subject.state[i].toGenericDict();
    EXPECT_EQ(actual.size(), expected.size());
    for (const auto& each : expected) {
      const auto name = each.key().toStringRef();
      ASSERT_EQ(actual.count(name), 1) << name;
      const auto& value = actual.at(name);
      // Python counts steps in float tensors.
      const auto tensor = value.isInt() ? at::full({}, value.toInt(), at::kFloat) : value.toTensor();
      expect_agreement(tensor, each.value().toTensor(), subject.tolerance(), name);
    }
  }
}

template <class Optimizer>
void step_functional(const Case& subject) {
  using Options = typename Optimizer::Options;
  const auto parameters = parameters_of(subject);
  const auto optimizer = optim::functional_form_of<Optimizer>(
      parameters, *optim::group_options(options_of<Options>(subject.options.front())));
  EXPECT_EQ(optimizer->name(), subject.optimizer);
  for (std::size_t step = 0; step < subject.gradients.size(); ++step) {
    if (step == kChangesLrAt) optimizer->options().set_lr(optimizer->options().get_lr() / kLrDivisor);
    optimizer->step(subject.gradients[step]);
    expect_parameters(subject, parameters, step);
  }
  expect_state(subject, *optimizer);
}

template <class Optimizer>
void compare(const std::vector<Case>& cases, const std::string& name) {
  int compared = 0;
  for (const auto& subject : cases) {
    if (subject.optimizer != name) continue;
    SCOPED_TRACE(subject.description);
    step_ordinary<Optimizer>(subject);
    if (subject.options.size() == 1) step_functional<Optimizer>(subject);
    ++compared;
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GE(compared, 18) << name;
}

const std::vector<Case>& cases() {
  static const auto all = [] {
    std::vector<Case> read;
    const auto saved = oracle::run_reference("optim/optimizers_reference.py");
    if (saved.isNone()) return read;
    for (const c10::IValue& each : saved.toListRef()) read.emplace_back(each);
    return read;
  }();
  return all;
}

class OptimizerOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cases().empty()) {
      GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
    }
  }
};

// ZERO-59, ZERO-68
TEST_F(OptimizerOracle, AdamAgreesWithPyTorch) {
  compare<optim::Adam>(cases(), "Adam");
}

// ZERO-59, ZERO-68
TEST_F(OptimizerOracle, AdamWAgreesWithPyTorch) {
  compare<optim::AdamW>(cases(), "AdamW");
}

// ZERO-59, ZERO-68
TEST_F(OptimizerOracle, SgdAgreesWithPyTorch) {
  compare<optim::SGD>(cases(), "SGD");
}

// ZERO-59, ZERO-68
TEST_F(OptimizerOracle, AdagradAgreesWithPyTorch) {
  compare<optim::Adagrad>(cases(), "Adagrad");
}

// ZERO-59
TEST_F(OptimizerOracle, AdadeltaAgreesWithPyTorch) {
  compare<optim::Adadelta>(cases(), "Adadelta");
}

// ZERO-59
TEST_F(OptimizerOracle, RmspropAgreesWithPyTorch) {
  compare<optim::RMSprop>(cases(), "RMSprop");
}

// ZERO-59
TEST_F(OptimizerOracle, RpropAgreesWithPyTorch) {
  compare<optim::Rprop>(cases(), "Rprop");
}

// ZERO-59
TEST_F(OptimizerOracle, AdamaxAgreesWithPyTorch) {
  compare<optim::Adamax>(cases(), "Adamax");
}

}  // namespace
}  // namespace lockstep
