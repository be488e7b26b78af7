// saved_tensors_hooks() and save_on_cpu(): who decides how autograd keeps what it saves.

#include "tests/support/error_text.h"

namespace lockstep::saved_tensors_hooks_test {

using error_text::error_of;

using ::testing::HasSubstr;

at::Tensor input() {
  return at::arange(4, at::kFloat).requires_grad_();
}

SavedTensorsScope counting(int& packed, int& unpacked) {
  return saved_tensors_hooks(
      [&packed](const at::Tensor& tensor) {
        ++packed;
        EXPECT_FALSE(at::GradMode::is_enabled());
        return std::any(tensor.detach());
      },
      [&unpacked](const std::any& saved) {
        ++unpacked;
        return std::any_cast<at::Tensor>(saved);
      });
}

TEST(SavedTensorsHooks, SeeWhatIsSavedAndGiveItBack) {
  const auto x = input();
  int packed = 0;
  int unpacked = 0;
  at::Tensor y;
  {
    const auto scope = counting(packed, unpacked);
    y = x.exp() * x;
  }
  const auto z = y.sin();  // outside
  EXPECT_EQ(packed, 3);
  EXPECT_EQ(unpacked, 0);
  z.sum().backward();
  EXPECT_EQ(packed, 3);
  EXPECT_EQ(unpacked, 3);
  const auto wanted = (x.exp() * x).cos() * (x.exp() * x + x.exp());
  EXPECT_TRUE(x.grad().allclose(wanted));
}

TEST(SavedTensorsHooks, TheInnermostCounts) {
  const auto x = input();
  int outer = 0;
  int inner = 0;
  int unpacked = 0;
  const auto outside = counting(outer, unpacked);
  at::Tensor y;
  {
    const auto inside = counting(inner, unpacked);
    y = x.exp();
  }
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(outer, 0);
  checkpoint([](const at::Tensor& in) { return in.exp().sin(); }, y).sum().backward();
  EXPECT_EQ(outer, 1);  // the checkpoint's input
}

TEST(SavedTensorsHooks, MayChangeWhatBackwardComputesWith) {
  const auto x = input();
  at::Tensor y;
  {
    const auto scope =
        saved_tensors_hooks([](const at::Tensor& tensor) { return std::any(tensor.to(at::kHalf)); },
                            [](const std::any& saved) { return std::any_cast<at::Tensor>(saved).to(at::kFloat); });
    y = x.exp();
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(x.exp().to(at::kHalf).to(at::kFloat)));
}

TEST(SavedTensorsHooks, LetErrorsThrough) {
  const auto x = input();
  const auto scope =
      saved_tensors_hooks([](const at::Tensor&) { return std::any(); }, [](const std::any&) { return at::Tensor(); });
  EXPECT_THAT(error_of([&] { x.exp().sum().backward(); }), HasSubstr("gave no tensor"));
  EXPECT_THAT(
      error_of([&] { const auto none = saved_tensors_hooks({}, [](const std::any&) { return at::Tensor(); }); }),
      HasSubstr("there is no pack hook"));
}

TEST(SavedTensorsHooks, AreThoseOfTheThread) {
  const auto x = input();
  int packed = 0;
  int unpacked = 0;
  const auto scope = counting(packed, unpacked);
  std::thread([&] { input().exp().sum().backward(); }).join();
  EXPECT_EQ(packed, 0);
}

TEST(SaveOnCpu, GivesTheSameBits) {
  for (const bool pin_memory : {false, true}) {
    const auto x = input();
    torch::nn::Linear linear(4, 4);
    linear(x.exp()).pow(2).sum().backward();
    const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
    at::Tensor y;
    {
      const auto scope = save_on_cpu({.pin_memory = pin_memory});
      y = linear(x.exp()).pow(2).sum();
    }
    y.backward();
    EXPECT_TRUE(x.grad().equal(wanted));
  }
}

TEST(SaveOnCpu, RefusesWhatWasChangedInPlace) {
  const auto x = at::ones({4});
  const auto w = input();
  at::Tensor y;
  {
    const auto scope = save_on_cpu();
    y = x * w;
  }
  x.add_(1);
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

}  // namespace lockstep::saved_tensors_hooks_test
