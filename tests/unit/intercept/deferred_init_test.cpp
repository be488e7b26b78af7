// Deferred init beside an ordinary build from the same seed: no memory before, the same bits after.
#include "lockstep/intercept/deferred_init.h"

#include <fstream>
#include <thread>

#include "lockstep/intercept/operator_counter.h"
#include "lockstep/testing/memory_probe.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ModulePtr = std::shared_ptr<torch::nn::Module>;
using Build = std::function<ModulePtr()>;

constexpr int kSeed = 11;

struct Ordinary {
  ModulePtr module;
  double next_number;  // what the default generator gives after the build
};

Ordinary build_ordinary(const Build& build) {
  torch::manual_seed(kSeed);
  auto module = build();
  return {module, torch::rand({}).item<double>()};
}

ModulePtr build_deferred(const Build& build) {
  torch::manual_seed(kSeed);
  return deferred_init(build);
}

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  auto tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

void expect_same(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto ours = actual.named_parameters();
  const auto theirs = expected.named_parameters();
  ASSERT_EQ(ours.keys(), theirs.keys());
  for (const auto& item : ours) EXPECT_EQ(item.value().requires_grad(), theirs[item.key()].requires_grad());
  const auto a = tensors_of(actual);
  const auto b = tensors_of(expected);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].device(), b[i].device());
    EXPECT_EQ(a[i].strides(), b[i].strides());
    EXPECT_EQ(a[i].scalar_type(), b[i].scalar_type());
    EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i << " of sizes " << a[i].sizes();
  }
}

void expect_deferred(const torch::nn::Module& module) {
  for (const auto& tensor : tensors_of(module)) {
    EXPECT_TRUE(is_deferred(tensor));
    EXPECT_TRUE(tensor.is_meta());
  }
}

/// In whole; module by module in order; and the last first. All with the bits of an ordinary build, and the default
/// generator where that leaves it.
void check(const Build& build) {
  const auto ordinary = build_ordinary(build);
  {
    const auto module = build_deferred(build);
    expect_deferred(*module);
    materialize_module(*module);
    EXPECT_EQ(torch::rand({}).item<double>(), ordinary.next_number);
    expect_same(*module, *ordinary.module);
  }
  for (const bool backwards : {false, true}) {
    const auto module = build_deferred(build);
    auto parts = module->modules();
    if (backwards) std::reverse(parts.begin(), parts.end());
    for (const auto& part : parts) materialize_module(*part, {.recurse = false});
    expect_same(*module, *ordinary.module);
    EXPECT_EQ(torch::rand({}).item<double>(), ordinary.next_number);
  }
}

template <class Holder, class... Options>
Build making(Options... options) {
  return [=] { return Holder(options...).ptr(); };
}

// FSDP-22
TEST(DeferredInit, GivesTheBitsOfAnOrdinaryBuildForLibtorchsModules) {
  using namespace torch::nn;
  check(making<Linear>(7, 5));
  check(making<Linear>(LinearOptions(7, 5).bias(false)));
  check(making<Conv2d>(Conv2dOptions(3, 4, 3)));
  check(making<ConvTranspose1d>(ConvTranspose1dOptions(3, 4, 3)));
  check(making<Embedding>(EmbeddingOptions(10, 4).padding_idx(2)));
  check(making<EmbeddingBag>(EmbeddingBagOptions(10, 4)));
  check(making<BatchNorm2d>(6));
  check(making<GroupNorm>(GroupNormOptions(2, 6)));
  check(making<LSTM>(LSTMOptions(6, 8).num_layers(2).bidirectional(true)));
  check(making<GRU>(GRUOptions(6, 8)));
  check(making<Bilinear>(BilinearOptions(3, 4, 5)));
  check(making<PReLU>(PReLUOptions().num_parameters(3)));
  check(making<MultiheadAttention>(MultiheadAttentionOptions(8, 2)));
  check(making<TransformerEncoderLayer>(TransformerEncoderLayerOptions(8, 2).dim_feedforward(16)));
  check(making<Transformer>(TransformerOptions(8, 2, 2, 2).dim_feedforward(16)));
  check([] { return Sequential(Linear(4, 8), ReLU(), BatchNorm1d(8), Dropout(0.5), Linear(8, 2)).ptr(); });
}

struct Initialised : torch::nn::Module {
  Initialised() {
    namespace init = torch::nn::init;
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", torch::nn::Linear(6, 6));
    twice = register_parameter("twice", torch::randn({5, 5}));
    scale = register_parameter("scale", torch::ones({3}) * 2);
    mask = register_buffer("mask", torch::tril(torch::ones({4, 4})));
    order = register_buffer("order", torch::randperm(9));
    steps = register_buffer("steps", torch::arange(0, 5, torch::kLong));
    table = register_buffer("table", torch::tensor({{1.0, 2.0}, {3.0, 4.0}}));
    count = register_buffer("count", torch::tensor(3, torch::kLong));
    const torch::NoGradGuard no_grad;
    torch::rand({100});  // thrown away, but drawn
    init::normal_(twice, 0.0, 0.02);
    twice.mul_(0.5).add_(torch::rand({5, 1}));
    init::orthogonal_(first->weight);
    second->weight.copy_(first->weight.t());
    second->bias.select(0, 2).fill_(7);
    second->bias.narrow(0, 3, 2).uniform_(-1, 1);
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  at::Tensor twice, scale, mask, order, steps, table, count;
};

// FSDP-22
TEST(DeferredInit, GivesTheBitsOfAnOrdinaryBuildForAUsersModule) {
  check([] { return std::make_shared<Initialised>(); });
}

struct Tied : torch::nn::Module {
  Tied() {
    embedding = register_module("embedding", torch::nn::Embedding(12, 6));
    head = register_module("head", torch::nn::Linear(6, 12));
    head->weight = head->register_parameter("tied", embedding->weight);
    rows = register_buffer("rows", embedding->weight.detach().narrow(0, 2, 3));
    columns = embedding->weight.data().t();  // registered nowhere
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor rows;
  at::Tensor columns;
};

// FSDP-22
TEST(DeferredInit, KeepsTiedParametersAndViewsTogether) {
  check([] { return std::make_shared<Tied>(); });
  const auto ordinary = build_ordinary([] { return std::make_shared<Tied>(); });
  const auto module = std::dynamic_pointer_cast<Tied>(build_deferred([] { return std::make_shared<Tied>(); }));
  materialize_module(*module->head);
  EXPECT_FALSE(is_deferred(module->embedding->weight));
  EXPECT_TRUE(module->head->weight.is_same(module->embedding->weight));
  EXPECT_TRUE(is_deferred(module->rows));
  materialize_module(*module);
  EXPECT_EQ(module->rows.storage().data(), module->embedding->weight.storage().data());
  const torch::NoGradGuard no_grad;
  module->embedding->weight.fill_(3);
  EXPECT_EQ(module->rows.sum().item<double>(), 3 * 18);
  // A tensor the module does not name gets its memory when it is used.
  EXPECT_TRUE(is_deferred(module->columns));
  EXPECT_EQ(module->columns.sum().item<double>(), 3 * 72);
  EXPECT_FALSE(is_deferred(module->columns));
}

// FSDP-22
TEST(DeferredInit, KeepsDtypesAndCastsInsideAndAfter) {
  const Build in_bfloat16 = [] {
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6));
    net->to(torch::kBFloat16);
    return net.ptr();
  };
  check(in_bfloat16);
  const auto ordinary = build_ordinary(in_bfloat16);
  const auto module =
      build_deferred([] { return torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6)).ptr(); });
  module->to(torch::kBFloat16);  // recorded too
  expect_deferred(*module);
  materialize_module(*module);
  expect_same(*module, *ordinary.module);
}

TEST(DeferredInit, RemembersTheDefaultDtypeOfThen) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const auto module = build_deferred(making<torch::nn::Linear>(3, 2));
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  materialize_module(*module);
  EXPECT_EQ(module->parameters()[0].scalar_type(), torch::kDouble);
  // Numbers of another dtype are other numbers.
  const auto draw = [] {
    torch::manual_seed(kSeed);
    return torch::randn({5});
  };
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const auto expected = draw();
  const auto drawn = deferred_init(draw);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  materialize_tensor(drawn);
  EXPECT_TRUE(at::equal(drawn, expected));
}

TEST(DeferredInit, FollowsSeedsSetMeanwhileAndGeneratorsOfTheProgram) {
  const Build build = [] {
    auto module = std::make_shared<torch::nn::Module>();
    auto generator = at::detail::createCPUGenerator(5);
    module->register_parameter("a", torch::randn({40}));
    torch::manual_seed(kSeed);  // the very seed it began with
    module->register_parameter("b", torch::randn({40}));
    module->register_parameter("c", torch::empty({40}).normal_(0, 1, generator));
    torch::manual_seed(99);
    module->register_parameter("d", torch::empty({7}).uniform_(0, 1));
    module->register_parameter("e", torch::empty({7}).uniform_(0, 1, generator));
    return module;
  };
  check(build);
  const auto module = build_deferred(build);
  materialize_module(*module);
  EXPECT_TRUE(at::equal(module->parameters()[0], module->parameters()[1]));
}

TEST(DeferredInit, DrawsAlsoWhatIsThrownAwayAtTheEnd) {
  check([] {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("kept", torch::randn({4}));
    torch::rand({100});
    return module;
  });
}

TEST(DeferredInit, LeavesAGeneratorThatTheBuildSeededLast) {
  const Build build = [] {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("drawn", torch::randn({4}));
    torch::manual_seed(5);
    return module;
  };
  check(build);
  torch::manual_seed(5);
  const auto expected = torch::rand({3});
  const auto module = build_deferred(build);
  EXPECT_TRUE(at::equal(torch::rand({3}), expected));
}

TEST(DeferredInit, OfTwoSeedsLeavesTheGeneratorWithDifferentNumbers) {
  const auto build = making<torch::nn::Linear>(3, 2);
  torch::manual_seed(1);
  const auto one = deferred_init(build);
  const auto after_one = torch::rand({3});
  torch::manual_seed(2);
  const auto other = deferred_init(build);
  EXPECT_FALSE(at::equal(torch::rand({3}), after_one));
}

TEST(DeferredInit, LeavesTheGeneratorAloneIfItWasUsedSince) {
  const auto module = build_deferred(making<torch::nn::Linear>(3, 2));
  torch::manual_seed(1);
  const auto expected = torch::rand({3});
  torch::manual_seed(1);
  materialize_module(*module);
  EXPECT_TRUE(at::equal(torch::rand({3}), expected));
}

TEST(DeferredInit, RefusesASecondBuildWhoseNumbersAreNotKnownYet) {
  const auto build = making<torch::nn::Linear>(3, 2);
  auto first = build_deferred(build);
  testing::expect_error([&] { deferred_init(build); }, {"earlier deferred build", "torch::manual_seed"});
  materialize_module(*first);
  const auto second = deferred_init(build);
  materialize_module(*second);
  torch::manual_seed(kSeed);
  const auto ordinary_first = build();
  const auto ordinary_second = build();
  expect_same(*first, *ordinary_first);
  expect_same(*second, *ordinary_second);
}

TEST(DeferredInit, GoesOnAsAfterAnOrdinaryBuildWhateverWasDrawnMeanwhile) {
  const auto ordinary = build_ordinary(making<torch::nn::Linear>(3, 2));
  const auto module = build_deferred(making<torch::nn::Linear>(3, 2));
  torch::rand({3});
  materialize_module(*module);
  EXPECT_EQ(torch::rand({}).item<double>(), ordinary.next_number);
  expect_same(*module, *ordinary.module);
}

TEST(DeferredInit, OfADroppedModuleHasDrawnNothing) {
  build_deferred(making<torch::nn::Linear>(3, 2));
  const auto module = deferred_init(making<torch::nn::Linear>(3, 2));
  materialize_module(*module);
  expect_same(*module, *build_ordinary(making<torch::nn::Linear>(3, 2)).module);
}

TEST(DeferredInit, ReadsValuesOfTensorsWithMemory) {
  const auto table = torch::arange(12.0).view({3, 4});
  const auto make = [&] {
    auto embedding = torch::nn::Embedding(3, 4);
    const torch::NoGradGuard no_grad;
    embedding->weight.copy_(table);
    embedding->weight.add_(table.mean());  // computed from tensors with memory alone: a number of now
    return embedding.ptr();
  };
  const auto module = build_deferred(make);
  expect_deferred(*module);
  materialize_module(*module);
  EXPECT_TRUE(at::equal(module->parameters()[0], table + table.mean()));
  const auto late = build_deferred(make);
  table.add_(1);
  EXPECT_THROW(materialize_module(*late), c10::Error);
  // From an address of the program.
  std::vector<float> values = {1, 2, 3};
  const auto blob = deferred_init([&] { return torch::from_blob(values.data(), {3}).clone(); });
  EXPECT_EQ(blob.sum().item<double>(), 6);
}

TEST(DeferredInit, TakesDevicesFromTensorsWithoutMemory) {
  const auto module = build_deferred([] {
    auto linear = torch::nn::Linear(3, 2);
    linear->register_buffer("like", torch::full({2}, 4.0, linear->weight.options().requires_grad(false)));
    return linear.ptr();
  });
  materialize_module(*module);
  EXPECT_EQ(module->buffers()[0].sum().item<double>(), 8);
}

TEST(DeferredInit, WorksInInferenceMode) {
  const c10::InferenceMode mode;
  const auto ordinary = build_ordinary(making<torch::nn::Linear>(3, 2));
  const auto module = build_deferred(making<torch::nn::Linear>(3, 2));
  materialize_module(*module);
  EXPECT_TRUE(module->parameters()[0].is_inference());
  EXPECT_TRUE(at::equal(module->parameters()[0], ordinary.module->parameters()[0]));
}

TEST(DeferredInit, TrainsAsAnOrdinaryBuildDoes) {
  const Build build = [] {
    return torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1)).ptr();
  };
  const auto train = [](torch::nn::Module& module) {
    auto& net = dynamic_cast<torch::nn::SequentialImpl&>(module);
    torch::optim::SGD optimizer(module.parameters(), 0.1);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      net.forward(torch::ones({3, 4})).pow(2).sum().backward();
      optimizer.step();
    }
  };
  const auto ordinary = build_ordinary(build);
  const auto module = build_deferred(build);
  materialize_module(*module);
  train(*ordinary.module);
  train(*module);
  expect_same(*module, *ordinary.module);
}

TEST(DeferredInit, ScopesNestAndEndByExceptions) {
  torch::manual_seed(kSeed);
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_THROW(deferred_init([]() -> int {
                 torch::rand({3});
                 throw std::runtime_error("built badly");
               }),
               std::runtime_error);
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  EXPECT_FALSE(is_deferred(torch::ones({2})));
  const auto ordinary = build_ordinary(making<torch::nn::Linear>(3, 2));
  const auto module = build_deferred([] { return deferred_init(making<torch::nn::Linear>(3, 2)); });
  materialize_module(*module);
  expect_same(*module, *ordinary.module);
  // The inner one is part of the outer one, before and after which others draw.
  const auto around = [](const Build& inner) -> Build {
    return [inner] {
      auto outer = std::make_shared<torch::nn::Module>();
      outer->register_parameter("before", torch::randn({3}));
      outer->register_module("inner", inner());
      outer->register_parameter("after", torch::randn({3}));
      return outer;
    };
  };
  const auto linear = making<torch::nn::Linear>(3, 2);
  const auto whole = build_ordinary(around(linear));
  const auto nested = build_deferred(around([&] { return deferred_init(linear); }));
  materialize_module(*nested);
  expect_same(*nested, *whole.module);
}

TEST(DeferredInit, IsCountedByACounterInside) {
  OperatorCounter counter;
  const auto module = deferred_init([&] {
    const auto counting = counter.count();
    return torch::nn::Linear(30, 20);
  });
  EXPECT_TRUE(is_deferred(module->weight));
  materialize_module(*module);
  EXPECT_EQ(module->weight.sizes(), (std::vector<int64_t>{20, 30}));
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(DeferredInit, NamesWhatCannotBeDeferred) {
  const auto inside = [](const std::function<void()>& work) {
    return message_of([&] {
      deferred_init([&] {
        work();
        return 0;
      });
    });
  };
  EXPECT_THAT(inside([] { torch::ones({}).item<double>(); }), HasSubstr("aten::item needs the values"));
  EXPECT_THAT(inside([] { torch::ones({3}).nonzero(); }), HasSubstr("aten::nonzero needs the values"));
  EXPECT_THAT(inside([] { at::equal(torch::ones({3}), torch::ones({3})); }), HasSubstr("aten::equal needs the values"));
  EXPECT_THAT(inside([] { torch::ones({3}).data_ptr<float>(); }), HasSubstr("has no memory yet"));
  EXPECT_THAT(inside([] { torch::ones({3}).const_data_ptr<float>(); }), HasSubstr("has no memory yet"));
  EXPECT_THAT(inside([] { torch::tensor(std::vector<float>{1, 2}); }), HasSubstr("torch::from_blob"));
  EXPECT_THAT(inside([] { torch::ones({2, 3}).mm(torch::ones({2, 3})); }), HasSubstr("while running aten::mm"));
  const auto real = torch::ones({3});
  EXPECT_THAT(inside([&] { real.add_(torch::ones({3})); }), HasSubstr("aten::add_ would write into a tensor"));
  EXPECT_THAT(inside([&] { real.normal_(); }), HasSubstr("aten::normal_ draws random numbers"));
  EXPECT_THAT(inside([] { torch::empty({2, 2}, torch::TensorOptions().layout(torch::kSparse)); }),
              HasSubstr("cannot be deferred"));
  const auto late = build_deferred(making<torch::nn::Linear>(3, 2));
  EXPECT_THAT(message_of([&] { torch::nn::init::normal_(late->parameters()[0]); }),
              HasSubstr("after deferred_init has ended"));
  const auto other = build_deferred(making<torch::nn::Linear>(3, 2));
  EXPECT_THAT(message_of([&] {
                const torch::NoGradGuard no_grad;
                late->parameters()[0].copy_(other->parameters()[0]);
              }),
              HasSubstr("two deferred builds"));
  EXPECT_THAT(message_of([&] {
                const auto used = late->parameters()[0].t();
                materialize_module(*late);
              }),
              HasSubstr("before it had memory"));
  EXPECT_THAT(inside([] { materialize_tensor(torch::ones({3})); }), HasSubstr("is still open"));
  const auto computed = deferred_init([] { return torch::ones({3}, torch::requires_grad()) * 2; });
  EXPECT_THAT(message_of([&] { materialize_tensor(computed); }), HasSubstr("with gradients on"));
  torch::manual_seed(kSeed);
  EXPECT_THAT(inside([&] {
                torch::rand({2});
                std::string of_other;
                std::thread([&] { of_other = inside([] { torch::rand({2}); }); }).join();
                TORCH_CHECK(false, of_other);
              }),
              HasSubstr("another thread is inside of a deferred build"));
  EXPECT_THAT(message_of([] { const DeferredInitScope scope({.device = at::kMeta}); }), HasSubstr("meta has none"));
}

TEST(DeferredInit, RefusesAForwardPassBeforeThereIsMemory) {
  auto [linear, embedding, norm] = deferred_init(
      [] { return std::tuple(torch::nn::Linear(3, 2), torch::nn::Embedding(3, 2), torch::nn::BatchNorm1d(3)); });
  const auto names_remedy = [](const std::function<void()>& work) {
    EXPECT_THAT(message_of(work), HasSubstr("Call materialize_module() first"));
  };
  const auto forwards = [&, &linear = linear, &embedding = embedding, &norm = norm] {
    names_remedy([&] { linear->forward(torch::ones({4, 3})); });
    names_remedy([&] { embedding->forward(torch::arange(3)); });
    names_remedy([&] { norm->forward(torch::ones({4, 3})); });
  };
  forwards();
  {
    const torch::NoGradGuard no_grad;
    forwards();
  }
  {
    const c10::InferenceMode mode;
    forwards();
  }
  const auto weight = linear->weight;
  names_remedy([&] { weight.square().sum().backward(); });
  names_remedy([&] {
    const torch::NoGradGuard no_grad;
    weight.sum().item<double>();
  });
  // Nothing of it is left behind.
  materialize_module(linear);
  linear->forward(torch::ones({4, 3})).sum().backward();
  EXPECT_TRUE(linear->weight.grad().defined());
}

TEST(DeferredInit, StillTakesEditsAfterTheScope) {
  const auto table = torch::arange(6.0).view({2, 3});
  auto linear = deferred_init([] { return torch::nn::Linear(3, 2); });
  {
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(table);
    linear->weight.mul_(table).add_(1);
    linear->bias.set_data(linear->bias.mul(0).add(torch::tensor(2.0)));
  }
  linear->to(torch::kDouble);
  EXPECT_TRUE(is_deferred(linear->weight));
  materialize_module(linear.ptr());
  EXPECT_TRUE(at::equal(linear->weight, (table * table + 1).to(at::kDouble)));
  EXPECT_TRUE(at::equal(linear->bias, at::full({2}, 2.0, at::kDouble)));
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

// FSDP-22
TEST(DeferredInit, BuildsBillionsOfParametersInLittleMemory) {
  const auto before = resident_bytes();
  const auto encoder = deferred_init([] {
    return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
        torch::nn::TransformerEncoderLayerOptions(4096, 32).dim_feedforward(16384), 24));
  });
  int64_t elements = 0;
  for (const auto& parameter : encoder->parameters()) elements += parameter.numel();
  EXPECT_GT(elements, 4'800'000'000);
  EXPECT_LT(resident_bytes() - before, 100 << 20);
}

// FSDP-22
TEST(DeferredInit, ThrowsAwayAtOnceWhatItRunsForItsNumbersOnly) {
  const auto module = build_deferred([] {
    torch::nn::Sequential net;
    for (int i = 0; i < 16; ++i) net->push_back(torch::nn::Linear(1024, 1024));
    return net.ptr();
  });
  testing::MemoryProbe probe;
  materialize_module(*module->children().back());  // runs 15 layers of 4 MiB to get past their numbers
  probe.expect_peak_at_most(9 << 20);
}

TEST(DeferredInit, DoesNothingForTensorsWithMemory) {
  torch::nn::Linear linear(2, 3);
  const auto before = linear->weight.detach().clone();
  materialize_module(*linear);
  materialize_tensor(linear->weight);
  materialize_tensor(at::Tensor());
  EXPECT_TRUE(at::equal(linear->weight, before));
}

}  // namespace
}  // namespace lockstep
