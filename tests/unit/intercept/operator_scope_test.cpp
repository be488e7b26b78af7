// Scopes: what they are shown, in which order, and that they come and go without a trace.
#include "lockstep/intercept/operator_scope.h"

#include <ATen/ThreadLocalState.h>

#include <mutex>
#include <stdexcept>
#include <thread>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"

namespace lockstep {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

/// Notes the names of the operators it sees.
class Listener : public OperatorScope {
 public:
  explicit Listener(Sees sees = Sees::kProgram) : OperatorScope(sees) {}

  void on_operator(OperatorCall& call) override {
    {
      const std::lock_guard lock(mutex_);
      names_.push_back(call.name().substr(std::string("aten::").size()));
      threads_.push_back(std::this_thread::get_id());
    }
    call.proceed();
  }

  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    return names_;
  }
  std::vector<std::thread::id> threads() const {
    const std::lock_guard lock(mutex_);
    return threads_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
  std::vector<std::thread::id> threads_;
};

/// Does what it is given.
class Doing : public OperatorScope {
 public:
  explicit Doing(std::function<void(OperatorCall&)> what) : OperatorScope(Sees::kProgram), what_(std::move(what)) {}
  void on_operator(OperatorCall& call) override { what_(call); }

 private:
  std::function<void(OperatorCall&)> what_;
};

std::vector<std::string> names_in(const std::function<void()>& work,
                                  OperatorScope::Sees sees = OperatorScope::Sees::kProgram) {
  const auto listener = std::make_shared<Listener>(sees);
  const EnterScope entered(listener);
  work();
  return listener->names();
}

bool is_included() {
  return c10::impl::tls_is_dispatch_key_included(kInterceptKey);
}

TEST(OperatorScope, SeesWhatTheThreadCallsWhileItLives) {
  const auto a = torch::ones({2, 2});
  const auto listener = std::make_shared<Listener>();
  {
    const EnterScope entered(listener);
    a.add(a);
  }
  a.mul(a);
  EXPECT_THAT(listener->names(), ElementsAre("add"));
  EXPECT_FALSE(is_included());
}

TEST(OperatorScope, SeesFactoriesInPlaceOutVariantsListsAndOptionals) {
  auto a = torch::ones({2, 2});
  auto out = torch::empty({2, 2});
  const auto names = names_in([&] {
    torch::zeros({3});
    a.add_(1);
    at::add_out(out, a, a);
    torch::cat({a, a});
    torch::nn::functional::layer_norm(a, torch::nn::functional::LayerNormFuncOptions({2}));  // weight and bias are none
    a.index({torch::indexing::Slice(), torch::indexing::TensorIndex(a[0].gt(0))});
    at::_foreach_add_({a, out}, 1);
  });
  for (const auto* name : {"zeros", "add_", "add", "cat", "layer_norm", "index", "_foreach_add_"}) {
    EXPECT_THAT(names, Contains(name));
  }
  EXPECT_EQ(out.sum().item<double>(), 4 * 5);
}

TEST(OperatorScope, InnermostIsAskedFirst) {
  std::string order;
  const auto noting = [&](const char* name) {
    return std::make_shared<Doing>([&order, name](OperatorCall& call) {
      order += name;
      call.proceed();
    });
  };
  const auto a = torch::ones({2});
  const EnterScope outer(noting("outer "));
  const EnterScope inner(noting("inner "));
  a.neg();
  EXPECT_EQ(order, "inner outer ");
}

TEST(OperatorScope, MayChangeArgumentsAndResultsAndAnswerItself) {
  const auto a = torch::ones({2});
  {
    const EnterScope entered(std::make_shared<Doing>([](OperatorCall& call) {
      if (call.name() == "aten::mul") call.argument(1) = torch::full({2}, 5.0);
      call.proceed();
      if (call.name() == "aten::mul") call.result(0) = call.result(0).toTensor() + 1;
    }));
    EXPECT_EQ(a.mul(a).sum().item<double>(), 12);
  }
  const EnterScope entered(std::make_shared<Doing>([](OperatorCall& call) {
    if (call.name() == "aten::mul") return call.replace({torch::zeros({7})});
    call.proceed();
  }));
  EXPECT_EQ(a.mul(a).numel(), 7);
}

TEST(OperatorScope, IsNotShownWhatItCallsItself) {
  int calls = 0;
  const auto a = torch::ones({2});
  const EnterScope entered(std::make_shared<Doing>([&](OperatorCall& call) {
    ++calls;
    a.add(a).mul(a);
    call.proceed();
  }));
  a.neg();
  EXPECT_EQ(calls, 1);
}

TEST(OperatorScope, ExceptionsPassAndLeaveNoTrace) {
  const auto a = torch::ones({2, 3});
  {
    const EnterScope entered(std::make_shared<Listener>());
    EXPECT_THROW(a.mm(a), c10::Error);  // libtorch's own
    EXPECT_FALSE(c10::impl::tls_is_dispatch_key_excluded(kInterceptKey));
  }
  {
    const EnterScope entered(std::make_shared<Doing>([](OperatorCall&) { throw std::runtime_error("mine"); }));
    EXPECT_THROW(a.neg(), std::runtime_error);
    EXPECT_FALSE(c10::impl::tls_is_dispatch_key_excluded(kInterceptKey));
  }
  EXPECT_FALSE(is_included());
  EXPECT_THAT(names_in([&] { a.neg(); }), ElementsAre("neg"));
}

TEST(OperatorScope, ThatNeitherGoesOnNorAnswersIsABugWithAName) {
  const auto a = torch::ones({2});
  const EnterScope entered(std::make_shared<Doing>([](OperatorCall&) {}));
  EXPECT_THROW(
      {
        try {
          a.neg();
        } catch (const c10::Error& error) {
          EXPECT_THAT(error.what(), ::testing::HasSubstr("aten::neg: a scope neither went on nor answered"));
          throw;
        }
      },
      c10::Error);
}

TEST(OperatorScope, WorksInInferenceModeAndWithoutGradients) {
  const auto a = torch::ones({2, 2}, torch::requires_grad());
  {
    const c10::InferenceMode mode;
    EXPECT_THAT(names_in([&] { EXPECT_TRUE(a.mm(a).is_inference()); }), ElementsAre("mm"));
  }
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(names_in([&] { EXPECT_FALSE(a.mm(a).requires_grad()); }), ElementsAre("mm"));
}

TEST(OperatorScope, AutogradRecordsWhatPassesThroughIt) {
  auto a = torch::full({2, 2}, 3.0, torch::requires_grad());
  const EnterScope entered(std::make_shared<Listener>());
  a.mul(a).sum().backward();
  EXPECT_TRUE(a.grad().equal(torch::full({2, 2}, 6.0)));
}

TEST(OperatorScope, SeesViewsAsTheProgramMakesThem) {
  const auto a = torch::ones({2, 3});
  EXPECT_THAT(names_in([&] { EXPECT_TRUE(a.t().select(0, 1).is_alias_of(a)); }), ElementsAre("t", "select"));
}

TEST(OperatorScope, SeesTheProgramOrItsLeaves) {
  const auto x = torch::ones({4, 2});
  const auto w = torch::ones({3, 2});
  const auto work = [&] { at::linear(x, w); };
  EXPECT_THAT(names_in(work, OperatorScope::Sees::kProgram), ElementsAre("linear"));
  const auto leaves = names_in(work, OperatorScope::Sees::kLeaves);
  EXPECT_THAT(leaves, Not(Contains("linear")));
  EXPECT_THAT(leaves, Contains("mm"));
}

TEST(OperatorScope, OfBothKindsSeeEachItsOwn) {
  const auto x = torch::ones({4, 2});
  const auto w = torch::ones({3, 2});
  const auto program = std::make_shared<Listener>(OperatorScope::Sees::kProgram);
  const auto leaves = std::make_shared<Listener>(OperatorScope::Sees::kLeaves);
  {
    const EnterScope outer(program);
    const EnterScope inner(leaves);
    at::linear(x, w).neg();
  }
  EXPECT_THAT(program->names(), ElementsAre("linear", "neg"));
  EXPECT_THAT(leaves->names(), Contains("mm"));
}

TEST(OperatorScope, SeesBackwardOnItsOwnThread) {
  auto a = torch::ones({2, 2}, torch::requires_grad());
  const auto loss = a.mm(a).sum();
  EXPECT_THAT(names_in([&] { loss.backward(); }), Contains("mm"));
}

/// Backward passes inside of backward passes: from the 61st on autograd moves to another thread.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const auto depth = context->saved_data["depth"].toInt();
    if (depth > 0) {
      const torch::AutoGradMode with_gradients(true);
      auto x = torch::ones({2}, torch::requires_grad());
      apply(x, depth - 1).mul(3).sum().backward();
    }
    return {gradients[0].neg(), at::Tensor()};
  }
};

TEST(OperatorScope, SeesBackwardInAutogradsThreads) {
  auto a = torch::ones({2}, torch::requires_grad());
  const auto loss = Reentrant::apply(a, 100).sum();
  const auto listener = std::make_shared<Listener>();
  {
    const EnterScope entered(listener);
    loss.backward();
  }
  const auto names = listener->names();
  EXPECT_EQ(std::count(names.begin(), names.end(), "neg"), 101);
  const auto threads = listener->threads();
  EXPECT_GT((std::set<std::thread::id>(threads.begin(), threads.end()).size()), 1);
  // What autograd's threads do for others is not seen.
  const auto again = Reentrant::apply(a, 100).sum();
  again.backward();
  EXPECT_EQ(listener->names().size(), names.size());
}

TEST(OperatorScope, BelongsToItsThread) {
  const auto a = torch::ones({2});
  const auto names = names_in([&] { std::thread([&] { a.neg(); }).join(); });
  EXPECT_THAT(names, ElementsAre());
}

TEST(OperatorScope, FollowsTheThreadsStateIntoOthersUntilItEnds) {
  const auto a = torch::ones({2});
  const auto listener = std::make_shared<Listener>();
  std::optional<at::ThreadLocalState> state;
  {
    const EnterScope entered(listener);
    state.emplace();
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(*state);
      a.neg();
    }).join();
  }
  EXPECT_THAT(listener->names(), ElementsAre("neg"));
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(*state);
    a.neg();  // the scope is over
  }).join();
  EXPECT_THAT(listener->names(), ElementsAre("neg"));
}

TEST(OperatorScope, SeesNothingWhereInterceptionIsOff) {
  const auto a = torch::ones({2});
  EXPECT_THAT(names_in([&] {
                const NotIntercepted off;
                a.neg();
              }),
              ElementsAre());
}

TEST(OperatorScope, WithoutOneIsRefused) {
  EXPECT_THROW(EnterScope entered(nullptr), c10::Error);
}

/// Another library that has taken the key, in a process of its own.
TEST(InterceptorDeathTest, SaysWhoElseHasTheKey) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto take_key_then_enter = [] {
    torch::Library other(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, "torchdistx.cpp", 1);
    other.fallback(torch::CppFunction::makeFallthrough());
    try {
      const EnterScope entered(std::make_shared<Listener>());
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s\n", error.what_without_backtrace());
      std::_Exit(7);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(take_key_then_enter(), ::testing::ExitedWithCode(7), "DeferredInit.*only one.*torchdistx");
}

TEST(OperatorScope, SeesKernelsBelowAutograd) {
  const auto x = torch::ones({2, 2}).requires_grad_();
  at::Tensor y;
  EXPECT_THAT(names_in([&] { y = torch::nn::functional::linear(x, x).relu(); }, OperatorScope::Sees::kKernels),
              ElementsAre("t", "mm", "relu"));
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
  // Both levels at once.
  const auto kernels = std::make_shared<Listener>(OperatorScope::Sees::kKernels);
  const EnterScope outer(kernels);
  EXPECT_THAT(names_in([&] { at::ones({2, 2}).add_(1); }), ElementsAre("ones", "add_"));
  EXPECT_THAT(kernels->names(), ElementsAre("ones", "add_"));
}

TEST(OperatorScope, AutogradRecordsWhatAScopeAnswersForAKernel) {
  struct Answering : OperatorScope {
    Answering() : OperatorScope(Sees::kKernels) {}
    void on_operator(OperatorCall& call) override { call.replace({at::full({2}, 5.0)}); }
  };
  const auto x = torch::ones({2}).requires_grad_();
  at::Tensor y;
  {
    const EnterScope scope(std::make_shared<Answering>());
    y = x.exp();
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(at::full({2}, 5.0)));  // exp's result is its derivative
}

}  // namespace
}  // namespace lockstep
