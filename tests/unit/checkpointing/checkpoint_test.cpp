// checkpoint(): the same bits as without it, one more run of the function, and errors where Python's would be wrong.
#include <ATen/autocast_mode.h>

#include <stdexcept>
#include <thread>

#include "tests/support/error_text.h"

namespace lockstep::checkpoint_test {

using error_text::error_of;

using ::testing::HasSubstr;
using ::testing::Not;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width, double dropout = 0.0)
      : first(register_module("first", torch::nn::Linear(width, 2 * width))),
        second(register_module("second", torch::nn::Linear(2 * width, width))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}

  at::Tensor forward(const at::Tensor& x, double scale = 1.0) {
    ++runs;
    return x + drop(second(at::gelu(first(x)))) * scale;
  }

  torch::nn::Linear first, second;
  torch::nn::Dropout drop;
  int runs = 0;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(1.0)})
};
TORCH_MODULE(Block);

Block make_block(double dropout = 0.0) {
  torch::manual_seed(1);
  return Block(8, dropout);
}

at::Tensor make_input(bool requires_grad = true) {
  torch::manual_seed(2);
  return at::randn({3, 8}).requires_grad_(requires_grad);
}

/// Gradients of the block's parameters and of `x`, and cleared.
std::vector<at::Tensor> take_gradients(const torch::nn::Module& module, const at::Tensor& x) {
  std::vector<at::Tensor> gradients;
  for (auto tensor : module.parameters()) {
    gradients.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
  }
  gradients.push_back(std::exchange(x.mutable_grad(), at::Tensor()));
  return gradients;
}

void expect_same(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  ASSERT_EQ(some.size(), others.size());
  for (std::size_t i = 0; i < some.size(); ++i) {
    ASSERT_EQ(some[i].defined(), others[i].defined()) << i;
    if (!some[i].defined()) continue;
    EXPECT_TRUE(some[i].equal(others[i])) << i;
  }
}

/// Counts saved tensors that autograd keeps alive: those that are still there when forward is over.
class SavedBytes {
 public:
  SavedBytes()
      : scope_(saved_tensors_hooks(
            [this](const at::Tensor& tensor) {
              bytes += static_cast<int64_t>(tensor.nbytes());
              return std::any(tensor.detach());
            },
            [](const std::any& packed) { return std::any_cast<at::Tensor>(packed); })) {}
  int64_t bytes = 0;

 private:
  SavedTensorsScope scope_;
};

// FSDP-84
TEST(Checkpoint, GivesTheBitsOfTheFunctionWithDropout) {
  auto block = make_block(0.5);
  const auto x = make_input();
  torch::manual_seed(3);
  const auto plain = block(x);
  plain.pow(2).sum().backward();
  const auto wanted = take_gradients(*block, x);
  const auto next = at::rand({4});
  block->runs = 0;
  torch::manual_seed(3);
  const auto y = checkpoint(block, x);
  at::rand({100});  // backward does not depend on where the generator is
  y.pow(2).sum().backward();
  EXPECT_TRUE(y.equal(plain));
  expect_same(take_gradients(*block, x), wanted);
  EXPECT_EQ(block->runs, 2);
  // And the generator does not depend on backward.
  torch::manual_seed(3);
  checkpoint(block, x).sum().backward();
  EXPECT_TRUE(at::rand({4}).equal(next));
}

TEST(Checkpoint, DrawsOtherNumbersWithoutPreservedGenerators) {
  auto block = make_block(0.5);
  const auto x = make_input();
  torch::manual_seed(3);
  block(x).sum().backward();
  const auto wanted = take_gradients(*block, x);
  torch::manual_seed(3);
  checkpoint({.preserve_rng_state = false}, block, x).sum().backward();
  EXPECT_FALSE(take_gradients(*block, x)[0].equal(wanted[0]));
}

TEST(Checkpoint, RestoresGeneratorsOfTheProgram) {
  auto generator = at::detail::createCPUGenerator(7);
  const auto x = make_input();
  const auto noisy = [&](const at::Tensor& in) { return (in * at::rand({3, 8}, generator)).pow(2); };
  noisy(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  generator.set_current_seed(7);
  checkpoint({.generators = {generator}}, noisy, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(wanted));
}

// FSDP-84
TEST(Checkpoint, KeepsNothingButItsArguments) {
  auto block = make_block();
  const auto x = make_input();
  SavedBytes outside;
  const auto y = checkpoint(block, x);
  EXPECT_EQ(outside.bytes, static_cast<int64_t>(x.nbytes()));
}

TEST(Checkpoint, RunsOnceMorePerBackwardAndAgainForAnother) {
  auto block = make_block();
  const auto x = make_input();
  const auto y = checkpoint(block, x).pow(2).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(block->runs, 2);
  const auto first = take_gradients(*block, x);
  y.backward();
  EXPECT_EQ(block->runs, 3);
  expect_same(take_gradients(*block, x), first);
  EXPECT_THAT(error_of([&] { y.backward(); }), HasSubstr("second time"));
}

TEST(Checkpoint, SupportsDoubleBackward) {
  const auto f = [](const at::Tensor& in) { return in.sin() * in.exp(); };
  const auto run = [&](bool is_checkpointed) {
    const auto x = make_input();
    const auto y = is_checkpointed ? checkpoint(f, x) : f(x);
    const auto gradient = torch::autograd::grad({y.sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    gradient.pow(2).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

TEST(Checkpoint, SupportsGradAndPartsOfTheGraph) {
  auto block = make_block();
  const auto x = make_input();
  const auto wanted = torch::autograd::grad({block(x).pow(2).sum()}, {block->second->weight});
  const auto got = torch::autograd::grad({checkpoint(block, x).pow(2).sum()}, {block->second->weight});
  EXPECT_TRUE(got[0].equal(wanted[0]));
}

TEST(Checkpoint, StopsAsSoonAsAllIsThere) {
  int begun = 0;
  int ended = 0;
  const auto f = [&](const at::Tensor& in) {
    ++begun;
    auto out = in.exp() + 1;  // saves the result of exp
    out = out + 2;            // saves nothing
    ++ended;
    return out;
  };
  const auto x = make_input();
  checkpoint(f, x).sum().backward();
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);
  checkpoint({.early_stop = false}, f, x).sum().backward();
  EXPECT_EQ(ended, 3);
  const auto y = [&] {
    const auto scope = set_checkpoint_early_stop(false);
    return checkpoint(f, x);
  }();
  y.sum().backward();
  EXPECT_EQ(ended, 5);
}

TEST(Checkpoint, StopsThroughCodeThatCatchesExceptions) {
  const auto f = [](const at::Tensor& in) {
    at::Tensor out;
    try {
      out = in.exp();
    } catch (const std::exception&) {
      ADD_FAILURE() << "an early stop is no std::exception";
    }
    return out + 1;
  };
  const auto x = make_input();
  checkpoint(f, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(x.exp()));
}

// Rule by rule as in Python: inner checkpoints run again inside of outer ones, whatever the depth.
TEST(Checkpoint, Nests) {
  auto one = make_block(0.3);
  auto two = make_block(0.3);
  const auto x = make_input();
  const auto plain = [&](const at::Tensor& in) { return two(one(in.tanh())).tanh(); };
  torch::manual_seed(3);
  plain(x).pow(2).sum().backward();
  auto wanted = take_gradients(*one, x);
  const auto wanted_two = take_gradients(*two, x);
  one->runs = two->runs = 0;
  for (const bool early_stop : {true, false}) {
    const CheckpointOptions options{.early_stop = early_stop};
    const auto nested = [&](const at::Tensor& in) {
      const auto inner = [&](const at::Tensor& h) { return checkpoint(options, two, checkpoint(options, one, h)); };
      return checkpoint(options, inner, in.tanh()).tanh();
    };
    torch::manual_seed(3);
    checkpoint(options, nested, x).pow(2).sum().backward();
    expect_same(take_gradients(*one, x), wanted);
    EXPECT_EQ(take_gradients(*two, x)[0].equal(wanted_two[0]), true);
  }
}

TEST(Checkpoint, SupportsBackwardInsideOfTheFunction) {
  const auto run = [&](bool is_checkpointed, bool early_stop, bool retains) {
    const auto x = make_input();
    const auto f = [&](const at::Tensor& in) {
      const auto y = in.sin().cos();
      const auto inner = torch::autograd::grad({y.sum()}, {in}, {}, retains)[0];
      return retains ? y * inner : in.cos() * inner;
    };
    (is_checkpointed ? checkpoint({.early_stop = early_stop}, f, x) : f(x)).sum().backward();
    return x.grad();
  };
  for (const bool retains : {true, false}) {
    const auto wanted = run(false, false, retains);
    EXPECT_TRUE(run(true, true, retains).equal(wanted)) << retains;
    EXPECT_TRUE(run(true, false, retains).equal(wanted)) << retains;
  }
}

TEST(Checkpoint, SupportsGraphsThatAreBuiltInsideOfTheFunction) {
  const auto f = [](const at::Tensor& in) {
    const auto y = in.sin().exp();
    return torch::autograd::grad({y.sum()}, {in}, {}, std::nullopt, /*create_graph=*/true)[0].pow(2);
  };
  const auto x = make_input();
  f(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  for (const bool early_stop : {true, false}) {
    checkpoint({.early_stop = early_stop}, f, x).sum().backward();
    EXPECT_TRUE(std::exchange(x.mutable_grad(), at::Tensor()).equal(wanted));
  }
}

// A node may ask for what it saved more than once.
struct AsksTwice : torch::autograd::Function<AsksTwice> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * (ctx->get_saved_variables()[0] + ctx->get_saved_variables()[0])};
  }
};

TEST(Checkpoint, RunsAgainForATensorThatIsAskedForTwice) {
  const auto x = make_input();
  int runs = 0;
  const auto f = [&](const at::Tensor& in) {
    ++runs;
    return AsksTwice::apply(in.exp()).sin();
  };
  f(x).sum().backward();
  const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
  runs = 0;
  checkpoint(f, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(wanted));
  EXPECT_EQ(runs, 3);
}

TEST(Checkpoint, TakesAndReturnsAnything) {
  using Pair = std::tuple<at::Tensor, std::vector<at::Tensor>>;
  const auto f = [](const std::vector<at::Tensor>& tensors, at::Tensor mask, const std::string& kind, double scale,
                    std::optional<at::Tensor> bias) -> Pair {
    EXPECT_EQ(kind, "sum");
    EXPECT_FALSE(mask.defined());
    const auto sum = (tensors[0] * tensors[1]).exp() * scale;
    return {bias ? sum + *bias : sum, {sum.sin(), tensors[0]}};
  };
  const auto a = make_input();
  const auto b = make_input();
  const auto run = [&](bool is_checkpointed) {
    const auto [out, rest] = is_checkpointed
                                 ? checkpoint(f, std::vector{a, b}, at::Tensor(), "sum", 0.5, std::optional(b))
                                 : f({a, b}, {}, "sum", 0.5, b);
    EXPECT_EQ(rest[1].is_same(a), true);  // an output that is an input
    (out.sum() + rest[0].sum() + rest[1].pow(2).sum()).backward();
    return std::vector{std::exchange(a.mutable_grad(), at::Tensor()), std::exchange(b.mutable_grad(), at::Tensor())};
  };
  expect_same(run(true), run(false));
}

TEST(Checkpoint, TakesFunctionsThatReturnNothing) {
  const auto x = make_input();
  at::Tensor out;
  checkpoint([&](const at::Tensor& in) { out = in.exp(); }, x);
  const auto first = out;
  first.sum().backward();
  EXPECT_TRUE(x.grad().equal(x.exp()));
}

TEST(Checkpoint, NeedsNoGradientsOfItsInputs) {
  auto block = make_block();
  block->second->weight.set_requires_grad(false);  // frozen
  const auto x = make_input(false);
  block(x).pow(2).sum().backward();
  const auto wanted = take_gradients(*block, x);
  checkpoint(block, x).pow(2).sum().backward();
  expect_same(take_gradients(*block, x), wanted);
}

TEST(Checkpoint, JustCallsTheFunctionWithoutGradients) {
  auto block = make_block();
  const auto x = make_input();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(block, x).requires_grad());
  EXPECT_EQ(block->runs, 1);
}

TEST(Checkpoint, IsNotRunAgainIfNobodyUsesItsOutput) {
  auto block = make_block();
  const auto x = make_input();
  {
    const auto unused = checkpoint(block, x);
    (x * 2).sum().backward();
  }
  EXPECT_EQ(block->runs, 1);
}

TEST(Checkpoint, RefusesAnInputThatWasChangedInPlace) {
  auto block = make_block();
  const auto x = make_input(false);
  const auto y = checkpoint(block, x);
  x.add_(1);
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

// Python computes with the new values, without a word.
TEST(Checkpoint, RefusesAParameterThatWasChangedInPlace) {
  auto block = make_block();
  const auto x = make_input();
  const auto y = checkpoint(block, x);
  {
    const at::NoGradGuard no_grad;
    block->second->weight.mul_(2);
  }
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Checkpoint, RefusesWhatAutogradRefusesInsideOfTheFunction) {
  const auto x = make_input();
  const auto f = [](const at::Tensor& in) {
    auto out = in.exp();
    out.add_(1);  // backward needs what exp gave
    return out * 2;
  };
  EXPECT_THAT(error_of([&] { f(x).sum().backward(); }), HasSubstr("modified by an inplace operation"));
  EXPECT_THAT(error_of([&] { checkpoint(f, x).sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Checkpoint, HandlesViewsAndChangesInPlace) {
  const auto run = [&](bool is_checkpointed) {
    const auto x = make_input();
    const auto f = [](const at::Tensor& in) {
      auto out = in * 2;
      out.narrow(0, 0, 1).mul_(in.narrow(0, 1, 1));
      return out.view({-1}).tanh_();
    };
    (is_checkpointed ? checkpoint(f, x) : f(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(run(true).equal(run(false)));
}

// FSDP-84
TEST(Checkpoint, NamesTensorsThatAreOthersThanTheFirstTime) {
  int64_t runs = 0;
  const auto x = make_input();
  const auto other_sizes = [&](const at::Tensor& in) {
    const auto rows = ++runs;
    return (in.narrow(0, 0, 1).expand({rows, 8}) * at::ones({rows, 8})).exp().sum();
  };
  auto error = error_of([&] { checkpoint({.name = "Attention"}, other_sizes, x).backward(); });
  EXPECT_THAT(error, HasSubstr("a checkpointed Attention that runs again"));
  EXPECT_THAT(error, HasSubstr("saved Float[1, 8] on cpu, now Float[2, 8] on cpu: tensor 1 of "));
  EXPECT_THAT(error, Not(HasSubstr("Operators of forward")));
  runs = 0;
  error = error_of([&] { checkpoint({.debug = true}, other_sizes, x).backward(); });
  EXPECT_THAT(error, HasSubstr("of aten::"));
  EXPECT_THAT(error, HasSubstr("Operators of forward: aten::"));
  EXPECT_THAT(error, HasSubstr("Operators when it ran again: aten::"));
  runs = 0;
  error = error_of([&] { checkpoint({.determinism_check = DeterminismCheck::kNone}, other_sizes, x).backward(); });
  EXPECT_THAT(error, Not(HasSubstr("a checkpointed")));  // whatever backward makes of it

  bool is_first = true;
  const auto other_dtype = [&](const at::Tensor& in) {
    return in.to(std::exchange(is_first, false) ? at::kFloat : at::kDouble).exp().sum();
  };
  error = error_of([&] { checkpoint(other_dtype, x).backward(); });
  EXPECT_THAT(error, HasSubstr("saved Float[3, 8] on cpu, now Double[3, 8] on cpu"));
}

TEST(Checkpoint, TellsOfMoreOrFewerTensors) {
  const auto x = make_input();
  int runs = 0;
  const auto fewer = [&](const at::Tensor& in) { return ++runs == 1 ? in.exp().exp().sum() : in.exp().sum(); };
  EXPECT_THAT(error_of([&] { checkpoint(fewer, x).backward(); }),
              HasSubstr("1 tensors are saved for backward, and 2 the first time"));
  const auto more = [&](const at::Tensor& in) { return ++runs == 1 ? in.exp().sum() : in.exp().exp().sum(); };
  runs = 0;
  EXPECT_THAT(error_of([&] { checkpoint({.early_stop = false}, more, x).backward(); }),
              HasSubstr("more tensors are saved for backward than the 1 of the first time"));
}

TEST(Checkpoint, LetsErrorsOfEitherRunThroughAndCanBeTriedAgain) {
  const auto x = make_input();
  bool is_broken = true;
  const auto f = [&](const at::Tensor& in) {
    const auto out = in.exp();
    if (is_broken) throw std::runtime_error("out of luck");
    return (out * 2).exp();
  };
  EXPECT_EQ(error_of([&] { checkpoint(f, x); }), "out of luck");
  // No scope is left: what is saved now is kept.
  x.sin().sum().backward();
  x.mutable_grad().reset();
  is_broken = false;
  const auto y = checkpoint(f, x);
  is_broken = true;
  torch::manual_seed(5);
  const auto wanted = at::rand({3});
  torch::manual_seed(5);
  EXPECT_EQ(error_of([&] { y.sum().backward({}, /*retain_graph=*/true); }), "out of luck");
  EXPECT_TRUE(at::rand({3}).equal(wanted));
  EXPECT_TRUE(at::GradMode::is_enabled());
  is_broken = false;
  y.sum().backward();
  EXPECT_TRUE(x.grad().allclose((x.exp() * 2).exp() * 2 * x.exp()));
}

TEST(Checkpoint, RunsAgainInTheAutocastOfTheForward) {
  auto block = make_block();
  const auto x = make_input();
  const auto with_autocast = [&](bool is_checkpointed) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto y = is_checkpointed ? checkpoint(block, x) : block(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    y.pow(2).sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return take_gradients(*block, x);
  };
  expect_same(with_autocast(true), with_autocast(false));
  EXPECT_EQ(block(x).scalar_type(), at::kFloat);
}

TEST(Checkpoint, PutsContextsAroundBothRuns) {
  std::vector<std::string> told;
  const auto context = [&](bool is_recompute) {
    told.push_back(is_recompute ? "again" : "first");
    return std::shared_ptr<void>(nullptr, [&](void*) { told.emplace_back("end"); });
  };
  const auto x = make_input();
  checkpoint({.context_fn = context}, [](const at::Tensor& in) { return in.exp(); }, x).sum().backward();
  EXPECT_EQ(told, (std::vector<std::string>{"first", "end", "again", "end"}));
}

TEST(Checkpoint, IsThreadsOwnBusiness) {
  std::vector<std::thread> threads;
  std::atomic<int> equal = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      auto f = [](const at::Tensor& in) { return (in.exp() * in).sin(); };
      for (int step = 0; step < 20; ++step) {
        const auto x = at::full({4, 4}, 0.1 * i + 0.01 * step).requires_grad_();
        f(x).sum().backward();
        const auto wanted = std::exchange(x.mutable_grad(), at::Tensor());
        auto y = (i % 2 == 0) ? checkpoint(f, x) : f(x);
        y.sum().backward();
        equal += x.grad().equal(wanted) ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, 80);
}

// What a backward did not fetch goes when it is over, though the graph stays.
TEST(Checkpoint, KeepsNothingBehindABackwardThatRetainsItsGraph) {
  const auto x = make_input();
  c10::weak_intrusive_ptr<c10::StorageImpl> last(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto f = [&](const at::Tensor& in) {
    auto one = in.exp();
    auto other = in.cos();
    last = c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(other.storage().unsafeGetStorageImpl()));
    return std::tuple{one * one, other * other};
  };
  const auto [one, other] = checkpoint(f, x);
  one.sum().backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(last.expired());
  other.sum().backward();
}

// Neither a graph that is dropped nor one that is run builds up the stack.
TEST(Checkpoint, ChainsMayBeLong) {
  for (const bool runs_backward : {false, true}) {
    const auto x = make_input();
    auto y = x;
    for (int i = 0; i < 20'000; ++i) {
      y = checkpoint({.preserve_rng_state = false}, [](const at::Tensor& in) { return in.sin(); }, y);
    }
    if (runs_backward) y.sum().backward();
    EXPECT_EQ(x.grad().defined(), runs_backward);
  }
}

TEST(CheckpointSequential, RunsAllButTheLastSegmentAgain) {
  torch::nn::Sequential layers;
  for (int i = 0; i < 5; ++i) layers->push_back(make_block(0.2));
  const auto x = make_input();
  torch::manual_seed(4);
  layers->forward(x).pow(2).sum().backward();
  const auto wanted = take_gradients(*layers, x);
  for (const int segments : {1, 2, 3, 5}) {
    for (auto& layer : *layers) layer.get<BlockImpl>().runs = 0;
    torch::manual_seed(4);
    checkpoint_sequential(layers, segments, x).pow(2).sum().backward();
    expect_same(take_gradients(*layers, x), wanted);
    int runs = 0;
    for (auto& layer : *layers) runs += layer.get<BlockImpl>().runs;
    EXPECT_EQ(runs, 5 + 5 / segments * (segments - 1)) << segments;
  }
  EXPECT_THAT(error_of([&] { checkpoint_sequential(layers, 6, x); }), HasSubstr("6 segments of 5 layers"));
  const std::vector<std::function<at::Tensor(at::Tensor)>> functions{[](const at::Tensor& in) { return in.exp(); },
                                                                     [](const at::Tensor& in) { return in.sin(); }};
  EXPECT_TRUE(checkpoint_sequential(functions, 2, x).equal(x.exp().sin()));
}

}  // namespace lockstep::checkpoint_test
