// The operator counter: calls, bytes and floating point operations against numbers worked out by hand.
#include "lockstep/intercept/operator_counter.h"

#include <thread>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

OperatorCount counted(const std::function<void()>& work) {
  OperatorCounter counter;
  {
    const auto counting = counter.count();
    work();
  }
  return counter.total();
}

TEST(OperatorCounter, CountsCallsBytesAndFlopsOfAProduct) {
  const auto a = torch::ones({3, 5});
  const auto b = torch::ones({5, 7});
  const auto count = counted([&] { a.mm(b); });
  EXPECT_EQ(count.calls, 1);
  EXPECT_EQ(count.flops, 2 * 3 * 5 * 7);
  EXPECT_EQ(count.bytes, 4 * (3 * 5 + 5 * 7 + 3 * 7));
}

TEST(OperatorCounter, CountsInPlaceTensorsOnceAndViewsAsNone) {
  auto a = torch::ones({8});
  EXPECT_EQ(counted([&] { a.add_(1); }).bytes, 4 * 8);
  const auto view = counted([&] { a.view({2, 4}); });
  EXPECT_EQ(view.calls, 1);
  EXPECT_EQ(view.bytes, 0);
  EXPECT_EQ(counted([&] { torch::cat({a, a}); }).bytes, 4 * (16 + 16));
}

TEST(OperatorCounter, CountsWhatCompositeOperatorsConsistOf) {
  const auto x = torch::ones({2, 6, 5});
  const auto w = torch::ones({7, 5});
  const auto flops = 2 * 2 * 6 * 5 * 7;
  EXPECT_EQ(counted([&] { at::linear(x, w); }).flops, flops);
  EXPECT_EQ(counted([&] { at::linear(x, w, torch::ones({7})); }).flops, flops);
  EXPECT_EQ(counted([&] { at::matmul(x, w.t()); }).flops, flops);
  EXPECT_EQ(counted([&] { at::einsum("bij,kj->bik", {x, w}); }).flops, flops);
  EXPECT_EQ(counted([&] { at::bmm(x, torch::ones({2, 5, 3})); }).flops, 2 * 2 * 6 * 5 * 3);
}

TEST(OperatorCounter, CountsConvolutionsAndTheirBackward) {
  auto x = torch::ones({2, 3, 8, 8}, torch::requires_grad());
  auto w = torch::ones({4, 3, 3, 3}, torch::requires_grad());
  const auto forward = 2 * 2 * 8 * 8 * 4 * 3 * 9;
  EXPECT_EQ(counted([&] { at::conv2d(x, w, {}, 1, 1); }).flops, forward);
  EXPECT_EQ(counted([&] { at::conv2d(x, w, {}, 2, 1); }).flops, forward / 4);
  EXPECT_EQ(counted([&] { at::conv2d(x, w, {}, {2, 1}, {1, 1}); }).flops, forward / 2);
  EXPECT_EQ(counted([&] { at::conv2d(x, w, {}, 1, 1).sum().backward(); }).flops, 3 * forward);
  const auto only_weight = x.detach();
  EXPECT_EQ(counted([&] { at::conv2d(only_weight, w, {}, 1, 1).sum().backward(); }).flops, 2 * forward);
  // Two groups: each output sees half of the inputs.
  EXPECT_EQ(counted([&] { at::conv2d(torch::ones({2, 6, 8, 8}), w, {}, 1, 1, 1, 2); }).flops, forward);
  EXPECT_EQ(counted([&] { at::conv_transpose2d(torch::ones({2, 4, 8, 8}), w); }).flops, forward);
  const auto y = torch::ones({2, 4, 8, 8}, torch::requires_grad());
  EXPECT_EQ(counted([&] { at::conv_transpose2d(y, w, {}, 2).sum().backward(); }).flops, 3 * forward);
}

TEST(OperatorCounter, CountsAttentionAndItsBackward) {
  const auto make = [] { return torch::randn({2, 4, 16, 8}, torch::requires_grad()); };
  const auto query = make();
  const auto key = make();
  const auto value = make();
  const auto product = 2 * 2 * 4 * 16 * 16 * 8;
  EXPECT_EQ(counted([&] { at::scaled_dot_product_attention(query, key, value); }).flops, 2 * product);
  EXPECT_EQ(counted([&] { at::scaled_dot_product_attention(query, key, value).sum().backward(); }).flops, 7 * product);
}

TEST(OperatorCounter, CountsBackwardOfALinearLayer) {
  torch::nn::Linear layer(5, 7);
  const auto x = torch::ones({3, 5}, torch::requires_grad());
  const auto forward = 2 * 3 * 5 * 7;
  EXPECT_EQ(counted([&] { layer(x).sum().backward(); }).flops, 3 * forward);
}

TEST(OperatorCounter, CountsBackwardInOtherThreadsOfAutograd) {
  // Autograd gives its threads the state of the one that called backward(); so does this.
  const auto a = torch::ones({4, 4});
  const auto count = counted([&] {
    const at::ThreadLocalState state;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      a.mm(a);
    }).join();
    std::thread([&] { a.mm(a); }).join();  // somebody else's
  });
  EXPECT_EQ(count.flops, 2 * 4 * 4 * 4);
}

TEST(OperatorCounter, KeepsLabelsApart) {
  OperatorCounter counter;
  auto a = torch::ones({4, 4}, torch::requires_grad());
  at::Tensor loss;
  {
    const auto counting = counter.count("forward");
    loss = a.mm(a).sum();
  }
  a.mm(a);  // not counted
  {
    const auto counting = counter.count("backward");
    loss.backward();
  }
  EXPECT_EQ(counter.counts("forward").at("aten::mm").calls, 1);
  EXPECT_EQ(counter.counts("backward").at("aten::mm").calls, 2);
  EXPECT_EQ(counter.counts().at("aten::mm").calls, 3);
  EXPECT_EQ(counter.total("forward").flops, 128);
  EXPECT_EQ(counter.total().flops, 3 * 128);
  const auto table = counter.to_string();
  for (const auto* text : {"operator", "calls", "bytes", "flops", "aten::mm", "forward", "backward", "all", "384"}) {
    EXPECT_THAT(table, HasSubstr(text));
  }
  counter.reset();
  EXPECT_EQ(counter.total().calls, 0);
}

TEST(OperatorCounter, RefusesLabelsItDoesNotKnow) {
  OperatorCounter counter;
  testing::expect_error([&] { counter.total("forward"); }, {"'forward'", "labels are none"});
  { const auto counting = counter.count("forward"); }
  { const auto counting = counter.count("backward"); }
  EXPECT_EQ(counter.total("forward").calls, 0);
  testing::expect_error([&] { counter.total("foward"); }, {"'foward'", "'forward', 'backward'"});
  testing::expect_error([&] { counter.counts("foward"); }, {"'forward', 'backward'"});
}

TEST(OperatorCounter, ShowsLabelsAboveTheirRowsAndNothingFromBeforeAReset) {
  OperatorCounter counter;
  const auto a = torch::ones({4, 4});
  {
    const auto counting = counter.count("forward");
    a.mm(a);
  }
  const auto table = counter.to_string();
  EXPECT_LT(table.find("forward"), table.find("aten::mm"));
  counter.reset();
  EXPECT_TRUE(counter.counts().empty());
  EXPECT_TRUE(counter.counts("forward").empty());
  EXPECT_EQ(counter.to_string().find("aten::mm"), std::string::npos);
  {
    const auto counting = counter.count("forward");
    a.add(a);
  }
  EXPECT_EQ(counter.counts("forward").size(), 1);
}

TEST(OperatorCounter, ChangesNoBits) {
  torch::manual_seed(3);
  torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(0));
  const auto x = torch::randn({5, 2, 16});
  const auto plain = layer(x);
  OperatorCounter counter;
  const auto counting = counter.count();
  EXPECT_TRUE(layer(x).equal(plain));
}

}  // namespace
}  // namespace lockstep
