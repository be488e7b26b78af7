// Products and what belongs to them, with all placements of their operands, against one device.
#include "tests/support/dtensor_cases.h"

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::matrix_cases_test {
namespace {

using namespace dtensor_cases;  // NOLINT: the vocabulary of this file
using At = const at::Tensor&;

OperatorCase of_two(const std::string& name, const std::function<at::Tensor(At, At)>& run,
                    const std::vector<std::vector<Sizes>>& samples, bool is_thorough = true) {
  return {.name = name,
          .run = [run](const Tensors& in) { return Tensors{run(in[0], in[1])}; },
          .samples = samples,
          .inputs = "gg",
          .is_thorough = is_thorough};
}

OperatorCase of_three(const std::string& name, const std::function<at::Tensor(At, At, At)>& run,
                      const std::vector<std::vector<Sizes>>& samples, bool is_thorough = true) {
  return {.name = name,
          .run = [run](const Tensors& in) { return Tensors{run(in[0], in[1], in[2])}; },
          .samples = samples,
          .inputs = "ggg",
          .is_thorough = is_thorough};
}

std::vector<OperatorCase> product_cases() {
  return {
      of_two("mm", [](At x, At y) { return x.mm(y); }, {{{4, 6}, {6, 2}}, {{5, 3}, {3, 7}}}),
      of_two("bmm", [](At x, At y) { return x.bmm(y); }, {{{2, 4, 6}, {2, 6, 4}}, {{3, 5, 2}, {3, 2, 3}}}),
      of_two("mv", [](At x, At y) { return x.mv(y); }, {{{4, 6}, {6}}, {{5, 3}, {3}}}),
      of_two("dot", [](At x, At y) { return x.dot(y); }, {{{6}, {6}}, {{5}, {5}}}),
      of_two(
          "outer", [](At x, At y) { return at::outer(x, y); }, {{{4}, {6}}, {{5}, {3}}}, false),
      of_two("mm of a transposed one", [](At x, At y) { return x.mm(y.t()); }, {{{5, 3}, {4, 3}}}),
      of_two("mm with itself", [](At x, At y) { return x.mm(x.t()).mm(y); }, {{{5, 3}, {5, 2}}}),
      of_three("addmm", [](At x, At y, At z) { return at::addmm(x, y, z); },
               {{{4, 2}, {4, 6}, {6, 2}}, {{7}, {5, 3}, {3, 7}}, {{5, 1}, {5, 3}, {3, 4}}}),
      of_three("addmm scaled", [](At x, At y, At z) { return at::addmm(x, y, z, 0.5, 2.0); },
               {{{2}, {4, 6}, {6, 2}}, {{5, 7}, {5, 3}, {3, 7}}}),
      of_three("baddbmm", [](At x, At y, At z) { return at::baddbmm(x, y, z, 0.5, 2.0); },
               {{{2, 4, 4}, {2, 4, 6}, {2, 6, 4}}, {{3, 1, 3}, {3, 5, 2}, {3, 2, 3}}}),
      of_three("addmv", [](At x, At y, At z) { return at::addmv(x, y, z, 0.5, 2.0); },
               {{{4}, {4, 6}, {6}}, {{5}, {5, 3}, {3}}}),
      of_three(
          "addbmm", [](At x, At y, At z) { return at::addbmm(x, y, z); }, {{{4, 2}, {3, 4, 6}, {3, 6, 2}}}, false),
  };
}

std::vector<OperatorCase> linear_cases() {
  return {
      of_two("linear 1-D", [](At x, At w) { return at::linear(x, w); }, {{{6}, {4, 6}}, {{3}, {5, 3}}}),
      of_two("linear 2-D", [](At x, At w) { return at::linear(x, w); }, {{{4, 6}, {2, 6}}, {{5, 3}, {7, 3}}}),
      of_two("linear 3-D", [](At x, At w) { return at::linear(x, w); }, {{{2, 4, 6}, {4, 6}}, {{3, 5, 2}, {3, 2}}}),
      of_two("linear 4-D", [](At x, At w) { return at::linear(x, w); },
             {{{2, 2, 4, 2}, {4, 2}}, {{3, 1, 2, 3}, {5, 3}}}),
      of_three("linear 1-D with bias", [](At x, At w, At b) { return at::linear(x, w, b); }, {{{3}, {5, 3}, {5}}}),
      of_three("linear 2-D with bias", [](At x, At w, At b) { return at::linear(x, w, b); },
               {{{4, 6}, {2, 6}, {2}}, {{5, 3}, {7, 3}, {7}}}),
      of_three("linear 3-D with bias", [](At x, At w, At b) { return at::linear(x, w, b); },
               {{{2, 4, 6}, {4, 6}, {4}}, {{3, 5, 2}, {3, 2}, {3}}}),
      of_three("linear 4-D with bias", [](At x, At w, At b) { return at::linear(x, w, b); },
               {{{3, 1, 2, 3}, {5, 3}, {5}}}),
  };
}

std::vector<OperatorCase> matmul_cases() {
  const auto matmul = [](At x, At y) { return at::matmul(x, y); };
  return {
      of_two("matmul 1-D 1-D", matmul, {{{5}, {5}}}, false),
      of_two("matmul 1-D 2-D", matmul, {{{3}, {3, 5}}}),
      of_two("matmul 2-D 1-D", matmul, {{{5, 3}, {3}}}),
      of_two("matmul 3-D 1-D", matmul, {{{2, 5, 3}, {3}}}),
      of_two("matmul 1-D 3-D", matmul, {{{3}, {2, 3, 5}}}),
      of_two("matmul 3-D 2-D", matmul, {{{2, 4, 6}, {6, 4}}, {{3, 5, 2}, {2, 3}}}),
      of_two("matmul 2-D 3-D", matmul, {{{4, 6}, {2, 6, 4}}, {{5, 2}, {3, 2, 3}}}),
      of_two("matmul 3-D 3-D", matmul, {{{2, 4, 6}, {2, 6, 4}}, {{1, 5, 2}, {3, 2, 3}}}),
      of_two("matmul 4-D 4-D", matmul, {{{2, 2, 4, 2}, {2, 2, 2, 4}}, {{2, 1, 3, 2}, {1, 3, 2, 5}}}),
      of_two("matmul 4-D 2-D", matmul, {{{2, 3, 1, 3}, {3, 5}}}),
  };
}

void run_cases(const DeviceMesh& mesh) {
  Conformance conformance(mesh);
  for (const auto& cases : {product_cases(), linear_cases(), matmul_cases()}) conformance.run(cases);
  conformance.check();
  EXPECT_TRUE(conformance.refused().empty());
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorMatrix, OnTwoRanks, 2) {
  run_cases(init_device_mesh("cpu", {2}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorMatrix, OnThreeRanks, 3) {
  run_cases(init_device_mesh("cpu", {3}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorMatrix, OnASquare, 4) {
  run_cases(init_device_mesh("cpu", {2, 2}));
}

}  // namespace
}  // namespace lockstep::matrix_cases_test
