// Operators that work element by element, with all placements of their operands, against one device.
#include "tests/support/dtensor_cases.h"

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::pointwise_cases_test {
namespace {

using namespace dtensor_cases;  // NOLINT: the vocabulary of this file
using Unary = at::Tensor (*)(const at::Tensor&);

const std::vector<std::vector<Sizes>> kOne = {{{4, 6}}, {{5, 3}}, {{}}, {{1, 2, 5}}};
const std::vector<std::vector<Sizes>> kTwo = {{{4, 6}, {4, 6}}, {{5, 3}, {5, 3}}, {{5, 3}, {3}}, {{3}, {5, 3}},
                                              {{5, 1}, {1, 3}}, {{4, 3}, {}},     {{}, {3, 2}},  {{}, {}}};
const std::vector<std::vector<Sizes>> kTwoInPlace = {{{4, 6}, {4, 6}}, {{5, 3}, {5, 3}}, {{5, 3}, {3}},
                                                     {{5, 3}, {5, 1}}, {{4, 3}, {}},     {{}, {}}};
const std::vector<std::vector<Sizes>> kThree = {{{4, 2}, {4, 2}, {4, 2}}, {{5, 3}, {3}, {5, 1}}, {{2, 3}, {}, {3}}};
const std::vector<std::vector<Sizes>> kThreeInPlace = {{{4, 2}, {4, 2}, {4, 2}}, {{5, 3}, {3}, {5, 1}}};

OperatorCase unary(const std::string& name, const std::function<at::Tensor(const at::Tensor&)>& run,
                   const std::string& inputs = "g") {
  return {
      .name = name, .run = [run](const Tensors& in) { return Tensors{run(in[0])}; }, .samples = kOne, .inputs = inputs};
}

/// On a copy, since leaves cannot be written.
OperatorCase unary_in_place(const std::string& name, const std::function<void(at::Tensor&)>& run,
                            const std::function<bool(const Placements&)>& is_refused, const std::string& inputs = "g") {
  return {.name = name,
          .run =
              [run](const Tensors& in) {
                auto written = in[0].clone();
                run(written);
                return Tensors{written};
              },
          .samples = kOne,
          .inputs = inputs,
          .is_refused = is_refused};
}

OperatorCase binary(const std::string& name, const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& run,
                    const std::string& inputs = "gg") {
  return {.name = name,
          .run = [run](const Tensors& in) { return Tensors{run(in[0], in[1])}; },
          .samples = name == "mse_loss none" ? kTwoInPlace : kTwo,
          .inputs = inputs};
}

OperatorCase binary_in_place(const std::string& name, const std::function<void(at::Tensor&, const at::Tensor&)>& run,
                             const std::function<bool(const Placements&)>& is_refused,
                             const std::string& inputs = "gg") {
  return {.name = name,
          .run =
              [run](const Tensors& in) {
                auto written = in[0].clone();
                run(written, in[1]);
                return Tensors{written};
              },
          .samples = kTwoInPlace,
          .inputs = inputs,
          .is_refused = is_refused};
}

using At = const at::Tensor&;

std::vector<OperatorCase> unary_cases() {
  return {
      unary("abs", [](At x) { return x.abs(); }),
      unary("exp", [](At x) { return x.exp(); }),
      unary("sin", [](At x) { return x.sin(); }),
      unary("cos", [](At x) { return x.cos(); }),
      unary("tanh", [](At x) { return x.tanh(); }),
      unary("sigmoid", [](At x) { return x.sigmoid(); }),
      unary("relu", [](At x) { return x.relu(); }),
      unary("gelu", [](At x) { return at::gelu(x); }),
      unary("gelu tanh", [](At x) { return at::gelu(x, "tanh"); }),
      unary("silu", [](At x) { return at::silu(x); }),
      unary("mish", [](At x) { return at::mish(x); }),
      unary("elu", [](At x) { return at::elu(x); }),
      unary("selu", [](At x) { return at::selu(x); }),
      unary("celu", [](At x) { return at::celu(x); }),
      unary("leaky_relu", [](At x) { return at::leaky_relu(x); }),
      unary("hardtanh", [](At x) { return at::hardtanh(x); }),
      unary("relu6", [](At x) { return at::relu6(x); }),
      unary("hardsigmoid", [](At x) { return at::hardsigmoid(x); }),
      unary("hardswish", [](At x) { return at::hardswish(x); }),
      unary("softplus", [](At x) { return at::softplus(x); }),
      unary("softshrink", [](At x) { return at::softshrink(x); }),
      unary("hardshrink", [](At x) { return at::hardshrink(x); }),
      unary("log_sigmoid", [](At x) { return at::log_sigmoid(x); }),
      unary("softsign", [](At x) { return x / (x.abs() + 1); }),
      unary("threshold", [](At x) { return at::threshold(x, 0.1, 2.0); }),
      unary(
          "log", [](At x) { return x.log(); }, "p"),
      unary(
          "log1p", [](At x) { return x.log1p(); }, "p"),
      unary(
          "sqrt", [](At x) { return x.sqrt(); }, "p"),
      unary(
          "rsqrt", [](At x) { return x.rsqrt(); }, "p"),
      unary(
          "reciprocal", [](At x) { return x.reciprocal(); }, "p"),
      unary("pow 3", [](At x) { return x.pow(3); }),
      unary("pow 0", [](At x) { return x.pow(0); }),
      unary(
          "pow 0.5", [](At x) { return x.pow(0.5); }, "p"),
      unary("2 pow", [](At x) { return at::pow(2.0, x); }),
      unary("square", [](At x) { return x.square(); }),
      unary("neg", [](At x) { return -x; }),
      unary("sign", [](At x) { return x.sign(); }),
      unary("floor", [](At x) { return x.floor(); }),
      unary("round", [](At x) { return x.round(); }),
      unary("erf", [](At x) { return x.erf(); }),
      unary("clamp", [](At x) { return x.clamp(-0.5, 0.7); }),
      unary("clamp_min", [](At x) { return x.clamp_min(0.1); }),
      unary("nan_to_num", [](At x) { return x.nan_to_num(); }),
      unary(
          "logit", [](At x) { return at::logit(x / 4); }, "p"),
      unary("add number", [](At x) { return x + 3; }),
      unary("sub number", [](At x) { return x - 3; }),
      unary("number sub", [](At x) { return 3 - x; }),
      unary("mul number", [](At x) { return x * 3; }),
      unary("div number", [](At x) { return x / 3; }),
      unary(
          "number div", [](At x) { return 3 / x; }, "p"),
      unary("div floor", [](At x) { return x.div(0.3, "floor"); }),
      unary("div trunc", [](At x) { return x.div(0.3, "trunc"); }),
      unary("remainder", [](At x) { return x.remainder(0.7); }),
      unary("fmod", [](At x) { return x.fmod(0.7); }),
      unary(
          "floor_divide", [](At x) { return x.floor_divide(0.7); }, "v"),
      unary(
          "gt number", [](At x) { return x > 0.1; }, "v"),
      unary(
          "eq number", [](At x) { return x == 1; }, "i"),
      unary(
          "logical_not", [](At x) { return x.logical_not(); }, "b"),
      unary(
          "bitwise_not", [](At x) { return x.bitwise_not(); }, "i"),
      unary(
          "isnan", [](At x) { return x.isnan(); }, "v"),
      unary(
          "isfinite", [](At x) { return x.isfinite(); }, "v"),
      unary(
          "to float", [](At x) { return x.to(at::kFloat); }, "f"),
      unary(
          "to double", [](At x) { return x.to(at::kDouble); }, "f"),
      unary("to bfloat16 and back", [](At x) { return x.round().to(at::kBFloat16).to(at::kDouble); }),
      unary(
          "to long", [](At x) { return x.to(at::kLong); }, "v"),
      unary(
          "to bool", [](At x) { return x.to(at::kBool); }, "i"),
      unary(
          "long to double", [](At x) { return x.to(at::kDouble); }, "i"),
      unary(
          "long mul 1.5", [](At x) { return x * 1.5; }, "i"),
      unary(
          "long add 1.5", [](At x) { return x + 1.5; }, "i"),
      unary(
          "long div 2", [](At x) { return x / 2; }, "i"),
      unary("clone", [](At x) { return x.clone(); }),
      unary("contiguous", [](At x) { return x.contiguous(); }),
      unary("detach", [](At x) { return x.detach(); }),
      unary("alias", [](At x) { return at::alias(x); }),
      unary("zeros_like", [](At x) { return at::zeros_like(x); }),
      unary("ones_like", [](At x) { return at::ones_like(x); }),
      unary("full_like", [](At x) { return at::full_like(x, 2.5); }),
      unary("x times itself", [](At x) { return x * x; }),
      unary("x plus itself", [](At x) { return x + x; }),
      unary("add a 0-dim tensor", [](At x) { return x + at::scalar_tensor(2.5, at::kDouble); }),
      unary("mul by a 0-dim tensor", [](At x) { return at::scalar_tensor(2.5, at::kDouble) * x; }),
  };
}

std::vector<OperatorCase> unary_in_place_cases() {
  using W = at::Tensor&;
  return {
      unary_in_place(
          "relu_", [](W x) { x.relu_(); }, first_is_terms),
      unary_in_place(
          "exp_", [](W x) { x.exp_(); }, first_is_terms),
      unary_in_place(
          "neg_", [](W x) { x.neg_(); }, first_is_maximum),
      unary_in_place(
          "mul_ number", [](W x) { x.mul_(3); }, first_is_maximum),
      unary_in_place(
          "div_ number", [](W x) { x.div_(3); }, first_is_maximum),
      unary_in_place(
          "div_ floor", [](W x) { x.div_(0.3, "floor"); }, first_is_terms),
      unary_in_place(
          "add_ number", [](W x) { x.add_(3); }, first_is_maximum),
      unary_in_place(
          "clamp_", [](W x) { x.clamp_(-0.5, 0.5); }, first_is_terms),
      unary_in_place(
          "pow_", [](W x) { x.pow_(2); }, first_is_terms),
      unary_in_place("zero_", [](W x) { x.zero_(); }, {}),
      unary_in_place(
          "fill_", [](W x) { x.fill_(1.5); }, first_is_terms),
      unary_in_place(
          "masked_fill_", [](W x) { x.masked_fill_(x.detach() > 0.2, 1.5); }, first_is_terms),
  };
}

std::vector<OperatorCase> binary_cases() {
  return {
      binary("add", [](At x, At y) { return x + y; }),
      binary("add alpha", [](At x, At y) { return x.add(y, 2.5); }),
      binary("sub", [](At x, At y) { return x - y; }),
      binary("rsub", [](At x, At y) { return at::rsub(x, y); }),
      binary("mul", [](At x, At y) { return x * y; }),
      binary(
          "div", [](At x, At y) { return x / y; }, "gp"),
      binary(
          "div floor", [](At x, At y) { return x.div(y, "floor"); }, "gp"),
      binary(
          "pow", [](At x, At y) { return x.pow(y); }, "pg"),
      binary("maximum", [](At x, At y) { return at::maximum(x, y); }),
      binary("minimum", [](At x, At y) { return at::minimum(x, y); }),
      binary("atan2", [](At x, At y) { return at::atan2(x, y); }),
      binary("hypot", [](At x, At y) { return at::hypot(x, y); }),
      binary(
          "copysign", [](At x, At y) { return at::copysign(x, y); }, "gv"),
      binary("logaddexp", [](At x, At y) { return at::logaddexp(x, y); }),
      binary(
          "xlogy", [](At x, At y) { return at::xlogy(x, y); }, "gp"),
      binary(
          "remainder", [](At x, At y) { return at::remainder(x, y); }, "gp"),
      binary("clamp tensor", [](At x, At y) { return at::clamp(x, y); }),
      binary(
          "lt", [](At x, At y) { return x < y; }, "vv"),
      binary(
          "eq", [](At x, At y) { return x == y; }, "ii"),
      binary(
          "logical_and", [](At x, At y) { return x.logical_and(y); }, "bb"),
      binary(
          "bitwise_xor", [](At x, At y) { return x.bitwise_xor(y); }, "ib"),
      binary(
          "add long and double", [](At x, At y) { return x + y; }, "ig"),
      binary(
          "add long and long", [](At x, At y) { return x + y; }, "ii"),
      binary(
          "mul double and bool", [](At x, At y) { return x * y; }, "gb"),
      binary(
          "mul float and double", [](At x, At y) { return x * y; }, "fv"),
      binary(
          "div long by long", [](At x, At y) { return x / (y * y + 1); }, "ii"),
      binary(
          "add long and float", [](At x, At y) { return x + y; }, "if"),
      binary(
          "masked_fill", [](At x, At y) { return x.masked_fill(y, 1.5); }, "gb"),
      binary(
          "mse_loss none", [](At x, At y) { return at::mse_loss(x, y.expand_as(x), at::Reduction::None); }, "gv"),
  };
}

/// Terms of a sum or an average can be added to; of another reduction they cannot.
std::vector<OperatorCase> binary_in_place_cases() {
  using W = at::Tensor&;
  return {
      binary_in_place(
          "add_", [](W x, At y) { x.add_(y); }, first_is_maximum),
      binary_in_place(
          "sub_", [](W x, At y) { x.sub_(y, 0.5); }, first_is_maximum),
      binary_in_place(
          "mul_", [](W x, At y) { x.mul_(y); }, first_is_maximum),
      binary_in_place(
          "div_", [](W x, At y) { x.div_(y); }, first_is_maximum, "gp"),
      binary_in_place(
          "pow_", [](W x, At y) { x.pow_(y); }, first_is_terms, "pg"),
      binary_in_place(
          "copy_", [](W x, At y) { x.copy_(y); },
          [](const Placements& of) { return first_is_maximum(of) && !(of[1] == of[0]); }),
      binary_in_place(
          "masked_fill_", [](W x, At y) { x.masked_fill_(y, 0.5); }, first_is_terms, "gb"),
      binary_in_place(
          "add_ long into double", [](W x, At y) { x.add_(y); }, first_is_terms, "gi"),
      binary_in_place(
          "copy_ double into float", [](W x, At y) { x.copy_(y); }, first_is_maximum, "fv"),
      binary_in_place(
          "copy_ double into long", [](W x, At y) { x.copy_(y); }, first_is_terms, "iv"),
  };
}

OperatorCase ternary(const std::string& name, const std::function<at::Tensor(At, At, At)>& run,
                     const std::string& inputs = "ggg") {
  return {.name = name,
          .run = [run](const Tensors& in) { return Tensors{run(in[0], in[1], in[2])}; },
          .samples = kThree,
          .inputs = inputs};
}

OperatorCase ternary_in_place(const std::string& name, const std::function<void(at::Tensor&, At, At)>& run,
                              const std::string& inputs = "ggg") {
  return {.name = name,
          .run =
              [run](const Tensors& in) {
                auto written = in[0].clone();
                run(written, in[1], in[2]);
                return Tensors{written};
              },
          .samples = kThreeInPlace,
          .inputs = inputs,
          .is_refused = first_is_terms};
}

std::vector<OperatorCase> ternary_cases() {
  using W = at::Tensor&;
  return {
      ternary(
          "where", [](At x, At y, At z) { return at::where(x, y, z); }, "bgg"),
      ternary("addcmul", [](At x, At y, At z) { return at::addcmul(x, y, z, 0.5); }),
      ternary(
          "addcdiv", [](At x, At y, At z) { return at::addcdiv(x, y, z, 0.5); }, "ggp"),
      ternary("lerp", [](At x, At y, At z) { return at::lerp(x, y, z); }),
      ternary(
          "clamp", [](At x, At y, At z) { return at::clamp(x, y - 2, z); }, "ggp"),
      ternary_in_place("addcmul_", [](W x, At y, At z) { x.addcmul_(y, z, 0.5); }),
      ternary_in_place(
          "addcdiv_", [](W x, At y, At z) { x.addcdiv_(y, z, 0.5); }, "ggp"),
      ternary_in_place("lerp_", [](W x, At y, At z) { x.lerp_(y, z); }),
  };
}

/// Into a tensor that is there, with placements of its own.
std::vector<OperatorCase> out_cases() {
  const auto into = [](const std::string& name, const auto& run, bool keeps_terms, const std::string& inputs) {
    return OperatorCase{.name = name,
                        .run =
                            [run](const Tensors& in) {
                              auto out = in[2].clone();
                              run(out, in[0], in[1]);
                              return Tensors{out};
                            },
                        .samples = {{{5, 3}, {3}, {5, 3}}, {{4, 2}, {4, 2}, {4, 2}}},
                        .inputs = inputs,
                        .is_refused =
                            [keeps_terms](const Placements& of) {
                              return keeps_terms ? of[2] == Placement(Partial(ReduceOp::MAX)) : is_terms(of[2]);
                            }};
  };
  using W = at::Tensor&;
  return {
      into(
          "add.out", [](W out, At x, At y) { at::add_out(out, x, y); }, true, "vvv"),
      into(
          "maximum.out", [](W out, At x, At y) { at::maximum_out(out, x, y); }, false, "vvv"),
  };
}

/// One of every kind.
const std::vector<std::string> kThorough = {"add",  "mul",   "div",   "maximum", "add_",
                                            "mul_", "copy_", "where", "addcmul_"};

std::vector<OperatorCase> all_cases() {
  std::vector<OperatorCase> all;
  for (const auto& some :
       {unary_cases(), unary_in_place_cases(), binary_cases(), binary_in_place_cases(), ternary_cases(), out_cases()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  for (auto& each : all) {
    each.is_thorough = std::find(kThorough.begin(), kThorough.end(), each.name) != kThorough.end();
  }
  return all;
}

void run_all(const DeviceMesh& mesh) {
  Conformance conformance(mesh);
  conformance.run(all_cases());
  conformance.check();
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorPointwise, OnTwoRanks, 2) {
  run_all(init_device_mesh("cpu", {2}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorPointwise, OnThreeRanks, 3) {
  run_all(init_device_mesh("cpu", {3}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorPointwise, OnASquare, 4) {
  run_all(init_device_mesh("cpu", {2, 2}));
}

}  // namespace
}  // namespace lockstep::pointwise_cases_test
