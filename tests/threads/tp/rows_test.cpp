// What rows of the checklist promise of plans, styles and layers beside the values of a step: every option counts,
// every refusal names what it means and comes before anything is changed, and an input that is shared is still this
// one.
#include <atomic>

#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/nn/norms.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/tp/prepared.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep::tp_rows_test {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using ddp_models::Warnings;
using testing::expect_error;
using torch::nn::Linear;

at::Tensor batch(uint64_t seed, at::IntArrayRef sizes = {3, 8}) {
  return built_from_seed([&] { return at::randn(sizes); }, seed);
}

DeviceMesh line(const World& world) {
  return init_device_mesh("cpu", {world.world_size()});
}

at::Tensor mine(const at::Tensor& whole, const World& world, int64_t dim = 0) {
  return whole.chunk(world.world_size(), dim)[static_cast<std::size_t>(world.rank())].clone();
}

/// Two layers that may be given one input.
struct TwoImpl : torch::nn::Module {
  TwoImpl() : q(register_module("q", Linear(8, 6))), k(register_module("k", Linear(8, 6))) {}
  Linear q, k;
};
TORCH_MODULE(Two);

// TP-40, TP-41: what a plan names twice, what is not the layer's own, plans that differ in an option: refused before
// anything is changed
LOCKSTEP_THREAD_TEST(TpRows, PlansAreRefusedWhole, 2) {
  const auto mesh = line(world);
  auto model = built_from_seed([] { return Mlp(8, 12); });
  const auto weight = model->in->weight;
  const auto unchanged = [&] {
    EXPECT_TRUE(model->in->weight.is_same(weight));
    EXPECT_EQ(weight.sizes(), (at::IntArrayRef{12, 8}));
  };
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"i?", ColwiseParallel()}}); },
               {"two styles", "'in.weight'"});
  unchanged();
  const auto style = world.rank() == 0 ? Style(ColwiseParallel()) : Style(RowwiseParallel());
  expect_error([&] { parallelize_module(*model, mesh, {{"in", style}}); }, {"ColwiseParallel", "RowwiseParallel"});
  const Placement output = world.rank() == 0 ? Placement(Replicate()) : Placement(Shard(0));
  expect_error([&] { parallelize_module(*model, mesh, {{"in", RowwiseParallel({.output_layouts = output})}}); },
               {"Replicate()", "Shard(dim=0)"});
  unchanged();
  model->out->weight = at::ones({8, 12});
  expect_error([&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}}); },
               {"'out.weight'", "not the tensor the module computes with"});
  unchanged();
}

// TP-40: the token that matches nothing is named, and the path it is of; the rest is done
LOCKSTEP_THREAD_TEST(TpRows, TokensWithoutAMatchAreNamed, 2) {
  auto model = built_from_seed([] { return Mlp(8, 12); });
  const Warnings warnings;
  parallelize_module(*model, line(world), {{"layers.*.in", ColwiseParallel()}, {"i[nm]", ColwiseParallel()}});
  EXPECT_EQ(warnings.count("'layers' of 'layers.*.in' matches no module"), 1);
  EXPECT_TRUE(is_dtensor(model->in->weight));
}

// TP-40: a rank outside of the mesh
LOCKSTEP_THREAD_TEST(TpRows, RanksOutsideAreRefused, 3) {
  const auto mesh = init_device_mesh("cpu", {2});
  auto model = built_from_seed([] { return Mlp(8, 12); });
  const auto run = [&] { parallelize_module(*model, mesh, {{"in", ColwiseParallel()}}); };
  testing::expect_error_on_ranks(world, {2}, run, {"rank 2 is outside of", "a part of a layer"});
}

// TP-41, TP-42: another source than the first; gradients that were there stay, as parts
LOCKSTEP_THREAD_TEST(TpRows, SourcesAndGradientsCount, 2) {
  const auto mesh = line(world);
  auto whole = built_from_seed([] { return Mlp(8, 12); }, 2);
  auto model = built_from_seed([] { return Mlp(8, 12); }, 1 + world.rank());
  model(batch(1)).pow(2).sum().backward();
  whole(batch(1)).pow(2).sum().backward();
  const auto gradient = model->in->weight.grad().clone();
  parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}}, {.src_data_rank = 1});
  expect_close("gradient", model->in->named_parameters()["weight"].grad(), mine(gradient, world));
  model->zero_grad();
  whole->zero_grad();
  model(batch(1)).pow(2).sum().backward();
  whole(batch(1)).pow(2).sum().backward();
  expect_parts(*model, *whole);
}

// TP-43: an input that two layers share is looked at again when it was written, when gradients are recorded, and when
// the same layer asks
LOCKSTEP_THREAD_TEST(TpRows, SharedInputsAreThoseOfNow, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Two(); });
  const ColwiseParallel style({.input_layouts = Shard(0), .output_layouts = Replicate()});
  parallelize_module(*model, mesh, {{"[qk]", style}});
  const auto values = batch(1, {4, 8});
  {  // written, with a word to autograd
    const auto x = distribute_tensor(values, mesh, {Shard(0)}).tensor();
    const auto first = model->q(x);
    x.add_(1);
    expect_close("written", model->k(x), whole->k(values + 1));
  }
  {  // seen without gradients first
    auto leaf = mine(values, world).requires_grad_();
    auto leaf_whole = values.clone().requires_grad_();
    const auto x = DTensor::from_local(leaf, mesh, {Shard(0)}).tensor();
    at::Tensor first;
    {
      const at::NoGradGuard no_grad;
      first = model->q(x);
    }
    model->k(x).pow(2).sum().backward();
    whole->k(leaf_whole).pow(2).sum().backward();
    expect_close("gradient", leaf.grad(), mine(leaf_whole.grad(), world));
  }
  {  // written, without a word
    auto x = mine(values, world).requires_grad_();
    const auto first = model->q(x);
    x.data().add_(1);
    expect_close("asked again", model->q(x), whole->q(values + 1));
  }
}

// TP-35: each layer takes a plain input for what its own style says
LOCKSTEP_THREAD_TEST(TpRows, SharedInputsAreTakenAsEachLayerSays, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Two(); });
  parallelize_module(*model, mesh,
                     {{"q", ColwiseParallel({.output_layouts = Replicate()})},
                      {"k", ColwiseParallel({.input_layouts = Shard(0), .output_layouts = Replicate()})}});
  const auto x = batch(1).requires_grad_();
  const auto first = model->q(x);
  expect_close("whole", first, whole->q(x));
  expect_close("pieces", model->k(x), whole->k(at::cat({x, x})));
}

// TP-35: layouts of inputs and outputs, of all styles
LOCKSTEP_THREAD_TEST(TpRows, LayoutsOfInputsAndOutputsCount, 2) {
  const auto mesh = line(world);
  const auto x = batch(1, {4, 8});
  {
    auto [model, whole] = pair_of([] { return Linear(8, 6); });
    parallelize_module(*model, mesh, RowwiseParallel({.input_layouts = Replicate(), .output_layouts = Shard(0)}));
    expect_close("rowwise", model(x), mine(whole(x), world));
  }
  {
    auto [model, whole] = pair_of([] { return Linear(8, 6); });
    parallelize_module(*model, mesh, ColwiseParallel({.output_layouts = Shard(0)}));
    expect_close("colwise", model(x), mine(whole(x), world));
  }
  const auto sequence = batch(2, {4, 2, 8});
  {
    auto [model, whole] = pair_of([] { return nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {8}}); });
    parallelize_module(*model, mesh, SequenceParallel({.sequence_dim = 0, .use_local_output = true}));
    const auto out = model(mine(sequence, world));
    EXPECT_FALSE(is_dtensor(out));
    expect_close("norm", out, mine(whole(sequence), world));
  }
  {
    auto [model, whole] = pair_of([] { return nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {8}}); });
    parallelize_module(*model, mesh, SequenceParallel({.sequence_dim = 0}));
    const DTensor out(model(mine(sequence, world)));
    EXPECT_EQ(out.placements(), (Placements{Shard(0)}));
    expect_close("norm", out.full_tensor(), whole(sequence));
  }
}

// TP-34: the bias of pieces of a sequence, whose gradient is a sum over them; plain and in three dims, where libtorch
// adds it by itself
LOCKSTEP_THREAD_TEST(TpRows, BiasesOfCutSequencesAreSummed, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  parallelize_module(*model, mesh, {{"in", ColwiseParallel()}, {"out", RowwiseParallel({.output_layouts = Shard(1)})}});
  const auto x = batch(1, {2, 4, 8});
  const auto hidden = model->out(at::tanh(model->in(x)));
  const auto expected = whole->out(at::tanh(whole->in(x)));
  expect_close("output", hidden, mine(expected, world, 1));
  hidden.pow(2).sum().backward();
  expected.pow(2).sum().backward();
  expect_parts(*model, *whole);
}

// TP-37: a check of weights is made if asked for, and names the parameter
LOCKSTEP_THREAD_TEST(TpRows, WeightsOfNormsAreCompared, 2) {
  const auto mesh = line(world);
  torch::nn::Sequential model(nn::RMSNorm(nn::RMSNormOptions{.normalized_shape = {8}}));
  model->parameters()[0].data().add_(world.rank());
  expect_error([&] { parallelize_module(*model, mesh, {{"0", SequenceParallel({.check_weights = true})}}); },
               {"'0.weight'"});
  model->parameters()[0].data().fill_(1);
  parallelize_module(*model, mesh, {{"0", SequenceParallel({.check_weights = true})}});
}

// TP-33: an output that is two side by side
LOCKSTEP_THREAD_TEST(TpRows, FusedPartsMayBeTwo, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Linear(8, 12); });
  parallelize_module(*model, mesh, ColwiseParallel({.fused_parts = 2}));
  const auto x = batch(1);
  const DTensor out(model(x));
  EXPECT_EQ(out.placements(), (Placements{StridedShard(1, 2)}));
  const auto halves = out.tensor().chunk(2, 1);
  const auto expected = whole(x).chunk(2, 1);
  for (const std::size_t i : {0U, 1U}) {
    EXPECT_EQ(DTensor(halves[i]).placements(), (Placements{Shard(1)}));
    expect_close("half", DTensor(halves[i]).full_tensor(), expected[i]);
  }
}

// TP-35, TP-39: an input that lies on another mesh is refused by the layer's name
LOCKSTEP_THREAD_TEST(TpRows, InputsOnOtherMeshesAreRefused, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(batch(1), init_device_mesh("cpu", {1, 2})).tensor();
  torch::nn::Sequential model(Linear(8, 6));
  parallelize_module(*model, mesh, {{"0", ColwiseParallel()}});
  expect_error([&] { model->forward(x); }, {"'0' lies on", "input on"});
  Prepared<Linear> prepared(8, 6);
  prepared->prepare_input(mesh, {.input_layouts = {Replicate()}, .desired_input_layouts = {Replicate()}});
  expect_error([&] { prepared->forward(x); }, {"prepared on", "DTensor on"});
}

// TP-40: operators that a layer of the program's own calls with factors
LOCKSTEP_THREAD_TEST(TpRows, FactorsOfProductsCount, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Linear(8, 6); });
  parallelize_module(*model, mesh, ColwiseParallel({.output_layouts = Replicate()}));
  const auto x = batch(1);
  expect_close("addmm", at::addmm(model->bias, x, model->weight.t(), 3, 2),
               at::addmm(whole->bias, x, whole->weight.t(), 3, 2));
  // A handle without gradients is still the layer's.
  const at::NoGradGuard no_grad;
  expect_close("data", at::linear(x, model->weight.data(), model->bias.data()), whole(x));
}

// TP-45: what is kept of an input is cut along its longest dim
LOCKSTEP_THREAD_TEST(TpRows, KeptInputsAreCutAlongTheirLongestDim, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Linear(8, 6); });
  parallelize_module(*model, mesh, ColwiseParallel({.output_layouts = Replicate(), .input_reshard = true}));
  const auto x = batch(1, {1, 8});
  const auto y = model(x);
  testing::Recorder recorder;
  y.pow(2).sum().backward();
  whole(x).pow(2).sum().backward();
  expect_parts(*model, *whole);
  std::size_t bytes = 0;
  for (const auto& event : recorder.events("launch")) {
    if (event.kind == "all_gather_into_tensor") bytes += event.bytes;
  }
  EXPECT_EQ(bytes, 4 * sizeof(float)) << "half of the row is this rank's";
}

struct PlainImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen = x;
    return x * 2;
  }
  at::Tensor seen;
};
TORCH_MODULE(Plain);

// TP-39: counts of both sides are compared, a module is prepared once, and inside may be local while outside is not
LOCKSTEP_THREAD_TEST(TpRows, PreparationsAreCheckedAndCount, 2) {
  const auto mesh = line(world);
  expect_error(
      [] {
        PrepareModuleInputOutput({.input_layouts = {Replicate()},
                                  .desired_input_layouts = {Replicate()},
                                  .output_layouts = {Replicate()},
                                  .desired_output_layouts = {Replicate(), Replicate()}});
      },
      {"PrepareModuleInputOutput", "output_layouts has 1", "desired_output_layouts 2"});
  expect_error([] { PrepareModuleOutput({.output_layouts = {Replicate()}, .desired_output_layouts = {}}); },
               {"PrepareModuleOutput", "output_layouts has 1"});

  torch::nn::Sequential model{Prepared<Plain>()};
  const PrepareModuleOutput output({.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(0)}});
  parallelize_module(*model, mesh, {{"0", output}});
  expect_error([&] { parallelize_module(*model, mesh, {{"0", output}}); }, {"'0' has been prepared before"});
  expect_close("output", model->forward(batch(1, {4, 8})), mine(batch(1, {4, 8}) * 2, world));

  for (const bool is_local : {false, true}) {
    Prepared<Plain> both;
    parallelize_module(*both, mesh,
                       PrepareModuleInputOutput({.input_layouts = {Shard(0)},
                                                 .desired_input_layouts = {Replicate()},
                                                 .use_local_input = is_local,
                                                 .output_layouts = {Replicate()},
                                                 .desired_output_layouts = {Replicate()},
                                                 .use_local_output = !is_local}));
    const auto out = both->forward(batch(1));
    EXPECT_EQ(is_dtensor(both->seen), !is_local);
    EXPECT_EQ(is_dtensor(out), is_local);
    EXPECT_EQ(both->seen.size(0), 6);
  }
}

// TP-39: of a layer: without a desired layout the input stays as it is; what leaves is local, or a DTensor
LOCKSTEP_THREAD_TEST(TpRows, PreparedLayersKeepWhatIsNotAskedFor, 2) {
  const auto mesh = line(world);
  const auto x = batch(1, {4, 8});
  {
    auto [model, whole] = pair_of([] { return Linear(8, 6); });
    parallelize_module(*model, mesh,
                       PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {std::nullopt}}));
    const testing::Recorder recorder;
    const DTensor out(model(mine(x, world)));
    EXPECT_EQ(out.placements(), (Placements{Shard(0)}));
    EXPECT_TRUE(recorder.events("launch").empty());
    expect_close("output", out.full_tensor(), whole(x));
  }
  for (const bool is_local : {false, true}) {
    auto [model, whole] = pair_of([] { return Linear(8, 6); });
    parallelize_module(*model, mesh,
                       PrepareModuleInputOutput({.input_layouts = {Replicate()},
                                                 .desired_input_layouts = {Shard(0)},
                                                 .output_layouts = {Shard(0)},
                                                 .desired_output_layouts = {Replicate()},
                                                 .use_local_output = is_local}));
    const auto out = model(x);
    EXPECT_EQ(is_dtensor(out), !is_local);
    expect_close("output", is_local ? out : DTensor(out).to_local(), whole(x));
  }
}

// TP-32: a layer that leaves a DTensor does not wait for the others
TEST(TpRows, OutputsAreWaitedForWhereTheyAreUsed) {
  std::atomic<bool> has_returned = false;
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    const auto mesh = line(world);
    auto [model, whole] = pair_of([] { return Linear(torch::nn::LinearOptions(8, 6).bias(false)); });
    parallelize_module(*model, mesh, RowwiseParallel({.use_local_output = false}));
    const auto x = batch(1);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (world.rank() == 1 && !has_returned && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_TRUE(world.rank() == 0 || has_returned);
    const DTensor out(model(mine(x, world, 1)));
    if (world.rank() == 0) has_returned = true;
    expect_close("output", out.to_local(), whole(x));
  });
}

// TP-44: generators agree when layers are divided, so that a forward draws without a word to anyone
LOCKSTEP_THREAD_TEST(TpRows, GeneratorsAgreeBeforeTheFirstForward, 2) {
  const auto mesh = line(world);
  auto model = built_from_seed([] { return Mlp(8, 12); });
  parallelize_module(*model, mesh, {{"in", ColwiseParallel({.use_local_output = false})}});
  const auto x = distribute_tensor(batch(1), mesh).tensor();
  const testing::Recorder recorder;
  at::dropout(x, 0.5, true);
  EXPECT_TRUE(recorder.events("launch").empty());
}

}  // namespace
}  // namespace lockstep::tp_rows_test
