// Captured forwards beside the modules they were captured from: outputs, gradients, statistics, random numbers.
#include "lockstep/graph/compiled.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include "examples/gpt/model.h"
#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/nn/capture_mark.h"
#include "lockstep/testing/checks.h"
#include "tests/support/ddp_models.h"

namespace lockstep::graph_compiled_test {
namespace {

using testing::expect_error;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t width = 8, int depth = 4) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x * 2;
    for (auto& layer : layers) y = at::relu(layer->forward(y));
    return y;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : conv(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        drop(register_module("drop", torch::nn::Dropout(0.4))),
        head(register_module("head", torch::nn::Linear(4, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm->forward(conv->forward(x)).relu_();
    y = at::adaptive_avg_pool2d(y, {1, 1}).flatten(1);
    return at::log_softmax(head->forward(drop->forward(y)), 1);
  }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Dropout drop;
  torch::nn::Linear head;
};
TORCH_MODULE(ConvNet);

struct AttentionNetImpl : torch::nn::Module {
  AttentionNetImpl()
      : layer(register_module("layer", torch::nn::TransformerEncoderLayer(
                                           torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16)))) {}
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
  torch::nn::TransformerEncoderLayer layer;
};
TORCH_MODULE(AttentionNet);

/// The same steps through both: same bits, whatever is random.
template <class Holder>
void expect_same(const CompileOptions& options, const at::Tensor& x, bool is_exact = true) {
  torch::manual_seed(1);
  Holder plain;
  torch::manual_seed(1);
  Compiled<Holder> compiled;
  compiled->set_compile_options(options);
  const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
    return is_exact ? at::equal(a, b) : at::allclose(a, b, 1e-4, 1e-5);
  };
  for (const bool is_training : {true, false, true}) {
    plain->train(is_training);
    compiled->train(is_training);
    for (int step = 0; step < 2; ++step) {
      auto a = x.detach().clone().requires_grad_();
      auto b = x.detach().clone().requires_grad_();
      torch::manual_seed(7 + step);
      const auto expected = plain->forward(a);
      torch::manual_seed(7 + step);
      const auto got = compiled->forward(b);
      EXPECT_TRUE(same(got, expected)) << options.backend << is_training << step;
      plain->zero_grad();
      compiled->zero_grad();
      expected.pow(2).sum().backward();
      got.pow(2).sum().backward();
      EXPECT_TRUE(same(a.grad(), b.grad()));
      const auto wanted = plain->named_parameters();
      for (const auto& item : compiled->named_parameters()) {
        EXPECT_TRUE(same(item.value().grad(), wanted[item.key()].grad())) << item.key();
      }
      for (const auto& item : compiled->named_buffers()) {
        EXPECT_TRUE(same(item.value().to(at::kDouble), plain->named_buffers()[item.key()].to(at::kDouble)))
            << item.key();
      }
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(is_training || same(plain->forward(x), compiled->forward(x)));
    }
  }
}

}  // namespace

// GRAPH-7, GRAPH-20, GRAPH-29, GRAPH-38
TEST(GraphCompiled, GivesTheBitsOfTheModule) {
  for (const auto* const backend : {"eager", "autograd"}) {
    expect_same<Mlp>({.backend = backend}, torch::randn({3, 8}));
    expect_same<ConvNet>({.backend = backend}, torch::randn({4, 2, 5, 5}));
    expect_same<AttentionNet>({.backend = backend}, torch::randn({5, 2, 8}));
  }
}

struct SmallGptImpl : examples::GptImpl {
  SmallGptImpl() : GptImpl({.vocabulary = 16, .context = 8, .layers = 2, .heads = 2, .width = 16}) {}
};
TORCH_MODULE(SmallGpt);

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl()
      : lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 6).num_layers(2)))),
        head(register_module("head", torch::nn::Linear(6, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return head->forward(std::get<0>(lstm->forward(x))); }
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};
TORCH_MODULE(Recurrent);

// GRAPH-38
TEST(GraphCompiled, TakesTheDemosGptAndRecurrentLayers) {
  const auto ids = torch::randint(16, {2, 8});
  for (const auto* const backend : {"eager", "autograd"}) {
    torch::manual_seed(1);
    SmallGpt plain;
    Compiled<SmallGpt> model;
    {
      const torch::NoGradGuard no_grad;
      const auto wanted = plain->named_parameters();
      for (auto& item : model->named_parameters()) item.value().copy_(wanted[item.key()]);
    }
    model->set_compile_options({.backend = backend});
    const auto expected = plain->forward(ids);
    const auto got = model->forward(ids);
    EXPECT_TRUE(at::equal(got, expected));
    expected.pow(2).sum().backward();
    got.pow(2).sum().backward();
    for (auto& item : model->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value().grad(), plain->named_parameters()[item.key()].grad())) << item.key();
    }
    expect_same<Recurrent>({.backend = backend}, torch::randn({5, 3, 4}));
  }
}

// GRAPH-40
TEST(GraphCompiled, MayBeCheckpointed) {
  Mlp plain;
  Compiled<Mlp> model(*plain);
  const auto x = torch::randn({3, 8});
  plain->forward(x).pow(2).sum().backward();
  const auto wanted = plain->layers[1]->weight.grad().clone();
  plain->zero_grad();
  checkpoint([&](const at::Tensor& each) { return model->forward(each); }, x).pow(2).sum().backward();
  EXPECT_TRUE(at::equal(model->layers[1]->weight.grad(), wanted));
}

// GRAPH-8
TEST(GraphCompiled, CapturesAnewForWhatItBakedIn) {
  Compiled<Mlp> model;
  const auto captures_after = [&](const at::Tensor& x) {
    const auto y = model->forward(x);
    EXPECT_TRUE(at::equal(y, static_cast<MlpImpl&>(*model).MlpImpl::forward(x)));
    return model->compiler().captures();
  };
  EXPECT_EQ(captures_after(torch::randn({4, 8})), 1);
  EXPECT_EQ(captures_after(torch::randn({4, 8})), 1);
  EXPECT_EQ(captures_after(torch::randn({7, 8})), 2) << "another batch size";
  EXPECT_EQ(captures_after(torch::randn({4, 8})), 2) << "the first fits again";
  EXPECT_EQ(captures_after(torch::randn({8, 4}).t()), 3) << "other strides";
  EXPECT_EQ(captures_after(torch::randn({4, 8}).requires_grad_()), 4) << "a gradient for the input";
  model->eval();
  EXPECT_EQ(captures_after(torch::randn({4, 8})), 5) << "for eval()";
  model->train();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(captures_after(torch::randn({4, 8})), 6);
  }
  model->layers[0]->weight.set_requires_grad(false);
  EXPECT_EQ(captures_after(torch::randn({4, 8})), 7);
  model->to(at::kDouble);
  EXPECT_EQ(captures_after(torch::randn({4, 8}, at::kDouble)), 8);
  const auto& reasons = model->compiler().recapture_reasons();
  const std::vector<std::string> expected = {"Float[7, 8]",  "strides [1, 4]", "trainable",   "cpu, trainable",
                                             "no gradients", "gradients",      "Double[4, 8]"};
  ASSERT_EQ(reasons.size(), expected.size());
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    EXPECT_NE(reasons[i].find(expected[i]), std::string::npos) << i << ": " << reasons[i];
  }
  // No more than it may; the module runs as it is.
  const ddp_models::Warnings warnings;
  EXPECT_EQ(captures_after(torch::randn({4, 8}, at::kDouble)), 8);
  EXPECT_EQ(warnings.count("max_captures"), 0);
  for (const int rows : {5, 6}) EXPECT_EQ(captures_after(torch::randn({rows, 8}, at::kDouble)), 8);
  EXPECT_EQ(warnings.count("was captured 8 times"), 1);
}

struct DroppingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last->forward(first->forward(x)); }
  torch::nn::Dropout first = register_module("first", torch::nn::Dropout(0.5));
  torch::nn::Dropout last = register_module("last", torch::nn::Dropout(0.5));
};
TORCH_MODULE(Dropping);

// GRAPH-8
TEST(GraphCompiled, CapturesAnewForTheModeOfAnyModule) {
  const auto x = torch::ones({64});
  const auto zeros_of = [](const at::Tensor& y) { return (y == 0).sum().item<std::int64_t>(); };
  Compiled<Dropping> model;
  EXPECT_GT(zeros_of(model->forward(x)), 0);
  model->first->eval();
  EXPECT_GT(zeros_of(model->forward(x)), 0);
  EXPECT_EQ(model->compiler().captures(), 2);
  model->last->eval();
  EXPECT_EQ(zeros_of(model->forward(x)), 0);
  EXPECT_EQ(model->compiler().captures(), 3);
  // One without children.
  Compiled<torch::nn::Dropout> alone;
  EXPECT_GT(zeros_of(alone->forward(x)), 0);
  alone->eval();
  EXPECT_EQ(zeros_of(alone->forward(x)), 0);
  alone->train();
  EXPECT_GT(zeros_of(alone->forward(x)), 0);
  EXPECT_EQ(alone->compiler().captures(), 2);
}

// GRAPH-8
TEST(GraphCompiled, ReadsParametersThatAreThereNow) {
  Compiled<Mlp> model;
  const auto x = torch::randn({4, 8});
  model->forward(x);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.mul_(2);
  }
  EXPECT_TRUE(at::equal(model->forward(x), static_cast<MlpImpl&>(*model).MlpImpl::forward(x)));
  std::stringstream file;
  Mlp other;
  torch::save(other, file);
  torch::load(model, file);
  EXPECT_TRUE(at::equal(model->forward(x), other->forward(x)));
  EXPECT_EQ(model->compiler().captures(), 1);
}

struct RichImpl : torch::nn::Module {
  RichImpl() : layer(register_module("layer", torch::nn::Linear(4, 4))) {}
  using Outputs = std::tuple<at::Tensor, std::map<std::string, std::vector<at::Tensor>>, int>;
  Outputs forward(std::pair<at::Tensor, std::vector<at::Tensor>> inputs, double scale, std::optional<at::Tensor> mask,
                  std::string mode) {
    auto y = layer->forward(inputs.first) * scale;
    for (const auto& each : inputs.second) y = y + each;
    if (mask) y = y * *mask;
    if (mode == "double") y = y * 2;
    return {y, {{"all", {y, inputs.first}}}, static_cast<int>(inputs.second.size())};
  }
  torch::nn::Linear layer;
};
TORCH_MODULE(Rich);

// GRAPH-9
TEST(GraphCompiled, TakesApartArgumentsAndResults) {
  Rich plain;
  Compiled<Rich> model(*plain);
  const auto x = torch::randn({2, 4});
  const auto expect = [&](std::vector<at::Tensor> more, double scale, std::optional<at::Tensor> mask,
                          std::string mode) {
    const auto [y, map, count] = model->forward({x, more}, scale, mask, mode);
    const auto [wanted, wanted_map, wanted_count] = plain->forward({x, more}, scale, mask, mode);
    EXPECT_TRUE(at::equal(y, wanted));
    EXPECT_TRUE(at::equal(map.at("all")[0], wanted));
    EXPECT_TRUE(map.at("all")[1].is_same(x));
    EXPECT_EQ(count, wanted_count);
    return model->compiler().captures();
  };
  EXPECT_EQ(expect({}, 1.5, std::nullopt, "plain"), 1);
  EXPECT_EQ(expect({x, x * 2}, 1.5, std::nullopt, "plain"), 2);
  EXPECT_EQ(expect({x, x * 2}, 2.5, std::nullopt, "plain"), 3) << "numbers are baked in, and guarded";
  EXPECT_EQ(expect({x, x * 2}, 2.5, torch::ones({2, 4}), "plain"), 4);
  EXPECT_EQ(expect({x, x * 2}, 2.5, torch::ones({2, 4}), "double"), 5);
  EXPECT_EQ(expect({x, x * 3}, 2.5, torch::zeros({2, 4}), "double"), 5);
}

struct PlainImpl : torch::nn::Module {
  explicit PlainImpl(std::string kind = "")
      : kind(std::move(kind)), fc(register_module("fc", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x, double step, std::vector<std::string> words) {
    auto y = fc->forward(x) * step * static_cast<double>(words.size()) * scale;
    if (kind == "lazy") {
      if (!late) late = register_module("late", torch::nn::Linear(4, 4));
      y = late->forward(y);
    }
    if (kind == "mask") {
      if (!mask.defined()) mask = torch::ones({4, 4}).tril();
      y = y.matmul(mask);
    }
    if (kind == "aux") mask = y.pow(2).mean();
    return y;
  }
  std::string kind;
  double scale = 1;
  torch::nn::Linear fc;
  torch::nn::Linear late{nullptr};
  at::Tensor mask;
};
TORCH_MODULE(Plain);
std::string capture_guard(const PlainImpl& module) {
  return std::to_string(module.scale);
}

// GRAPH-8
TEST(GraphCompiled, TellsNumbersAndTextsApart) {
  Compiled<Plain> model;
  const auto x = torch::randn({2, 4});
  const auto expect = [&](double step, const std::vector<std::string>& words) {
    EXPECT_TRUE(
        at::equal(model->forward(x, step, words), static_cast<PlainImpl&>(*model).PlainImpl::forward(x, step, words)));
    return model->compiler().captures();
  };
  EXPECT_EQ(expect(1234567, {"a", "b"}), 1);
  EXPECT_EQ(expect(1234568, {"a", "b"}), 2);
  EXPECT_EQ(expect(0.12345678, {"a"}), 3);
  EXPECT_EQ(expect(0.12345679, {"a"}), 4);
  EXPECT_EQ(expect(1234567, {"a;b"}), 5);
  EXPECT_EQ(expect(1234567, {"a", "b"}), 5);
  // A member that the module's own guard knows of.
  model->scale = 3;
  EXPECT_EQ(expect(1234567, {"a", "b"}), 6);
}

// GRAPH-8
TEST(GraphCompiled, RefusesForwardsThatStoreWhatTheyCompute) {
  const auto x = torch::randn({2, 4});
  const auto refuses = [&](const char* kind, const std::vector<std::string>& words) {
    Compiled<Plain> model(kind);
    expect_error([&] { model->forward(x, 1, {"a"}); }, words);
  };
  refuses("lazy", {"registered parameters or buffers while its forward was captured", "constructor"});
  refuses("mask", {"keeps a result of aten::tril", "in the constructor"});
  refuses("aux", {"keeps a result of aten::mean", "return it"});
}

struct OwnFunction : torch::autograd::Function<OwnFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    return {grads[0] * 100};
  }
};
at::Tensor closure_weight() {
  static const auto weight = torch::ones({4}).requires_grad_();
  return weight;
}
struct OddImpl : torch::nn::Module {
  explicit OddImpl(std::string kind)
      : kind(std::move(kind)), layer(register_module("layer", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    auto y = layer->forward(x);
    if (kind == "item") return y.sum().item<double>() > 0 ? y : -y;
    if (kind == "mask") return y.masked_select(y > 0).sum();
    if (kind == "function") return OwnFunction::apply(y);
    if (kind == "closure") return y * closure_weight();
    if (kind == "data") return y + y.data();
    if (kind == "hook") y.register_hook([](const at::Tensor& grad) { return grad * 2; });
    if (kind == "retain") y.retain_grad();
    if (kind == "hook on input") x.register_hook([](const at::Tensor& grad) { return grad * 2; });
    if (kind == "set_data") count.set_data(count + 1);
    if (kind.starts_with("hook") || kind == "retain" || kind == "set_data") return y * 2;
    if (kind == "inference") {
      const c10::InferenceMode mode;
      return x * 2;
    }
    if (kind == "nograd") {
      const torch::NoGradGuard no_grad;
      y = y * 1;
    } else if (kind == "detached") {
      y = y + y.detach() * 3;
    } else if (kind == "made") {
      y = y + torch::arange(4, x.options()) + torch::ones({4});
    }
    return y;
  }
  std::string kind;
  torch::nn::Linear layer;
  at::Tensor count = register_buffer("count", torch::full({1}, 3.0));
};
TORCH_MODULE(Odd);

// GRAPH-6, GRAPH-8
TEST(GraphCompiled, RefusesWhatAGraphCannotHold) {
  const auto x = torch::randn({3, 4});
  closure_weight();
  const auto refuses = [&](const char* kind, const std::vector<std::string>& words) {
    Compiled<Odd> model(kind);
    expect_error([&] { model->forward(x); }, words);
  };
  refuses("item", {"aten::", "needs the values", "must not depend"});
  refuses("mask", {"aten::masked_select"});
  refuses("function", {"autograd function", "OwnFunction", "outside"});
  refuses("closure", {"needs gradients", "'layer.", "Register it"});
  refuses("data", {"made by no operator", "detach()"});
  refuses("inference", {"InferenceMode"});
  refuses("hook", {"registers a hook", "Addmm", "on what it returns"});
  refuses("retain", {"retain its gradient"});
  {
    Compiled<Odd> model("hook on input");
    expect_error([&] { model->forward(torch::ones({3, 4}).requires_grad_()); }, {"a hook on an input"});
  }
  {
    Compiled<Odd> model("set_data");
    expect_error([&] { model->forward(x); }, {"'count'", "set_data()", "in place"});
    EXPECT_EQ(model->count.item<float>(), 3) << "it has its memory back";
  }
  // Nothing is left behind: the thread's operators are its own again.
  EXPECT_FALSE(is_capturing());
  EXPECT_EQ(torch::ones({1}).item<float>(), 1);
}

// GRAPH-38
TEST(GraphCompiled, LeavesWithoutGradientsWhatTheForwardDoes) {
  for (const auto* const backend : {"eager", "autograd"}) {
    for (const auto* const kind : {"nograd", "detached", "made"}) {
      Odd plain(kind);
      Compiled<Odd> model(*plain);
      model->set_compile_options({.backend = backend});
      const auto x = torch::randn({3, 4});
      auto a = x.clone().requires_grad_();
      auto b = x.clone().requires_grad_();
      const auto expected = plain->forward(a);
      const auto got = model->forward(b);
      EXPECT_TRUE(at::equal(got, expected));
      EXPECT_EQ(got.requires_grad(), expected.requires_grad()) << kind;
      if (!expected.requires_grad()) continue;
      const auto wanted = torch::autograd::grad({expected.pow(2).sum()}, {a, plain->layer->weight});
      const auto gradients = torch::autograd::grad({got.pow(2).sum()}, {b, model->layer->weight});
      for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(gradients[i], wanted[i])) << kind << i;
    }
  }
}

struct TwoHeadsImpl : torch::nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto y = body->forward(x);
    return {a->forward(y), b->forward(y)};
  }
  torch::nn::Linear body = register_module("body", torch::nn::Linear(4, 4));
  torch::nn::Linear a = register_module("a", torch::nn::Linear(4, 4));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(4, 4));
};
TORCH_MODULE(TwoHeads);

// GRAPH-38
TEST(GraphCompiled, GivesNoGradientsBehindOutputsThatTheLossDoesNotUse) {
  for (const auto* const backend : {"eager", "autograd"}) {
    TwoHeads plain;
    const auto x = torch::randn({2, 4});
    plain->forward(x).first.pow(2).sum().backward();
    const auto wanted = plain->body->weight.grad().clone();
    for (auto& parameter : plain->parameters()) parameter.mutable_grad() = at::Tensor();
    Compiled<TwoHeads> model(*plain);
    model->set_compile_options({.backend = backend});
    model->forward(x).first.pow(2).sum().backward();
    EXPECT_TRUE(at::equal(model->body->weight.grad(), wanted)) << backend;
    EXPECT_TRUE(model->a->weight.grad().defined()) << backend;
    EXPECT_FALSE(model->b->weight.grad().defined()) << backend;
    EXPECT_FALSE(model->b->bias.grad().defined()) << backend;
  }
}

// GRAPH-1, GRAPH-38
TEST(GraphCompiled, IsOneNodeOfAutogradAndMayBeRetained) {
  Compiled<Mlp> model;
  model->set_compile_options({.backend = "autograd"});
  const auto x = torch::randn({3, 8});
  const auto y = model->forward(x);
  EXPECT_NE(y.grad_fn()->name().find("PartFunction"), std::string::npos) << y.grad_fn()->name();
  const auto loss = y.sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = model->layers[0]->weight.grad().clone();
  loss.backward();
  EXPECT_TRUE(at::allclose(model->layers[0]->weight.grad(), 2 * once));
  expect_error([&] { loss.backward(); }, {"second time"});
  // Second derivatives are refused in words.
  auto input = torch::randn({3, 8}).requires_grad_();
  expect_error([&] { torch::autograd::grad({model->forward(input).sum()}, {input}, {}, true, /*create_graph=*/true); },
               {"differentiated once", "'eager'"});
  Compiled<Mlp> twice;
  twice->set_compile_options({.backend = "eager"});
  const auto first = torch::autograd::grad({twice->forward(input).pow(2).sum()}, {input}, {}, true, true);
  EXPECT_TRUE(first[0].requires_grad());
}

// GRAPH-4, GRAPH-31 to GRAPH-33
TEST(GraphCompiled, HandsPartsToABackend) {
  std::vector<std::string> seen;
  int parts = 0;
  CompileOptions options;
  options.custom_backend = [&](const graph::Graph& part,
                               const std::vector<at::Tensor>& examples) -> graph::GraphFunction {
    EXPECT_EQ(examples.size(), part.inputs.size());
    for (std::size_t i = 0; i < examples.size(); ++i) {
      const auto& value = part.values[part.inputs[i]];
      EXPECT_EQ(examples[i].is_meta(), value.kind != graph::ValueKind::kParameter) << value.name;
      EXPECT_EQ(examples[i].sizes(), at::IntArrayRef(value.look.sizes));
      EXPECT_EQ(examples[i].requires_grad(), value.look.requires_grad);
    }
    ++parts;
    return graph::backend_named("eager")(part, examples);
  };
  options.dump = [&](const std::string& what, const std::string& text) {
    seen.push_back(what + ": " + text.substr(0, 5));
  };
  Compiled<Mlp> model;
  model->set_compile_options(options);
  const auto x = torch::randn({3, 8});
  EXPECT_TRUE(at::equal(model->forward(x), static_cast<MlpImpl&>(*model).MlpImpl::forward(x)));
  EXPECT_EQ(parts, 1) << "no wrapper, no cut";
  EXPECT_EQ(seen.front(), "original: graph");
  EXPECT_EQ(model->compiler().program().parts()[0].name, "compiled_part_0");
  expect_error(
      [] {
        Compiled<Mlp> other;
        other->set_compile_options({.backend = "no such"});
        other->forward(torch::ones({1, 8}));
      },
      {"no backend 'no such'", "autograd, eager, executor"});
  // Before there is anything to run; a function of one's own may have any name.
  expect_error([] { graph::Compiler({.backend = "no such"}, "net"); }, {"no backend 'no such'"});
  options.backend = "mine";
  Compiled<Mlp> named;
  named->set_compile_options(options);
  EXPECT_TRUE(at::equal(named->forward(x), static_cast<MlpImpl&>(*named).MlpImpl::forward(x)));
  EXPECT_EQ(parts, 2);
  expect_error([] { graph::register_backend("eager", graph::backend_named("eager")); }, {"'eager'"});
  expect_error([] { graph::register_backend("null", nullptr); }, {"null"});
  expect_error([&] { model->set_compile_options({}); }, {"after the first forward"});
}

// GRAPH-36
TEST(GraphCompiled, RunsAPartAsItWasCapturedIfTheBackendFails) {
  CompileOptions options;
  options.custom_backend = [](const graph::Graph&, const std::vector<at::Tensor>&) -> graph::GraphFunction {
    throw std::runtime_error("it is too hard");
  };
  Compiled<Mlp> model;
  model->set_compile_options(options);
  const auto x = torch::randn({3, 8});
  EXPECT_TRUE(at::equal(model->forward(x), static_cast<MlpImpl&>(*model).MlpImpl::forward(x)));
  EXPECT_FALSE(model->compiler().program().parts()[0].is_compiled);
  EXPECT_NE(model->compiler().program().describe().find("as it was captured"), std::string::npos);
}

// GRAPH-4, GRAPH-37
TEST(GraphCompiled, RunsThroughTorchScript) {
  expect_same<Mlp>({.backend = "executor"}, torch::randn({3, 8}), /*is_exact=*/false);
  expect_same<ConvNet>({.backend = "executor"}, torch::randn({4, 2, 5, 5}), /*is_exact=*/false);
}

struct ListsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto halves = layer->forward(x).chunk(2, 1);
    const auto parts = halves[0].split_with_sizes({1, 3}, 1);
    const auto rows = halves[1].unbind(0);
    return parts[0] * parts[1] + at::stack({rows[1], rows[0]}).narrow(1, 0, 3);
  }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(8, 8));
};
TORCH_MODULE(Lists);

// GRAPH-37
TEST(GraphCompiled, RunsOperatorsThatReturnListsThroughTorchScript) {
  expect_same<Lists>({.backend = "executor"}, torch::randn({2, 8}), /*is_exact=*/false);
  Compiled<Lists> model;
  model->set_compile_options({.backend = "executor"});
  model->forward(torch::randn({2, 8}));
  EXPECT_TRUE(model->compiler().program().parts()[0].is_compiled);
}

// GRAPH-37
TEST(GraphCompiled, IsOneNodeOfTorchScriptFromTheFirstForwardOn) {
  Compiled<Mlp> model;
  model->set_compile_options({.backend = "executor"});
  for (int step = 0; step < 3; ++step) {
    std::vector<std::string> names;
    const auto output = model->forward(torch::randn({3, 8}));
    std::vector<torch::autograd::Node*> open = {output.grad_fn().get()};
    while (!open.empty()) {
      auto* const node = open.back();
      open.pop_back();
      names.push_back(node->name());
      for (const auto& edge : node->next_edges()) {
        if (edge.function) open.push_back(edge.function.get());
      }
    }
    EXPECT_NE(names[0].find("DifferentiableGraph"), std::string::npos) << step << names[0];
    for (const auto& name : names) EXPECT_EQ(name.find("Addmm"), std::string::npos) << step;
  }
}

struct OuterImpl : torch::nn::Module {
  OuterImpl() : inner(register_module("inner", Compiled<Mlp>())) {}
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x) * 2; }
  Compiled<Mlp> inner;
};
TORCH_MODULE(Outer);

// GRAPH-38
TEST(GraphCompiled, TakesCompiledModulesInsideAsTheyAre) {
  Compiled<Outer> outer;
  const auto x = torch::randn({3, 8});
  EXPECT_TRUE(at::equal(outer->forward(x), static_cast<MlpImpl&>(*outer->inner).MlpImpl::forward(x) * 2));
  EXPECT_GT(outer->compiler().program().graph().nodes.size(), 4);
  EXPECT_EQ(outer->inner->compiler().captures(), 0);
}

struct ProductImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return at::real(at::matmul(x.to(weight.dtype()), weight) * weight); }
  at::Tensor weight = register_parameter("weight", torch::randn({4, 4}, at::kComplexFloat));
};
TORCH_MODULE(Product);

// What TorchScript would compute otherwise runs as it is, with a warning. GRAPH-36, GRAPH-37
TEST(GraphCompiled, LeavesToLibtorchWhatTorchScriptDoesDifferently) {
  expect_same<Product>({.backend = "executor"}, torch::randn({4, 4}), /*is_exact=*/false);
  const auto x = torch::randn({3, 8});
  Compiled<Mlp> model;
  model->set_compile_options({.backend = "executor"});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto got = model->forward(x);
  const auto expected = static_cast<MlpImpl&>(*model).MlpImpl::forward(x);
  at::autocast::clear_cache();
  expect_error([&] { model->forward(x.to(at::kBFloat16)); }, {"Casts by autocast", "parameters' dtype"});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(got.dtype(), expected.dtype());
  EXPECT_TRUE(at::equal(got, expected));
}

}  // namespace lockstep::graph_compiled_test
