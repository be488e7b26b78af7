// Selective checkpointing: operators whose results are kept do not run again.
#include "lockstep/intercept/operator_scope.h"
#include "tests/support/error_text.h"

namespace lockstep::selective_test {

using error_text::error_of;

using ::testing::HasSubstr;

at::Tensor input() {
  torch::manual_seed(2);
  return at::randn({4, 4}).requires_grad_();
}

/// Counts kernels that really run.
struct KernelCounter : OperatorScope {
  KernelCounter() : OperatorScope(Sees::kKernels) {}
  void on_operator(OperatorCall& call) override {
    ++counts[call.name()];
    call.proceed();
  }
  std::map<std::string, int> counts;
};

std::map<std::string, int> kernels_of_backward(const at::Tensor& loss) {
  const auto counter = std::make_shared<KernelCounter>();
  const EnterScope counting(counter);
  loss.backward();
  return counter->counts;
}

at::Tensor chain(const at::Tensor& x) {
  return at::mm(at::sigmoid(at::mm(x, x)), x).exp();
}

TEST(SelectiveCheckpoint, DoesNotRunAgainWhatIsKept) {
  const auto x = input();
  chain(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  // Each product has two in its backward.
  EXPECT_EQ(kernels_of_backward(checkpoint(chain, x).sum())["aten::mm"], 4 + 2);
  EXPECT_TRUE(std::exchange(x.mutable_grad(), at::Tensor()).equal(wanted));
  const CheckpointOptions options{.policy = save_operators({"aten::mm"})};
  auto kernels = kernels_of_backward(checkpoint(options, chain, x).sum());
  EXPECT_EQ(kernels["aten::mm"], 4);
  EXPECT_EQ(kernels["aten::sigmoid"], 1);
  EXPECT_TRUE(std::exchange(x.mutable_grad(), at::Tensor()).equal(wanted));
}

TEST(SelectiveCheckpoint, AsksThePolicyForKernels) {
  std::vector<std::string> asked;
  const CheckpointOptions options{.policy = [&](const OperatorCall& call) {
    asked.push_back(call.name());
    EXPECT_TRUE(call.argument(0).isTensor());
    return call.name() == "aten::addmm" ? CheckpointPolicy::kPreferSave : CheckpointPolicy::kPreferRecompute;
  }};
  torch::nn::Linear linear(4, 4);
  const auto x = input();
  at::relu(linear(x)).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  checkpoint(options, [&](const at::Tensor& in) { return at::relu(linear(in)).sum(); }, x).backward();
  EXPECT_TRUE(x.grad().equal(wanted));
  EXPECT_EQ(asked, (std::vector<std::string>{"aten::addmm", "aten::relu", "aten::sum"}));  // and not again
}

TEST(SelectiveCheckpoint, OffloadsToTheHost) {
  const auto x = input();
  chain(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  const CheckpointOptions options{.policy = [](const OperatorCall&) { return CheckpointPolicy::kMustCpuOffload; }};
  checkpoint(options, chain, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(wanted));
}

TEST(SelectiveCheckpoint, MayRunBackwardTwiceIfTheGraphIsRetained) {
  const auto x = input();
  const CheckpointOptions options{.policy = save_operators({"aten::mm"})};
  const auto y = checkpoint(options, chain, x).sum();
  y.backward({}, /*retain_graph=*/true);
  const auto first = std::exchange(x.mutable_grad(), at::Tensor());
  y.backward();
  EXPECT_TRUE(x.grad().equal(first));
}

// Kept operators draw nothing when the function runs again; those behind them draw what they drew.
TEST(SelectiveCheckpoint, KeepsTheOrderOfRandomNumbers) {
  const auto x = input();
  const auto noisy = [](const at::Tensor& in) {
    return (in * at::bernoulli(at::full({4, 4}, 0.5)) * at::rand({4, 4})).exp();
  };
  torch::manual_seed(3);
  noisy(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  for (const auto* name : {"aten::bernoulli", "aten::rand"}) {
    torch::manual_seed(3);
    checkpoint({.policy = save_operators({name})}, noisy, x).sum().backward();
    EXPECT_TRUE(std::exchange(x.mutable_grad(), at::Tensor()).equal(wanted)) << name;
  }
}

// Python refuses this where it notices.
TEST(SelectiveCheckpoint, KeepsWhatTheFunctionChangesInPlaceAsItWas) {
  const auto x = input();
  torch::nn::Linear linear(4, 4);
  const CheckpointOptions all{.policy = [](const OperatorCall&) { return CheckpointPolicy::kMustSave; }};
  // Through a view, and in memory that is shared without a word: a product and its bias.
  for (const auto& f : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
           [](const at::Tensor& in) { return (in * 2).t().add_(1).exp(); },
           [](const at::Tensor& in) { return (in * 2).relu_().exp().mul(in); },
           [&](const at::Tensor& in) { return linear(in.view({2, 2, 4}).transpose(0, 1)).exp(); }}) {
    f(x).sum().backward();
    const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
    const auto y = checkpoint(all, f, x).sum();
    for (const bool retains : {true, true, false}) {
      y.backward({}, retains);
      EXPECT_TRUE(std::exchange(x.mutable_grad(), at::Tensor()).equal(wanted));
    }
  }
}

TEST(SelectiveCheckpoint, RefusesResultsThatWereChangedInPlaceLater) {
  const auto x = input();
  const auto f = [](const at::Tensor& in) { return in.tanh(); };
  for (const bool is_allowed : {false, true}) {
    const auto y = checkpoint(
        {.policy = save_operators({"aten::tanh"}), .allow_cache_entry_mutation = is_allowed},
        [&](const at::Tensor& in) { return std::tuple{in.sin() * in, f(in)}; }, x);
    {
      const at::NoGradGuard no_grad;
      std::get<1>(y).detach().mul_(2);
    }
    const auto error = error_of([&] { (std::get<0>(y).sum()).backward(); });
    EXPECT_EQ(error.find("a result of aten::tanh that the policy kept, a CPUFloatType of sizes [4, 4], has been") !=
                  std::string::npos,
              !is_allowed)
        << error;
  }
}

TEST(SelectiveCheckpoint, Nests) {
  const auto x = input();
  const auto outer = [](const at::Tensor& in) { return checkpoint(chain, checkpoint(chain, in).tanh()).sin(); };
  const auto plain = [](const at::Tensor& in) { return chain(chain(in).tanh()).sin(); };
  plain(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  checkpoint({.policy = save_operators({"aten::mm", "aten::tanh"})}, outer, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(wanted));
}

TEST(SelectiveCheckpoint, TellsOfOtherOperators) {
  const auto x = input();
  int runs = 0;
  const auto f = [&](const at::Tensor& in) { return ++runs == 1 ? in.exp().sin().sum() : in.exp().exp().sum(); };
  EXPECT_THAT(error_of([&] { checkpoint({.policy = save_operators({"aten::exp"})}, f, x).backward(); }),
              HasSubstr("aten::exp is called 2 times when a checkpointed function runs again, and was called 1 times"));
  EXPECT_THAT(error_of([] { save_operators({"aten::mmm"}); }), HasSubstr("there is no operator 'aten::mmm'"));
}

}  // namespace lockstep::selective_test
