// Compares clipping and GradScaler with PyTorch's, bit by bit.
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "tests/oracle/optim/reference.h"

namespace lockstep {
namespace {

using namespace optim_oracle;

class GradientsOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (saved().isNone()) {
      GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
    }
  }
  static const c10::IValue& saved() {
    static const auto value = reference("gradients_reference.py");
    return value;
  }
};

std::vector<at::Tensor> parameters_with(const std::vector<at::Tensor>& gradients, std::size_t count) {
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < count; ++i) {
    parameters.push_back(at::zeros_like(gradients[i]).requires_grad_());
    parameters.back().mutable_grad() = gradients[i].clone();
  }
  parameters.push_back(at::zeros({3}).requires_grad_());
  return parameters;
}

void expect_gradients(const std::vector<at::Tensor>& parameters, const c10::IValue& expected) {
  const auto tensors = tensors_of(expected);
  ASSERT_EQ(parameters.size(), tensors.size() + 1);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    expect_agreement(parameters[i].grad(), tensors[i], 0, str("gradient ", i));
  }
  EXPECT_FALSE(parameters.back().grad().defined());
}

TEST_F(GradientsOracle, ClippingByNormAgreesWithPyTorch) {
  for (const auto* dtype : {"float32", "float64", "bfloat16"}) {
    const auto gradients = tensors_of(at_key(at_key(saved(), dtype), "gradients"));
    for (const c10::IValue& each : at_key(at_key(saved(), dtype), "clip_norm").toListRef()) {
      for (const bool foreach : {true, false}) {
        const auto norm_type = at_key(each, "norm_type").toDouble();
        const auto max_norm = at_key(each, "max_norm").toDouble();
        SCOPED_TRACE(str(dtype, ", norm ", norm_type, " to ", max_norm));
        const auto parameters = parameters_with(gradients, static_cast<std::size_t>(at_key(each, "count").toInt()));
        const auto norm = clip_grad_norm_(parameters, max_norm, {.norm_type = norm_type, .foreach = foreach});
        expect_agreement(norm, at_key(each, "norm").toTensor(), 0, "norm");
        expect_gradients(parameters, at_key(each, "gradients"));
      }
    }
  }
}

TEST_F(GradientsOracle, ClippingByValueAgreesWithPyTorch) {
  for (const auto* dtype : {"float32", "float64", "bfloat16"}) {
    const auto gradients = tensors_of(at_key(at_key(saved(), dtype), "gradients"));
    for (const c10::IValue& each : at_key(at_key(saved(), dtype), "clip_value").toListRef()) {
      for (const bool foreach : {true, false}) {
        const auto parameters = parameters_with(gradients, gradients.size());
        clip_grad_value_(parameters, at_key(each, "value").toDouble(), foreach);
        expect_gradients(parameters, at_key(each, "gradients"));
      }
    }
  }
}

// ZERO-72: the same steps are left out and the scale moves alike
TEST_F(GradientsOracle, GradScalerAgreesWithPyTorch) {
  GradScaler scaler(
      {.device = at::kCPU, .init_scale = 64, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 2});
  const std::vector<at::Tensor> parameters = {at::ones({3}).requires_grad_(), at::full({2}, 2.0).requires_grad_()};
  torch::optim::SGD first({parameters[0]}, 0.1);
  torch::optim::SGD second({parameters[1]}, torch::optim::SGDOptions(0.2).momentum(0.9));
  const auto steps = at_key(saved(), "scaler").toListRef();
  for (std::size_t step = 0; step < steps.size(); ++step) {
    SCOPED_TRACE(step);
    const double factor = step == 3   ? std::numeric_limits<double>::infinity()
                          : step == 4 ? std::numeric_limits<double>::quiet_NaN()
                                      : 0.3;
    const auto losses = scaler.scale({(parameters[0] * factor).sum(), parameters[1].pow(2).sum()});
    first.zero_grad();
    second.zero_grad();
    for (const auto& loss : losses) loss.backward();
    if (step % 2 == 0) scaler.unscale_(first);
    scaler.step(first);
    scaler.step(second);
    step == 7 ? scaler.update(7.0) : scaler.update();

    const auto expected_losses = tensors_of(at_key(steps[step], "losses"));
    const auto expected = tensors_of(at_key(steps[step], "parameters"));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      expect_agreement(losses[i].detach(), expected_losses[i], 0, "loss");
      expect_agreement(parameters[i].detach(), expected[i], 0, "parameter");
    }
    const auto state = scaler.state_dict();
    const auto expected_state = at_key(steps[step], "state").toGenericDict();
    EXPECT_EQ(state.size(), expected_state.size());
    for (const auto& each : expected_state) {
      EXPECT_EQ(state.at(each.key().toStringRef()), each.value().toDouble()) << each.key();
    }
  }
}

}  // namespace
}  // namespace lockstep
