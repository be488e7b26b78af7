// Attention and losses in one operator, with all placements of their operands, against one device.
#include "tests/support/dtensor_cases.h"

#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::attention_cases_test {
namespace {

using namespace dtensor_cases;  // NOLINT: the vocabulary of this file

/// Queries, keys and values of batch, heads, places and features, and sizes of a mask.
std::vector<Sizes> attention_sizes(const Sizes& query, int64_t keys, const std::optional<Sizes>& mask = std::nullopt) {
  auto key = query;
  key[2] = keys;
  std::vector<Sizes> sizes = {query, key, key};
  if (mask) sizes.push_back(*mask);
  return sizes;
}

OperatorCase attention(const std::string& name, const std::vector<std::vector<Sizes>>& samples,
                       const std::string& inputs, bool is_causal = false) {
  return {.name = name,
          .run =
              [is_causal](const Tensors& in) {
                std::optional<at::Tensor> mask;
                if (in.size() > 3) mask = in[3];
                return Tensors{at::scaled_dot_product_attention(in[0], in[1], in[2], mask, 0.0, is_causal)};
              },
          .samples = samples,
          .inputs = inputs,
          .is_thorough = true};
}

std::vector<OperatorCase> attention_cases() {
  return {
      attention("attention", {attention_sizes({2, 4, 3, 2}, 3), attention_sizes({3, 3, 5, 2}, 4)}, "ggg"),
      attention("causal attention", {attention_sizes({2, 4, 3, 2}, 3), attention_sizes({3, 1, 5, 2}, 5)}, "ggg", true),
      attention(
          "attention with a mask",
          {attention_sizes({2, 3, 3, 2}, 4, Sizes{3, 4}), attention_sizes({2, 2, 3, 2}, 4, Sizes{2, 1, 3, 4}),
           attention_sizes({3, 2, 2, 2}, 4, Sizes{1, 2, 2, 4}), attention_sizes({3, 3, 2, 2}, 2, Sizes{3, 3, 2, 2})},
          "gggv"),
      attention("attention with a bool mask", {attention_sizes({2, 4, 3, 2}, 4, Sizes{2, 1, 3, 4})}, "gggb"),
      attention("attention with a mask that is learned", {attention_sizes({2, 2, 3, 2}, 4, Sizes{2, 1, 3, 4})}, "gggg"),
      attention("attention without a batch", {{{4, 3, 2}, {4, 3, 2}, {4, 3, 2}}}, "ggg"),
  };
}

using At = const at::Tensor&;

OperatorCase loss(const std::string& name, const std::function<at::Tensor(At, At)>& run, const std::string& inputs) {
  return {.name = name,
          .run = [run](const Tensors& in) { return Tensors{run(in[0], in[1])}; },
          .samples = {{{4, 6}, {4, 6}}, {{5, 3}, {5, 3}}},
          .inputs = inputs};
}

std::vector<OperatorCase> loss_cases() {
  constexpr auto kMean = at::Reduction::Mean;
  constexpr auto kSum = at::Reduction::Sum;
  return {
      loss(
          "mse_loss", [](At x, At y) { return at::mse_loss(x, y); }, "gv"),
      loss(
          "mse_loss of both", [](At x, At y) { return at::mse_loss(x, y); }, "gg"),
      loss(
          "mse_loss sum", [](At x, At y) { return at::mse_loss(x, y, kSum); }, "gv"),
      loss(
          "l1_loss", [](At x, At y) { return at::l1_loss(x, y, kMean); }, "gv"),
      loss(
          "smooth_l1_loss", [](At x, At y) { return at::smooth_l1_loss(x, y, kMean, 0.5); }, "gv"),
      loss(
          "huber_loss", [](At x, At y) { return at::huber_loss(x, y, kMean, 0.5); }, "gv"),
      loss(
          "huber_loss none", [](At x, At y) { return at::huber_loss(x, y, at::Reduction::None, 0.5); }, "gv"),
      loss(
          "binary_cross_entropy", [](At x, At y) { return at::binary_cross_entropy(x.sigmoid(), y.sigmoid()); }, "gv"),
      loss(
          "binary_cross_entropy_with_logits",
          [](At x, At y) { return at::binary_cross_entropy_with_logits(x, y.sigmoid()); }, "gv"),
  };
}

void run_cases(const DeviceMesh& mesh) {
  Conformance conformance(mesh);
  conformance.run(attention_cases());
  conformance.run(loss_cases());
  conformance.check();
  EXPECT_TRUE(conformance.refused().empty());
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorAttention, OnTwoRanks, 2) {
  run_cases(init_device_mesh("cpu", {2}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorAttention, OnThreeRanks, 3) {
  run_cases(init_device_mesh("cpu", {3}));
}

// TP-18
LOCKSTEP_THREAD_TEST(DTensorAttention, OnASquare, 4) {
  run_cases(init_device_mesh("cpu", {2, 2}));
}

}  // namespace
}  // namespace lockstep::attention_cases_test
