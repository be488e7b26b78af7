// Tensor parallelism on modules as they are, against one device.
#include "lockstep/tp/parallelize_module.h"

#include <map>

#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/nn/norms.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;

// TP-33, TP-34, TP-35, TP-43: one all-reduce forward, one backward, and one device's gradients
LOCKSTEP_THREAD_TEST(ParallelizeModule, DividesAnMlp, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  for (const auto& sizes : {std::vector<int64_t>{3, 8}, {2, 3, 8}}) {
    auto whole = built_from_seed([] { return Mlp(8, 12); }, 1);
    auto model = built_from_seed([] { return Mlp(8, 12); }, 1);
    parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
    EXPECT_EQ(model->in->named_parameters()["weight"].sizes(), (at::IntArrayRef{6, 8}));
    const auto x = built_from_seed([&] { return at::randn(sizes); }, 2);
    auto x_whole = x.clone().requires_grad_();
    auto x_mine = x.clone().requires_grad_();
    whole(x_whole).pow(2).sum().backward();
    testing::Recorder recorder;
    const auto y = model(x_mine);
    EXPECT_FALSE(is_dtensor(y));
    EXPECT_EQ(recorder.events("launch").size(), 1U);
    y.pow(2).sum().backward();
    EXPECT_EQ(recorder.events("launch").size(), 2U);
    expect_close("input", x_mine.grad(), x_whole.grad());
    expect_parts(*model, *whole);
  }
}

/// Both models take the input; the parallel one gives the whole output, on every rank.
template <class Model>
void expect_trains_alike(Model& model, Model& whole, const at::Tensor& x, int steps = 3) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    auto mine = x.clone().requires_grad_(x.is_floating_point());
    auto other = x.clone().requires_grad_(x.is_floating_point());
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto y = model->forward(mine);
    const auto expected = whole->forward(other);
    expect_close("output", y, expected);
    (y * at::arange(y.numel(), y.options()).view_as(y).sin()).sum().backward();
    (expected * at::arange(y.numel(), y.options()).view_as(y).sin()).sum().backward();
    if (x.is_floating_point()) expect_close("input's gradient", mine.grad(), other.grad());
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
  }
}

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        q(register_module("q", torch::nn::Linear(8, 8))),
        k(register_module("k", torch::nn::Linear(8, 8))),
        v(register_module("v", torch::nn::Linear(8, 8))),
        out(register_module("out", torch::nn::Linear(8, 8))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto h = norm(x);
    const auto heads = [&](const at::Tensor& t) { return t.view({t.size(0), t.size(1), -1, 2}).transpose(1, 2); };
    const auto mixed = at::scaled_dot_product_attention(heads(q(h)), heads(k(h)), heads(v(h)));
    return x + out(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear q, k, v, out;
};
TORCH_MODULE(Attention);

// TP-33, TP-43: separate q, k and v cost one reduction of their input's gradient
LOCKSTEP_THREAD_TEST(ParallelizeModule, ReducesTheInputOfQueriesKeysAndValuesOnce, 2) {
  auto [model, whole] = pair_of([] { return Attention(); });
  const auto mesh = init_device_mesh("cpu", {2});
  parallelize_module(*model, mesh, {{"[qkv]", ColwiseParallel()}, {"out", RowwiseParallel()}});
  const auto x = built_from_seed([] { return at::randn({2, 3, 8}); }, 2);
  testing::Recorder recorder;
  model(x.clone().requires_grad_()).sum().backward();
  EXPECT_EQ(recorder.events("launch").size(), 2U);
  model->zero_grad();
  expect_trains_alike(model, whole, x);
}

struct SequenceMlpImpl : torch::nn::Module {
  SequenceMlpImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        in(register_module("in", torch::nn::Linear(8, 12))),
        out(register_module("out", torch::nn::Linear(12, 8))),
        last(register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = last(out(at::gelu(in(norm(x)))));
    return is_dtensor(y) ? DTensor(y).full_tensor() : y;
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear in, out;
  torch::nn::LayerNorm last;
};
TORCH_MODULE(SequenceMlp);

// TP-36, TP-37, TP-38, TP-43: gathers and reduce-scatters instead of all-reduces; uneven sequences; norms' gradients
LOCKSTEP_THREAD_TEST(ParallelizeModule, CutsTheSequence, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  for (const auto length : {4, 5}) {
    auto [model, whole] = pair_of([] { return SequenceMlp(); });
    parallelize_module(*model, mesh,
                       {{"norm", SequenceParallel()},
                        {"in", ColwiseParallel({.input_layouts = Shard(1), .use_local_output = false})},
                        {"out", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = false})},
                        {"last", SequenceParallel()}});
    const auto x = built_from_seed([&] { return at::randn({2, length, 8}); }, 2);
    const auto cut = distribute_tensor(x, mesh, {Shard(1)});
    testing::Recorder recorder;
    const auto y = model(cut.tensor());
    std::map<std::string, int> counts;
    for (const auto& event : recorder.events("launch")) ++counts[event.kind];
    EXPECT_EQ(counts.contains("all_reduce"), false);
    expect_close("output", y, whole(x));
    y.pow(2).sum().backward();
    whole(x).pow(2).sum().backward();
    expect_parts(*model, *whole);
  }
}

struct NormsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(first(x).pow(2)); }
  nn::RMSNorm first = register_module("first", nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {8}}));
  nn::LayerNorm last =
      register_module("last", nn::LayerNorm(nn::LayerNormOptions{.normalized_shape = {8}, .bias = false}));
};
TORCH_MODULE(Norms);

// TP-37, TP-38: RMSNorm and LayerNorm without a bias
LOCKSTEP_THREAD_TEST(ParallelizeModule, CutsSequencesOfOtherNorms, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto [model, whole] = pair_of([] { return Norms(); });
  parallelize_module(*model, mesh, {{"first", SequenceParallel()}, {"last", SequenceParallel()}});
  const auto x = built_from_seed([&] { return at::randn({2, 5, 8}); }, 2);
  const auto y = model(distribute_tensor(x, mesh, {Shard(1)}).tensor());
  EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
  expect_close("output", DTensor(y).full_tensor(), whole(x));
  y.pow(3).sum().backward();
  whole(x).pow(3).sum().backward();
  expect_parts(*model, *whole);
}

struct TokensImpl : torch::nn::Module {
  TokensImpl() : table(register_module("table", torch::nn::Embedding(11, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return table(x); }
  torch::nn::Embedding table;
};
TORCH_MODULE(Tokens);

// TP-33, TP-34: embeddings by width and by vocabulary, of which 11 does not divide
LOCKSTEP_THREAD_TEST(ParallelizeModule, DividesEmbeddings, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto ids = at::arange(12).remainder(11).view({3, 4});
  for (const Style& style : {Style(ColwiseParallel({.output_layouts = Replicate()})), Style(RowwiseParallel())}) {
    auto [model, whole] = pair_of([] { return Tokens(); });
    parallelize_module(*model, mesh, {{"table", style}});
    expect_trains_alike(model, whole, ids);
  }
}

// TP-40: libtorch's own layer, as it is
LOCKSTEP_THREAD_TEST(ParallelizeModule, DividesATransformerEncoderLayer, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto [model, whole] = pair_of([] {
    return torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(8, 4).dim_feedforward(12).dropout(0));
  });
  parallelize_module(*model, mesh,
                     {{"self_attn", ColwiseParallel()},
                      {"self_attn.out_proj", RowwiseParallel()},
                      {"linear1", ColwiseParallel()},
                      {"linear2", RowwiseParallel()}});
  expect_trains_alike(model, whole, built_from_seed([] { return at::randn({5, 3, 8}); }, 2));
}

// TP-41: the source's weights, or each rank's own
LOCKSTEP_THREAD_TEST(ParallelizeModule, TakesWeightsFromTheSource, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto whole = built_from_seed([] { return Mlp(8, 12); }, 1);
  auto model = built_from_seed([] { return Mlp(8, 12); }, 1 + world.rank());
  parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  expect_trains_alike(model, whole, built_from_seed([] { return at::randn({3, 8}); }, 2), 1);

  auto own = built_from_seed([] { return Mlp(8, 12); }, 1 + world.rank());
  const auto before = own->in->weight.detach().clone();
  testing::Recorder recorder;
  parallelize_module(*own, mesh, {{"in", ColwiseParallel()}}, {.src_data_rank = std::nullopt});
  testing::expect_none(recorder.events("launch"), "broadcast");
  expect_close("own", own->in->named_parameters()["weight"], before.chunk(2)[world.rank()]);
}

// TP-34, TP-40, TP-41: what cannot be applied is refused by name, and nothing is changed
LOCKSTEP_THREAD_TEST(ParallelizeModule, RefusesWhatItCannotDivide, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto model = built_from_seed([] { return Mlp(8, 12); }, 1);
  const auto weight = model->in->weight;
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"", RowwiseParallel()}}); },
               {"RowwiseParallel", "Mlp", "Linear and Embedding"});
  expect_error([&] { parallelize_module(*model, mesh, {{"in", SequenceParallel()}}); }, {"'in'", "LayerNorm"});
  EXPECT_TRUE(model->in->weight.is_same(weight));
  expect_error([&] { parallelize_module(*model, init_device_mesh("cpu", {1, 2}), {{"in", ColwiseParallel()}}); },
               {"one axis"});
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}}, {.src_data_rank = 7}); },
               {"src_data_rank is 7"});
  parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}}); }, {"'in.weight'", "already"});
}

// TP-42: tied parameters stay one, and need one placement
LOCKSTEP_THREAD_TEST(ParallelizeModule, KeepsTies, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  const auto build = [] {
    auto model = Mlp(8, 8);
    tie_parameter(*model->out, "weight", model->out->weight, model->in->weight);
    return model;
  };
  auto [model, whole] = pair_of(build);
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}}); },
               {"in.weight", "out.weight", "tied"});
  parallelize_module(*model, mesh,
                     {{"in", ColwiseParallel({.output_layouts = Replicate()})},
                      {"out", ColwiseParallel({.output_layouts = Replicate()})}});
  EXPECT_TRUE(model->in->named_parameters()["weight"].is_same(model->out->named_parameters()["weight"]));
  const auto x = built_from_seed([] { return at::randn({3, 8}); }, 2);
  model(x).pow(2).sum().backward();
  whole(x).pow(2).sum().backward();
  expect_parts(*model, *whole);
}

// TP-40, TP-42: what happens to the registered parameter later happens to the layer
LOCKSTEP_THREAD_TEST(ParallelizeModule, FollowsItsParameters, 2) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  const auto x = built_from_seed([] { return at::randn({3, 8}); }, 2);
  // Frozen and thawed.
  model->in->named_parameters()["weight"].set_requires_grad(false);
  model(x).sum().backward();
  EXPECT_FALSE(model->in->named_parameters()["weight"].grad().defined());
  EXPECT_TRUE(model->out->named_parameters()["weight"].grad().defined());
  model->in->named_parameters()["weight"].set_requires_grad(true);
  model->zero_grad();
  // Other memory.
  for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach().clone().mul_(2));
  for (auto& parameter : whole->parameters()) parameter.set_data(parameter.detach().clone().mul_(2));
  expect_trains_alike(model, whole, x, 1);
  // Another type.
  model->to(at::kDouble);
  whole->to(at::kDouble);
  expect_trains_alike(model, whole, x.to(at::kDouble), 1);
  // Without gradients, and back.
  {
    const at::NoGradGuard no_grad;
    expect_close("evaluated", model(x.to(at::kDouble)), whole(x.to(at::kDouble)));
  }
  expect_trains_alike(model, whole, x.to(at::kDouble), 1);
}

}  // namespace
}  // namespace lockstep
