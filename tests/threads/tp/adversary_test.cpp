// What training programs do beside tensor parallelism, one thing per test, against one device: several steps, files,
// masks, hooks, ties, adapters, other modules, two axes.
#include <set>
#include <sstream>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/checkpointing/checkpointed.h"
#include "lockstep/comm/world.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/implicit_replication.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/fsdp/state_dict.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/loss_parallel.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/tp/prepared.h"
#include "tests/support/dtensor_line.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep::tp_adversary_test {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;
using testing::line;
namespace functional = torch::nn::functional;

ParallelPlan mlp_plan(const std::string& prefix = "") {
  return {{prefix + "in", ColwiseParallel()}, {prefix + "out", RowwiseParallel()}};
}

at::Tensor batch(uint64_t seed, at::IntArrayRef sizes = {3, 8}) {
  return built_from_seed([&] { return at::randn(sizes); }, seed);
}

DeviceMesh square() {
  return init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
}

at::Tensor whole_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

/// A leaf that each rank cuts from its own copy.
at::Tensor placed(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& placement) {
  return distribute_tensor(tensor, mesh, {placement}, {.src_data_rank = std::nullopt});
}

struct Pair {
  explicit Pair(const DeviceMesh& mesh, int64_t hidden = 12, int64_t width = 8, bool use_local_output = true) {
    std::tie(model, whole) = pair_of([&] { return Mlp(width, hidden); });
    parallelize_module(model, mesh,
                       {{"in", ColwiseParallel({.use_local_output = use_local_output})},
                        {"out", RowwiseParallel({.use_local_output = use_local_output})}});
  }
  template <class Function>
  void both(const Function& function) {
    function(model);
    function(whole);
  }
  void backward(const at::Tensor& x) {
    both([&](Mlp& each) { each(x).pow(2).sum().backward(); });
  }
  void expect_same() { expect_parts(*model, *whole); }
  Mlp model{nullptr};
  Mlp whole{nullptr};
};

/// What `action` gives; nothing if it is refused, by an error that says who speaks.
template <class Action>
std::optional<at::Tensor> given_or_refused(const std::string& name, bool is_refused, const Action& action) {
  try {
    const std::optional<at::Tensor> given = action();
    EXPECT_FALSE(is_refused) << name;
    return given;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_TRUE(is_refused) << name << ": " << text;
    EXPECT_NE(text.find("lockstep"), std::string::npos) << name << ": " << text;
    return std::nullopt;
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, AdamWWithGroupsAndAccumulationTrains, 3) {
  Pair pair(line(world), 10);
  const auto optimizer_of = [](Mlp& model) {
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> biases;
    for (auto& each : model->named_parameters()) {
      (each.key().find("bias") == std::string::npos ? weights : biases).push_back(each.value());
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(weights, std::make_unique<torch::optim::AdamWOptions>(
                                     torch::optim::AdamWOptions(0.05).weight_decay(0.1).amsgrad(true)));
    groups.emplace_back(biases,
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.01).weight_decay(0)));
    return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.05));
  };
  auto optimizer = optimizer_of(pair.model);
  auto of_whole = optimizer_of(pair.whole);
  torch::optim::StepLR schedule(*optimizer, 2, 0.5);
  torch::optim::StepLR of_whole_schedule(*of_whole, 2, 0.5);
  for (int step = 0; step < 4; ++step) {
    optimizer->zero_grad();
    of_whole->zero_grad();
    for (int part = 0; part < 3; ++part) {
      pair.both([&](Mlp& each) { (each(batch(step * 3 + part)).pow(2).mean() / 3).backward(); });
    }
    optimizer->step();
    of_whole->step();
    schedule.step();
    of_whole_schedule.step();
    pair.expect_same();
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, AStepThatThrewIsRetried, 2) {
  Pair pair(line(world));
  for (int attempt = 0; attempt < 2; ++attempt) {
    auto x = batch(1).clone().requires_grad_();
    auto hidden = at::tanh(pair.model->in(x));
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of patience"); });
    auto y = pair.model->out(hidden);
    expect_error([&] { y.sum().backward(); }, {"out of patience"});
    // And between the layers of a forward.
    expect_error(
        [&] {
          auto z = pair.model->in(x);
          throw std::runtime_error("forward");
        },
        {"forward"});
  }
  pair.model->zero_grad();
  pair.backward(batch(1));
  pair.expect_same();
}

// One input, seen with and without gradients in every order
LOCKSTEP_THREAD_TEST(TpAdversary, ForwardsForTheLogChangeNothing, 2) {
  Pair pair(line(world));
  std::vector<at::Tensor> gradients;
  pair.both([&](Mlp& each) {
    auto x = batch(1).clone();
    {
      const at::NoGradGuard no_grad;
      each(x);
    }
    x.requires_grad_();
    {
      const at::NoGradGuard no_grad;
      each(x);
    }
    auto y = each(x);
    {
      const c10::InferenceMode mode;
      each(x);
    }
    {
      const at::NoGradGuard no_grad;
      each->eval();
      each(x).mean();
      each(batch(2)).mean();
      each->train();
    }
    y.pow(2).sum().backward();
    each(x).pow(3).sum().backward();
    each(x.detach()).pow(2).sum().backward();
    gradients.push_back(x.grad().clone());
    x.set_requires_grad(false);
    each(x).pow(2).sum().backward();
    gradients.push_back(x.grad().clone());
  });
  expect_close("x", gradients[0], gradients[2]);
  expect_close("x", gradients[1], gradients[3]);
  pair.expect_same();
}

LOCKSTEP_THREAD_TEST(TpAdversary, PartsOfMembersAreUsed, 3) {
  const auto mesh = line(world);
  Pair pair(mesh, 10, 8, false);
  const std::vector<std::pair<std::string, std::function<at::Tensor(Mlp&, const at::Tensor&)>>> uses = {
      {"slice", [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight.slice(0, 1, 7)); }},
      {"slice with step", [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight.slice(0, 0, 10, 3)); }},
      {"row", [](Mlp& m, const at::Tensor& x) { return x.matmul(m->in->weight[4]); }},
      {"transposed", [](Mlp& m, const at::Tensor& x) { return x.matmul(m->in->weight.t()); }},
      {"chunk", [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight.chunk(3)[1]); }},
      {"column",
       [](Mlp& m, const at::Tensor& x) { return x.select(1, 2) * m->out->weight.select(1, 9).slice(0, 0, 3); }},
      {"gather rows",
       [](Mlp& m, const at::Tensor&) { return m->in->weight.index_select(0, at::tensor({1, 1, 8, 0}, at::kLong)); }},
      {"flat", [](Mlp& m, const at::Tensor&) { return m->in->weight.flatten().slice(0, 5, 50); }},
      {"product", [](Mlp& m, const at::Tensor& x) { return x.matmul(m->out->weight.matmul(m->in->weight)); }},
      {"cat", [](Mlp& m, const at::Tensor&) { return at::cat({m->in->weight, m->out->weight.t()}, 0); }},
      {"stack", [](Mlp& m, const at::Tensor&) { return at::stack({m->in->weight, m->out->weight.t()}, 1); }},
      {"normalised",
       [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight / m->in->weight.norm(2, {1}, true)); }},
      {"normalised by columns",
       [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight / m->in->weight.norm(2, {0}, true)); }},
      {"spectral", [](Mlp& m, const at::Tensor& x) { return at::linear(x, m->in->weight / m->in->weight.norm()); }},
  };
  for (const auto& [name, use] : uses) {
    pair.both([](Mlp& each) { each->zero_grad(); });
    const auto expected = use(pair.whole, batch(1));
    const auto mine = given_or_refused(name, name == "gather rows", [&] {
      auto y = use(pair.model, placed(batch(1), mesh, Replicate()));
      auto value = whole_of(y);
      value.pow(2).sum().backward();
      return value;
    });
    if (!mine) continue;
    expected.pow(2).sum().backward();
    expect_close(name, *mine, expected);
    SCOPED_TRACE(name);
    pair.expect_same();
  }
}

struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl()
      : table(register_module("table", torch::nn::Embedding(11, 6))),
        middle(register_module("middle", torch::nn::Linear(6, 6))),
        head(register_module("head", torch::nn::Linear(6, 11))) {
    tie_parameter(*head, "weight", head->weight, table->weight);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(at::tanh(middle(table(ids)))); }
  torch::nn::Embedding table;
  torch::nn::Linear middle;
  torch::nn::Linear head;
};
TORCH_MODULE(LanguageModel);

LOCKSTEP_THREAD_TEST(TpAdversary, ATiedHeadWithALossOverCutClassesTrains, 3) {
  auto [model, whole] = pair_of([] { return LanguageModel(); });
  parallelize_module(model, line(world),
                     {{"table", RowwiseParallel()}, {"head", ColwiseParallel({.use_local_output = false})}});
  torch::optim::AdamW optimizer(unique_parameters(*model), 0.05);
  torch::optim::AdamW of_whole(unique_parameters(*whole), 0.05);
  const auto class_weight = at::arange(1, 12).to(at::kFloat) / 5;
  for (int step = 0; step < 4; ++step) {
    const auto ids = built_from_seed([] { return at::randint(11, {7}, at::kLong); }, step);
    auto target = built_from_seed([] { return at::randint(11, {7}, at::kLong); }, 20 + step);
    target[2] = -100;
    auto options = functional::CrossEntropyFuncOptions();
    if (step % 2 == 1) options.reduction(torch::kSum);
    if (step >= 2) options.weight(class_weight);
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto expected = functional::cross_entropy(whole(ids), target, options);
    expected.backward();
    {
      const LossParallel scope;
      const auto logits = model(ids);
      auto mine = options;
      if (mine.weight().defined()) mine.weight(placed(class_weight, line(world), Replicate()));
      const auto loss = functional::cross_entropy(logits, target, mine);
      expect_close("loss", whole_of(loss), expected);
      loss.backward();
    }
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
    expect_parts(*model, *whole);
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, MasksOfLabelsCount, 2) {
  auto [model, whole] = pair_of([] { return LanguageModel(); });
  parallelize_module(model, line(world),
                     {{"table", RowwiseParallel()}, {"head", ColwiseParallel({.use_local_output = false})}});
  const auto ids = at::arange(8).view({2, 4});
  const auto target = at::arange(8).view({2, 4}).remainder(5) + 3;
  const auto mask = at::tensor({1, 1, 0, 1, 0, 1, 1, 0}, at::kFloat);
  const auto none = functional::CrossEntropyFuncOptions().reduction(torch::kNone);
  const std::vector<std::pair<std::string, std::function<at::Tensor(const at::Tensor&)>>> uses = {
      {"times a mask", [&](const at::Tensor& losses) { return (losses * mask).sum() / mask.sum(); }},
      {"masked_select", [&](const at::Tensor& losses) { return losses.masked_select(mask.to(at::kBool)).mean(); }},
      {"index", [&](const at::Tensor& losses) { return losses.index({mask.to(at::kBool)}).mean(); }},
      {"where",
       [&](const at::Tensor& losses) { return at::where(mask.to(at::kBool), losses, at::zeros_like(losses)).sum(); }},
      {"dot", [&](const at::Tensor& losses) { return losses.dot(mask); }},
      {"whole first", [&](const at::Tensor& losses) { return (whole_of(losses) * mask).sum() / mask.sum(); }},
  };
  for (const bool implicit : {false, true}) {
    for (const auto& [name, use] : uses) {
      model->zero_grad();
      whole->zero_grad();
      const auto mine = given_or_refused(name, name == "index" || (!implicit && name != "whole first"), [&] {
        const LossParallel scope;
        std::optional<ImplicitReplication> replication;
        if (implicit) replication.emplace();
        const auto logits = model(ids);
        const auto losses = functional::cross_entropy(logits.view({-1, 11}), target.view(-1), none);
        const auto loss = use(losses);
        loss.backward();
        return whole_of(loss);
      });
      if (!mine) continue;
      const auto expected = use(functional::cross_entropy(whole(ids).view({-1, 11}), target.view(-1), none));
      expected.backward();
      SCOPED_TRACE(name + (implicit ? " replicated" : ""));
      expect_close(name, *mine, expected);
      expect_parts(*model, *whole);
    }
  }
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double p = 0)
      : first(register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        drop(register_module("drop", Prepared<torch::nn::Dropout>(p))),
        in(register_module("in", torch::nn::Linear(8, 12))),
        out(register_module("out", torch::nn::Linear(12, 8))),
        last(register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto residual = x + drop(out(at::gelu(in(first(x)))));
    return last(residual) * 0.5 + residual;
  }
  torch::nn::LayerNorm first;
  Prepared<torch::nn::Dropout> drop;
  torch::nn::Linear in;
  torch::nn::Linear out;
  torch::nn::LayerNorm last;
};
TORCH_MODULE(Block);

ParallelPlan block_plan(bool use_local_output = false) {
  return {{"first", SequenceParallel()},
          {"drop", SequenceParallel({.use_local_output = use_local_output})},
          {"in", ColwiseParallel({.input_layouts = Shard(1), .use_local_output = false})},
          {"out", RowwiseParallel({.output_layouts = Shard(1), .use_local_output = use_local_output})},
          {"last", SequenceParallel({.use_local_output = use_local_output})}};
}

LOCKSTEP_THREAD_TEST(TpAdversary, ResidualsOfUnevenSequencesTrain, 3) {
  const auto mesh = line(world);
  for (const int64_t length : {6, 5, 2}) {
    auto [model, whole] = pair_of([] { return Block(); });
    parallelize_module(model, mesh, block_plan());
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1));
    torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      of_whole.zero_grad();
      const auto x = batch(step, {2, length, 8});
      auto loss = model(placed(x, mesh, Shard(1))).pow(2).mean();
      loss.backward();
      const auto expected = whole(x).pow(2).mean();
      expected.backward();
      expect_close("loss", whole_of(loss), expected);
      expect_parts(*model, *whole);
      optimizer.step();
      of_whole.step();
    }
  }
}

// Plain pieces, of which ranks have different lengths
LOCKSTEP_THREAD_TEST(TpAdversary, PlainPiecesOfUnevenSequencesAreRefused, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Block(); });
  parallelize_module(model, mesh, block_plan(true));
  const auto x = batch(1, {2, 5, 8});
  const auto piece = x.chunk(2, 1)[world.rank()];
  expect_error([&] { model(piece); }, {"disagree on the sizes", "[2, 2, 8]", "[2, 3, 8]"});
}

struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl()
      : base(register_module("base", torch::nn::Linear(8, 12))),
        down(register_module("down", torch::nn::Linear(torch::nn::LinearOptions(8, 2).bias(false)))),
        up(register_module("up", torch::nn::Linear(torch::nn::LinearOptions(2, 12).bias(false)))),
        out(register_module("out", torch::nn::Linear(12, 8))) {
    for (auto& each : base->parameters()) each.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(base(x) + up(down(x)))); }
  torch::nn::Linear base;
  torch::nn::Linear down;
  torch::nn::Linear up;
  torch::nn::Linear out;
};
TORCH_MODULE(Adapted);

ParallelPlan adapted_plan() {
  return {{"base", ColwiseParallel()}, {"up", ColwiseParallel()}, {"out", RowwiseParallel()}};
}

LOCKSTEP_THREAD_TEST(TpAdversary, FilesOfModuleAndOptimizerGoOn, 2) {
  auto [model, whole] = pair_of([] { return Adapted(); });
  parallelize_module(model, line(world), adapted_plan());
  torch::optim::AdamW of_whole(whole->parameters(), 0.05);
  std::stringstream model_file;
  std::stringstream optimizer_file;
  {
    torch::optim::AdamW optimizer(model->parameters(), 0.05);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      of_whole.zero_grad();
      model(batch(step)).pow(2).sum().backward();
      whole(batch(step)).pow(2).sum().backward();
      optimizer.step();
      of_whole.step();
    }
    torch::save(model, model_file);
    torch::save(optimizer, optimizer_file);
  }
  auto again = built_from_seed([] { return Adapted(); }, 99);
  parallelize_module(again, line(world), adapted_plan());
  torch::optim::AdamW optimizer(again->parameters(), 0.05);
  torch::load(again, model_file);
  torch::load(optimizer, optimizer_file);
  for (int step = 2; step < 4; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    again(batch(step)).pow(2).sum().backward();
    whole(batch(step)).pow(2).sum().backward();
    optimizer.step();
    of_whole.step();
    expect_parts(*again, *whole);
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, WholeStateGoesInAndOut, 3) {
  auto [model, whole] = pair_of([] { return Adapted(); });
  parallelize_module(model, line(world), adapted_plan());
  const auto state = full_state_dict(*model);
  for (const auto& each : whole->named_parameters()) expect_close(each.key(), state.at(each.key()), each.value());
  auto other = built_from_seed([] { return Adapted(); }, 77);
  ModuleState values;
  for (const auto& each : other->named_parameters()) values[each.key()] = each.value().detach().clone();
  load_full_state_dict(*model, values);
  model(batch(1)).pow(2).sum().backward();
  other(batch(1)).pow(2).sum().backward();
  expect_parts(*model, *other);
  // A file of the whole module, read the ordinary way: its values are not this rank's.
  std::stringstream file;
  torch::save(other, file);
  expect_error(
      [&] {
        torch::load(model, file);
        model(batch(1));
      },
      {"'up'", "[12, 2]", "[4, 2]"});
}

LOCKSTEP_THREAD_TEST(TpAdversary, AdaptersOfFrozenLayersTrain, 3) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Adapted(); });
  parallelize_module(model, mesh, adapted_plan());
  torch::optim::AdamW optimizer(model->parameters(), 0.05);
  torch::optim::AdamW of_whole(whole->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    model(batch(step)).pow(2).sum().backward();
    whole(batch(step)).pow(2).sum().backward();
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
  }
  // Into the weight itself, by plain factors.
  for (const bool implicit : {false, true}) {
    Pair pair(mesh);
    auto a = batch(5, {12, 2}).requires_grad_();
    auto b = batch(6, {2, 8}).requires_grad_();
    auto c = a.detach().clone().requires_grad_();
    auto d = b.detach().clone().requires_grad_();
    const auto mine = given_or_refused("weight + a b", !implicit, [&] {
      std::optional<ImplicitReplication> replication;
      if (implicit) replication.emplace();
      auto y = whole_of(at::linear(placed(batch(1), mesh, Replicate()), pair.model->in->weight + a.mm(b)));
      y.pow(2).sum().backward();
      return y;
    });
    if (!mine) continue;
    at::linear(batch(1), pair.whole->in->weight + c.mm(d)).pow(2).sum().backward();
    expect_close("a", whole_of(a.grad()), c.grad());
    expect_close("b", whole_of(b.grad()), d.grad());
    pair.expect_same();
  }
}

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : mlp(register_module("mlp", Mlp(8, 12))),
        norm(register_module("norm", torch::nn::BatchNorm1d(8))),
        lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 8).batch_first(true)))),
        head(register_module("head", torch::nn::Linear(8, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto recurrent = std::get<0>(lstm(x));
    const auto mixed = mlp(recurrent) + x;
    return head(norm(mixed.flatten(0, 1)));
  }
  Mlp mlp;
  torch::nn::BatchNorm1d norm;
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};
TORCH_MODULE(Normed);

LOCKSTEP_THREAD_TEST(TpAdversary, BatchNormAndLstmBesideDividedLayersTrain, 2) {
  auto [model, whole] = pair_of([] { return Normed(); });
  parallelize_module(model, line(world), mlp_plan("mlp."));
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  torch::optim::SGD of_whole(whole->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    model(batch(step, {2, 3, 8})).pow(2).sum().backward();
    whole(batch(step, {2, 3, 8})).pow(2).sum().backward();
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
  }
  expect_close("running mean", model->norm->running_mean, whole->norm->running_mean);
  model->eval();
  whole->eval();
  expect_close("evaluated", model(batch(9, {2, 3, 8})), whole(batch(9, {2, 3, 8})));
}

// A DTensor reaches modules that nobody has parallelized
LOCKSTEP_THREAD_TEST(TpAdversary, ModulesWithPlainWeightsRefuseDTensors, 2) {
  const auto mesh = line(world);
  const auto x = placed(batch(1, {4, 8}), mesh, Shard(1));
  expect_error([&] { torch::nn::Linear(8, 4)(x); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::BatchNorm1d(8)(x); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}))(x); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::Embedding(9, 4)(placed(at::arange(8), mesh, Shard(0))); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::PReLU()(x); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::GRU(8, 4)(x.view({4, 1, 8})); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::Conv1d(8, 4, 1)(x.view({4, 8, 1})); }, {"lockstep", "DTensor"});
  expect_error([&] { torch::nn::MultiheadAttention(8, 2)(x.view({4, 1, 8}), x.view({4, 1, 8}), x.view({4, 1, 8})); },
               {"lockstep", "DTensor"});
  expect_error([&] { (x * batch(1, {4, 8})).sum(); }, {"lockstep", "DTensor"});
  expect_error([&] { x.data_ptr<float>(); }, {"lockstep", "data pointer", "to_local()"});
}

struct TwoImpl : torch::nn::Module {
  TwoImpl() : first(register_module("first", Mlp(8, 12))), second(register_module("second", Mlp(8, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x)) + first(x); }
  Mlp first;
  Mlp second;
};
TORCH_MODULE(Two);

LOCKSTEP_THREAD_TEST(TpAdversary, LayersOnDifferentAxesTrain, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"a", "b"}});
  const auto all = init_device_mesh("cpu", {4});
  for (const bool world_wide : {false, true}) {
    auto [model, whole] = pair_of([] { return Two(); });
    parallelize_module(model->first, mesh["a"], mlp_plan());
    parallelize_module(model, world_wide ? all : mesh["b"], mlp_plan("second."));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      of_whole.zero_grad();
      const auto x = batch(step).clone().requires_grad_();
      const auto y = batch(step).clone().requires_grad_();
      model(x).pow(2).sum().backward();
      whole(y).pow(2).sum().backward();
      expect_close("x", x.grad(), y.grad());
      expect_parts(*model, *whole);
      const auto norm = clip_grad_norm_(model->parameters(), 1);
      EXPECT_NEAR(norm.item<double>(), torch::nn::utils::clip_grad_norm_(whole->parameters(), 1), 1e-3);
      expect_parts(*model, *whole);
      optimizer.step();
      of_whole.step();
    }
  }
}

void expect_state(torch::nn::Module& model, torch::nn::Module& whole, double tolerance = 1e-4) {
  const auto state = full_state_dict(model);
  for (const auto& each : whole.named_parameters()) {
    EXPECT_TRUE(at::allclose(state.at(each.key()), each.value(), tolerance, tolerance)) << each.key();
  }
}

void train_on_two_axes(const DeviceMesh& tp, FullyShardOptions options, int data_rank, int data_ranks, bool saves_sync,
                       double tolerance = 1e-4) {
  auto [model, whole] = pair_of([] { return Two(); });
  parallelize_module(model, tp, {{"*.in", ColwiseParallel()}, {"*.out", RowwiseParallel()}});
  fully_shard(model->first, options);
  auto root = fully_shard(model, options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
  torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    for (int part = 0; part < 2; ++part) {
      const auto x = batch(step * 2 + part, {4, 8});
      std::optional<FsdpNoSync> guard;
      if (part == 0 && saves_sync) guard.emplace(root.no_sync());
      model(x.chunk(data_ranks)[data_rank]).to(at::kFloat).pow(2).mean().backward();
      whole(x).pow(2).mean().backward();
      const at::NoGradGuard no_grad;
      model(x.chunk(data_ranks)[data_rank]);
    }
    clip_grad_norm_(model->parameters(), 0.5);
    torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5);
    optimizer.step();
    of_whole.step();
    expect_state(*model, *whole, tolerance);
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, ShardedDataTrainsInAllItsWays, 4) {
  const auto mesh = square();
  const int rank = mesh.get_local_rank("dp");
  for (const bool reshards : {true, false}) {
    for (const bool saves_sync : {true, false}) {
      train_on_two_axes(mesh["tp"], {.mesh = mesh["dp"], .reshard_after_forward = reshards}, rank, 2, saves_sync);
    }
  }
  train_on_two_axes(mesh["tp"], {.mesh = mesh["dp"], .offload_policy = CPUOffloadPolicy{}}, rank, 2, true);
  train_on_two_axes(mesh["tp"],
                    {.mesh = mesh["dp"], .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}, rank,
                    2, true, 3e-2);
}

LOCKSTEP_THREAD_TEST(TpAdversary, HybridShardsTrain, 8) {
  const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"replica", "shard", "tp"}});
  const int rank = mesh.get_local_rank("replica") * 2 + mesh.get_local_rank("shard");
  train_on_two_axes(mesh["tp"], {.mesh = mesh.slice({"replica", "shard"})}, rank, 4, true);
}

LOCKSTEP_THREAD_TEST(TpAdversary, CheckpointedLayersTrainInsideOfDdp, 4) {
  const auto mesh = square();
  using Part = CheckpointedImpl<MlpImpl>;
  const auto build = [] {
    auto model = torch::nn::Sequential();
    model->push_back("a", std::make_shared<Part>(8, 12));
    model->push_back("b", std::make_shared<Part>(8, 6));
    return model;
  };
  auto model = built_from_seed(build, 1);
  auto whole = built_from_seed(build, 1);
  parallelize_module(model, mesh["tp"], {{"*.in", ColwiseParallel()}, {"*.out", RowwiseParallel()}});
  DistributedDataParallel<torch::nn::Sequential> ddp(model, mesh["dp"].get_group());
  torch::optim::AdamW optimizer(model->parameters(), 0.05);
  torch::optim::AdamW of_whole(whole->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto x = batch(step, {4, 8});
    const auto y = batch(step + 10, {4, 8});
    {
      auto guard = ddp.no_sync();
      ddp(x.chunk(2)[mesh.get_local_rank("dp")].clone().requires_grad_()).pow(2).mean().backward();
    }
    ddp(y.chunk(2)[mesh.get_local_rank("dp")].clone().requires_grad_()).pow(2).mean().backward();
    whole->forward(x.clone().requires_grad_()).pow(2).mean().backward();
    whole->forward(y.clone().requires_grad_()).pow(2).mean().backward();
    expect_parts(*model, *whole);
    clip_grad_value_(model->parameters(), 0.05);
    torch::nn::utils::clip_grad_value_(whole->parameters(), 0.05);
    optimizer.step();
    of_whole.step();
    expect_parts(*model, *whole);
  }
}

// An overflow in the part of one rank
LOCKSTEP_THREAD_TEST(TpAdversary, AnOverflowOnOneRankLeavesOutTheStepOnAll, 2) {
  Pair pair(line(world));
  torch::optim::SGD optimizer(pair.model->parameters(), 0.1);
  torch::optim::SGD of_whole(pair.whole->parameters(), 0.1);
  GradScaler scaler({.device = at::kCPU, .init_scale = 1024});
  GradScaler of_whole_scaler({.device = at::kCPU, .init_scale = 1024});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    scaler.scale(pair.model(batch(step)).pow(2).sum()).backward();
    of_whole_scaler.scale(pair.whole(batch(step)).pow(2).sum()).backward();
    if (step == 1) {
      if (world.rank() == 1) pair.model->in->named_parameters()["weight"].mutable_grad()[5][1] = INFINITY;
      pair.whole->in->weight.mutable_grad()[11][1] = INFINITY;
    }
    scaler.unscale_(optimizer);
    of_whole_scaler.unscale_(of_whole);
    if (step != 1) {
      clip_grad_norm_(pair.model->parameters(), 1);
      torch::nn::utils::clip_grad_norm_(pair.whole->parameters(), 1);
    }
    scaler.step(optimizer);
    of_whole_scaler.step(of_whole);
    scaler.update();
    of_whole_scaler.update();
    EXPECT_EQ(scaler.get_scale(), of_whole_scaler.get_scale());
    if (step != 1) pair.expect_same();
  }
  optimizer.zero_grad();
  of_whole.zero_grad();
  pair.expect_same();
}

LOCKSTEP_THREAD_TEST(TpAdversary, AveragesOfWeightsAreKeptAndUsed, 2) {
  Pair pair(line(world));
  torch::optim::SGD optimizer(pair.model->parameters(), 0.1);
  torch::optim::SGD of_whole(pair.whole->parameters(), 0.1);
  std::map<Mlp*, std::vector<at::Tensor>> averages;
  pair.both([&](Mlp& each) {
    for (auto& parameter : each->parameters()) averages[&each].push_back(parameter.detach().clone());
  });
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    pair.backward(batch(step));
    optimizer.step();
    of_whole.step();
    pair.both([&](Mlp& each) {
      const at::NoGradGuard no_grad;
      size_t i = 0;
      for (auto& parameter : each->parameters()) averages[&each][i++].lerp_(parameter, 0.3);
    });
  }
  pair.both([&](Mlp& each) {
    const at::NoGradGuard no_grad;
    size_t i = 0;
    for (auto& parameter : each->parameters()) parameter.copy_(averages[&each][i++]);
  });
  pair.expect_same();
  expect_close("averaged", pair.model(batch(7)), pair.whole(batch(7)));
  // Through one vector, as some do.
  pair.both([&](Mlp& each) {
    const at::NoGradGuard no_grad;
    auto all = torch::nn::utils::parameters_to_vector(each->parameters());
    torch::nn::utils::vector_to_parameters(all * 0.5, each->parameters());
  });
  pair.model->zero_grad();
  pair.whole->zero_grad();
  pair.backward(batch(8));
  pair.expect_same();
}

// A clone would compute with this rank's parts as if they were layers of that size
LOCKSTEP_THREAD_TEST(TpAdversary, ClonesOfDividedLayersAreRefused, 2) {
  const auto build = [] {
    return torch::nn::Sequential(torch::nn::Linear(8, 12), torch::nn::Tanh(), torch::nn::Linear(12, 8));
  };
  auto [model, whole] = pair_of(build);
  parallelize_module(model, line(world), {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
  expect_error([&] { model->clone(); }, {"cloned module", "buffers"});
  expect_error([&] { model->ptr<torch::nn::LinearImpl>(2)->clone(); }, {"cloned module", "buffers"});
  EXPECT_TRUE(model->named_buffers().is_empty());
  std::stringstream file;
  torch::save(model, file);
  torch::load(model, file);
  model->to(at::kDouble);
  model->to(at::kFloat);
  expect_close("original", model->forward(batch(1)), whole->forward(batch(1)));
}

using Loss = std::function<at::Tensor(const at::Tensor&)>;

LOCKSTEP_THREAD_TEST(TpAdversary, LossesOfCutOutputsAreThoseOfOneDevice, 3) {
  const auto mesh = line(world);
  const auto scalar = at::scalar_tensor(0.7);
  const auto index = at::tensor({0, 3, 3, 1}, at::kLong);
  const std::vector<std::pair<std::string, Loss>> losses = {
      {"mean", [](const at::Tensor& y) { return y.mean(); }},
      {"sum plus number", [](const at::Tensor& y) { return y.sum() + 3.5; }},
      {"number in place",
       [](const at::Tensor& y) {
         auto total = y.sum() * 1;
         total += 3;
         total -= 0.5;
         return total.pow(2);
       }},
      {"number minus sum", [](const at::Tensor& y) { return 2 - y.sum(); }},
      {"sum times number", [](const at::Tensor& y) { return y.sum() * 0.3 + y.mean() / 2; }},
      {"sum of squares minus mean", [](const at::Tensor& y) { return y.pow(2).sum() - y.mean(); }},
      {"squared sum", [](const at::Tensor& y) { return y.sum().pow(2); }},
      {"exp of sum", [](const at::Tensor& y) { return y.mean().exp(); }},
      {"abs of sum", [](const at::Tensor& y) { return y.sum().abs(); }},
      {"clamp of sum", [](const at::Tensor& y) { return (y.sum() + 1).clamp_min(0.1); }},
      {"one over sum", [](const at::Tensor& y) { return 1 / y.pow(2).sum(); }},
      {"times plain scalar", [&](const at::Tensor& y) { return y.pow(2).mean() * scalar; }},
      {"plus plain scalar", [&](const at::Tensor& y) { return y.pow(2).mean() + scalar; }},
      {"product of sums", [](const at::Tensor& y) { return y.sum() * y.pow(2).sum(); }},
      {"mean of last", [](const at::Tensor& y) { return y.mean(-1).pow(2).sum(); }},
      {"max", [](const at::Tensor& y) { return y.max(); }},
      {"max of dim", [](const at::Tensor& y) { return std::get<0>(y.max(-1)).sum(); }},
      {"amax", [](const at::Tensor& y) { return y.amax({1}).pow(2).sum(); }},
      {"min", [](const at::Tensor& y) { return y.min() * 2; }},
      {"norm", [](const at::Tensor& y) { return y.norm(); }},
      {"1-norm", [](const at::Tensor& y) { return y.norm(1); }},
      {"norm of rows", [](const at::Tensor& y) { return y.norm(2, {-1}).sum(); }},
      {"cumsum", [](const at::Tensor& y) { return y.cumsum(-1).pow(2).sum(); }},
      {"cumprod", [](const at::Tensor& y) { return y.cumprod(-1).sum(); }},
      {"index rows", [&](const at::Tensor& y) { return y.index({index.remainder(3)}).pow(2).sum(); }},
      {"index columns", [&](const at::Tensor& y) { return y.index({at::indexing::Slice(), index}).pow(2).sum(); }},
      {"index by mask", [](const at::Tensor& y) { return y.index({y > 0}).pow(2).sum(); }},
      {"masked_select", [](const at::Tensor& y) { return y.masked_select(y.gt(0.1)).sum(); }},
      {"where", [](const at::Tensor& y) { return at::where(y > 0, y, y * 0.1).sum(); }},
      {"masked_fill", [](const at::Tensor& y) { return y.masked_fill(y < 0, 0.3).pow(2).sum(); }},
      {"softmax", [](const at::Tensor& y) { return y.softmax(-1).pow(2).sum(); }},
      {"logsumexp", [](const at::Tensor& y) { return y.logsumexp(-1).sum(); }},
      {"var", [](const at::Tensor& y) { return y.var(); }},
      {"var of rows", [](const at::Tensor& y) { return y.var({-1}, true).sum(); }},
      {"std", [](const at::Tensor& y) { return y.std(); }},
      {"prod", [](const at::Tensor& y) { return (y.sigmoid() + 0.5).prod(); }},
      {"topk", [](const at::Tensor& y) { return std::get<0>(y.topk(3)).sum(); }},
      {"sort", [](const at::Tensor& y) { return (std::get<0>(y.sort(-1)).cumsum(-1)).pow(2).sum(); }},
      {"flip", [](const at::Tensor& y) { return (y.flip({1}) * y.cumsum(1)).sum(); }},
      {"roll", [](const at::Tensor& y) { return (y.roll(2, 1) * y).sum(); }},
      {"shift", [](const at::Tensor& y) { return (y.slice(1, 1) - y.slice(1, 0, -1)).pow(2).sum(); }},
      {"gram", [](const at::Tensor& y) { return y.mm(y.t()).pow(2).sum(); }},
      {"trace", [](const at::Tensor& y) { return y.mm(y.t()).trace(); }},
      {"cosine", [](const at::Tensor& y) { return at::cosine_similarity(y.slice(0, 0, 2), y.slice(0, 1, 3), -1).sum(); }},
      {"mse to detached", [](const at::Tensor& y) { return at::mse_loss(y, y.detach() * 0.5); }},
      {"huber", [](const at::Tensor& y) { return at::huber_loss(y, at::zeros_like(y)); }},
      {"smooth l1", [](const at::Tensor& y) { return at::smooth_l1_loss(y, at::ones_like(y)); }},
      {"bce", [](const at::Tensor& y) { return at::binary_cross_entropy_with_logits(y, at::ones_like(y)); }},
      {"kl", [](const at::Tensor& y) { return at::kl_div(y.log_softmax(-1), at::softmax(y.detach() * 2, -1)); }},
      {"nan_to_num", [](const at::Tensor& y) { return y.nan_to_num().sum(); }},
      {"unfold", [](const at::Tensor& y) { return y.unfold(1, 2, 2).pow(2).sum(); }},
      {"einsum", [](const at::Tensor& y) { return at::einsum("ij,kj->ik", {y, y}).sum(); }},
      {"outer", [](const at::Tensor& y) { return at::outer(y[0], y[1]).pow(2).sum(); }},
      {"repeat", [](const at::Tensor& y) { return y.repeat({2, 1}).pow(2).sum(); }},
      {"pad", [](const at::Tensor& y) { return at::constant_pad_nd(y, {1, 1}, 2.0).pow(2).sum(); }},
      {"median", [](const at::Tensor& y) { return y.median(); }},
      {"item as weight", [](const at::Tensor& y) { return y.sum() * y.abs().max().item<double>(); }},
      {"detached weight", [](const at::Tensor& y) { return (y * y.detach().abs().mean()).sum(); }},
      {"in place", [](const at::Tensor& y) { return y.clone().mul_(2).add_(1).relu_().pow(2).sum(); }},
      {"accumulated",
       [](const at::Tensor& y) {
         auto total = y.sum() * 0.5;
         total += y.pow(2).sum();
         total = total + 1;
         return total;
       }},
      {"accumulated in a plain tensor",
       [](const at::Tensor& y) {
         auto total = at::zeros({});
         total = total + y.sum();
         return total;
       }},
      {"written slice",
       [](const at::Tensor& y) {
         auto z = y.clone();
         z.slice(0, 0, 1).mul_(3);
         return z.pow(2).sum();
       }},
      {"chunk and swiglu",
       [](const at::Tensor& y) {
         const auto parts = y.chunk(2, -1);
         return (at::silu(parts[0]) * parts[1]).sum();
       }},
      {"dropout of nothing", [](const at::Tensor& y) { return at::dropout(y, 0.0, true).sum(); }},
      {"argmax as index", [](const at::Tensor& y) { return y.gather(-1, y.argmax(-1, true)).sum(); }},
      {"scatter", [](const at::Tensor& y) { return at::zeros_like(y).scatter(1, y.argmax(-1, true), 1.0).mul(y).sum(); }},
      {"one of mean and max", [](const at::Tensor& y) { return at::maximum(y.mean(), y.max()); }},
      {"stacked losses", [](const at::Tensor& y) { return at::stack({y.sum(), y.mean(), y.max()}).pow(2).sum(); }},
      {"float and double", [](const at::Tensor& y) { return y.to(at::kDouble).pow(2).sum().to(at::kFloat); }},
      {"sum in double", [](const at::Tensor& y) { return at::sum(y, at::kDouble).to(at::kFloat).pow(2); }},
  };
  // Plain tensors beside DTensors, numbers of elements that values decide, operators without a rule.
  const std::set<std::string> refused = {"index rows", "index columns", "index by mask", "masked_select", "trace"};
  for (const auto& placement : std::vector<Placement>{Shard(-1), Shard(0), Replicate()}) {
    auto [model, whole] = pair_of([] { return torch::nn::Linear(8, 10); });
    parallelize_module(model, mesh, ColwiseParallel({.output_layouts = placement, .use_local_output = false}));
    for (const auto& [name, loss] : losses) {
      model->zero_grad();
      whole->zero_grad();
      const auto label = name + " of " + to_string(Placements{placement});
      const bool is_refused = refused.contains(name) || (name == "written slice" && placement == Placement(Shard(0)));
      const auto mine = given_or_refused(label, is_refused, [&] {
        const auto value = loss(model(batch(1)));
        value.backward();
        return whole_of(value).detach();
      });
      if (!mine) continue;
      SCOPED_TRACE(label);
      const auto expected = loss(whole(batch(1)));
      expected.backward();
      expect_close(label, *mine, expected.detach());
      expect_parts(*model, *whole);
    }
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, MetricsAreThoseOfAllClasses, 3) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return torch::nn::Linear(8, 10); });
  parallelize_module(model, mesh, ColwiseParallel({.use_local_output = false}));
  const auto x = batch(1, {6, 8});
  const auto target = at::tensor({0, 3, 9, 2, 5, 7}, at::kLong);
  const at::NoGradGuard no_grad;
  const auto y = model(x);
  const auto z = whole(x);
  expect_close("argmax", whole_of(y.argmax(-1)).to(at::kFloat), z.argmax(-1).to(at::kFloat));
  expect_close("argmax of all", whole_of(y.argmax()).to(at::kFloat), z.argmax().to(at::kFloat));
  expect_error([&] { y.argmax(-1) == target; }, {"lockstep", "aten::eq", "ImplicitReplication"});
  {
    const ImplicitReplication replicated;
    EXPECT_EQ((y.argmax(-1) == target).sum().item<int64_t>(), (z.argmax(-1) == target).sum().item<int64_t>());
    expect_close("index", whole_of(y.index({target.remainder(6)})), z.index({target.remainder(6)}));
    expect_close("index of columns", whole_of(y.index({at::indexing::Slice(), target})),
                 z.index({at::indexing::Slice(), target}));
  }
  EXPECT_EQ(y.max().item<float>(), z.max().item<float>());
  EXPECT_NEAR(y.sum().item<float>(), z.sum().item<float>(), 1e-4);
  EXPECT_NEAR(y[2][9].item<float>(), z[2][9].item<float>(), 1e-5);
  EXPECT_FALSE(y.isnan().any().item<bool>());
  EXPECT_TRUE(y.isfinite().all().item<bool>());
  EXPECT_EQ((y > 0).sum().item<int64_t>(), (z > 0).sum().item<int64_t>());
  EXPECT_EQ(y.numel(), z.numel());
  EXPECT_TRUE(at::equal(y, y.clone()));
  auto other = y.clone();
  if (world.rank() == 2) DTensor(other).to_local()[0][0] = 100;
  EXPECT_FALSE(at::equal(y, other));
  const auto near = std::get<1>(y.topk(3, -1));
  expect_close("topk", whole_of(near).to(at::kFloat), std::get<1>(z.topk(3, -1)).to(at::kFloat));
  expect_error([&] { at::bincount(y.argmax(-1), {}, 10); }, {"lockstep", "aten::bincount"});
  expect_error([&] { at::multinomial(y.softmax(-1), 1); }, {"lockstep", "aten::multinomial"});
  expect_error([&] { y.accessor<float, 2>(); }, {"data pointer"});
  expect_close("cpu", whole_of(y.cpu().contiguous()), z);
}

LOCKSTEP_THREAD_TEST(TpAdversary, WeightsAreWrittenThroughMembers, 3) {
  const auto mesh = line(world);
  const auto values = batch(3, {10, 8});
  using Write = std::function<void(Mlp&)>;
  const std::vector<std::pair<std::string, Write>> writes = {
      {"mul", [](Mlp& m) { m->in->weight.mul_(0.5); }},
      {"slice", [](Mlp& m) { m->in->weight.slice(0, 2, 9).zero_(); }},
      {"row", [](Mlp& m) { m->in->weight[3].fill_(0.25); }},
      {"column", [](Mlp& m) { m->in->weight.select(1, 3).fill_(0.25); }},
      {"row of cut columns", [](Mlp& m) { m->out->weight[3].mul_(2); }},
      {"columns of cut columns", [](Mlp& m) { m->out->weight.slice(1, 2, 4).mul_(2); }},
      {"masked", [](Mlp& m) { m->in->weight.masked_fill_(m->in->weight < 0, 0.1); }},
      {"clamp", [](Mlp& m) { m->out->weight.clamp_(-0.1, 0.1); }},
      {"whole values", [&](Mlp& m) { m->in->weight.copy_(values); }},
      {"each other", [](Mlp& m) { m->in->weight.copy_(m->out->weight.t()); }},
      {"added", [](Mlp& m) { m->in->weight.add_(m->out->weight.t(), 0.5); }},
      {"normalised rows", [](Mlp& m) { m->in->weight.div_(m->in->weight.norm(2, {1}, true)); }},
      {"normalised columns", [](Mlp& m) { m->in->weight.div_(m->in->weight.norm(2, {0}, true)); }},
      {"renorm", [](Mlp& m) { m->in->weight.renorm_(2, 0, 0.3); }},
      {"index_fill", [](Mlp& m) { m->in->weight.index_fill_(0, at::tensor({1, 8}, at::kLong), 0.5); }},
      {"index_put", [](Mlp& m) { m->in->weight.index_put_({at::tensor({1, 8}, at::kLong)}, at::scalar_tensor(0.5)); }},
      {"transposed", [](Mlp& m) { m->in->weight.t().mul_(2); }},
      {"data", [](Mlp& m) { m->in->weight.data().mul_(2); }},
      {"detached", [](Mlp& m) { m->in->weight.detach().mul_(2); }},
      {"constant", [](Mlp& m) { torch::nn::init::constant_(m->in->weight, 0.3); }},
      {"eye", [](Mlp& m) { torch::nn::init::eye_(m->in->weight); }},
      {"foreach", [](Mlp& m) { at::_foreach_mul_({m->in->weight, m->out->weight}, 0.5); }},
      {"lerp", [](Mlp& m) { m->in->weight.lerp_(m->out->weight.t(), 0.25); }},
      {"nested", [](Mlp& m) { m->in->weight.view({5, 2, 8}).select(1, 0).zero_(); }},
      {"triu", [](Mlp& m) { m->in->weight.triu_(); }},
      {"orthogonal", [](Mlp& m) { m->in->weight.copy_(std::get<0>(at::linalg_qr(m->in->weight))); }},
  };
  // Views that had to be copied, plain tensors, operators without a rule.
  const std::set<std::string> refused = {"slice",        "row",    "columns of cut columns",
                                         "whole values", "renorm", "index_fill",
                                         "index_put",    "eye",    "orthogonal"};
  for (const auto& [name, write] : writes) {
    Pair pair(mesh, 10);
    const auto done = given_or_refused("written " + name, refused.contains(name), [&] {
      const at::NoGradGuard no_grad;
      write(pair.model);
      return at::Tensor();
    });
    if (done) {
      const at::NoGradGuard no_grad;
      write(pair.whole);
    }
    SCOPED_TRACE(name);
    pair.backward(batch(1));
    pair.expect_same();
  }
}

LOCKSTEP_THREAD_TEST(TpAdversary, GradientsAreAskedForAndHooked, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  parallelize_module(
      model, mesh,
      {{"in", ColwiseParallel({.use_local_output = false})}, {"out", RowwiseParallel({.use_local_output = false})}});
  std::vector<std::vector<at::Tensor>> seen(2);
  const auto run = [&](Mlp& each, std::vector<at::Tensor>& to, const at::Tensor& x) {
    auto hidden = each->in(x);
    hidden.retain_grad();
    hidden.register_hook([&](const at::Tensor& gradient) { return gradient * 2; });
    auto y = each->out(at::tanh(hidden));
    const auto loss = whole_of(y).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {x, hidden}, {}, true, true);
    to.push_back(whole_of(first[0]).detach());
    to.push_back(whole_of(first[1]).detach());
    const auto slope = whole_of(first[0]).pow(2).sum();
    (loss + slope).backward();
    to.push_back(whole_of(hidden.grad()));
    to.push_back(whole_of(x.grad()));
  };
  run(model, seen[0], batch(1).clone().requires_grad_());
  run(whole, seen[1], batch(1).clone().requires_grad_());
  for (size_t i = 0; i < seen[0].size(); ++i) expect_close("gradient " + std::to_string(i), seen[0][i], seen[1][i]);
  expect_parts(*model, *whole);
  // With respect to what is registered, or to the member that stands for it.
  Pair pair(mesh);
  const auto expected = torch::autograd::grad({pair.whole(batch(2)).pow(2).sum()}, {pair.whole->in->weight})[0];
  const auto loss = pair.model(batch(2)).pow(2).sum();
  const auto of_member = torch::autograd::grad({loss}, {pair.model->in->weight}, {}, true)[0];
  expect_close("member", of_member, expected.chunk(2)[world.rank()]);
  const auto mine = torch::autograd::grad({loss}, {pair.model->in->named_parameters()["weight"]})[0];
  expect_close("registered", mine, expected.chunk(2)[world.rank()]);
}

LOCKSTEP_THREAD_TEST(TpAdversary, InferenceBetweenStepsChangesNothing, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] { return Block(); });
  parallelize_module(model, mesh, block_plan());
  for (int step = 0; step < 2; ++step) {
    const auto x = batch(step, {2, 4, 8});
    {
      const c10::InferenceMode mode;
      expect_close("inferred", whole_of(model(placed(x, mesh, Shard(1)))), whole(x));
    }
    const auto input = placed(x, mesh, Shard(1));
    model(input).pow(2).sum().backward();
    whole(x).pow(2).sum().backward();
    expect_parts(*model, *whole);
    const c10::InferenceMode mode;
    expect_close("inferred", whole_of(model(input.detach())), whole(x));
    // Views that share memory, and views that had to be copied.
    expect_close("transposed", whole_of(input.transpose(0, 1)), x.transpose(0, 1));
    expect_close("slice", whole_of(input.slice(1, 1, 3).mul(2)), x.slice(1, 1, 3) * 2);
    expect_close("row", whole_of(input.select(1, 2)), x.select(1, 2));
    expect_close("weight", whole_of(model->in->weight.t().slice(1, 1, 9)), whole->in->weight.t().slice(1, 1, 9));
  }
}

LOCKSTEP_PROCESS_TEST(TpAdversary, SeedsGiveTheValuesOfOneDevice, 2) {
  const auto mesh = line(world);
  const auto x = batch(1, {2, 5, 8});
  for (int round = 0; round < 2; ++round) {
    torch::manual_seed(40 + round);
    const auto drawn = dtensor::randn({5, 6}, {.mesh = mesh, .placements = {Shard(0)}});
    const auto more = at::rand_like(drawn);
    torch::manual_seed(40 + round);
    expect_close("randn", drawn.full_tensor(), at::randn({5, 6}));
    expect_close("rand_like", whole_of(more), at::rand({5, 6}));
    auto [model, whole] = pair_of([] { return Block(0.5); });
    parallelize_module(model, mesh, block_plan());
    torch::manual_seed(50 + round);
    const auto y = model(placed(x, mesh, Shard(1)));
    torch::manual_seed(50 + round);
    const auto expected = whole(x);
    expect_close("dropout", whole_of(y), expected);
    y.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    expect_parts(*model, *whole);
    // Members that are initialised again.
    auto [mlp, plain] = pair_of([] { return Mlp(8, 10); });
    parallelize_module(mlp, mesh, mlp_plan());
    for (auto* each : {&mlp, &plain}) {
      torch::manual_seed(60 + round);
      torch::nn::init::xavier_uniform_((*each)->in->weight);
      torch::nn::init::kaiming_normal_((*each)->out->weight);
      torch::nn::init::normal_((*each)->out->bias);
    }
    expect_parts(*mlp, *plain);
    expect_close("initialised", mlp(batch(3)), plain(batch(3)));
  }
}

void train_small(const World& world, int64_t hidden) {
  Pair pair(line(world), hidden);
  torch::optim::AdamW optimizer(pair.model->parameters(), 0.05);
  torch::optim::AdamW of_whole(pair.whole->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    pair.backward(batch(step));
    const auto norm = clip_grad_norm_(optimizer, 1);
    EXPECT_NEAR(norm.item<double>(), torch::nn::utils::clip_grad_norm_(pair.whole->parameters(), 1), 1e-3);
    optimizer.step();
    of_whole.step();
    pair.expect_same();
  }
  expect_state(*pair.model, *pair.whole);
}

LOCKSTEP_THREAD_TEST(TpAdversary, OneRankTrains, 1) {
  train_small(world, 5);
}
LOCKSTEP_THREAD_TEST(TpAdversary, MoreRanksThanRowsTrain, 4) {
  train_small(world, 3);
  train_small(world, 1);
}

LOCKSTEP_THREAD_TEST(TpAdversary, OtherDtypesBeforeAndAfter, 2) {
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  model->to(at::kDouble);
  whole->to(at::kDouble);
  parallelize_module(model, line(world), mlp_plan());
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto step = [&](at::ScalarType dtype) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    model(batch(1).to(dtype)).pow(2).sum().backward();
    whole(batch(1).to(dtype)).pow(2).sum().backward();
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
    expect_parts(*model, *whole);
  };
  step(at::kDouble);
  EXPECT_EQ(model->in->weight.scalar_type(), at::kDouble);
  model->to(at::kCPU, at::kDouble);
  model->train(false);
  step(at::kDouble);
  for (auto* each : {&model, &whole}) {
    (*each)->zero_grad();
    (*each)->to(at::kFloat);
  }
  model(batch(1)).pow(2).sum().backward();
  EXPECT_EQ(model->in->weight.scalar_type(), at::kFloat);
  whole(batch(1)).pow(2).sum().backward();
  expect_parts(*model, *whole);
}

// Inner products of parameters would be those of parts
LOCKSTEP_THREAD_TEST(TpAdversary, LbfgsIsRefused, 2) {
  Pair pair(line(world));
  torch::optim::LBFGS optimizer(pair.model->parameters(), torch::optim::LBFGSOptions(0.5).max_iter(3));
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = pair.model(batch(1)).pow(2).sum();
    loss.backward();
    return loss;
  };
  expect_error([&] { optimizer.step(closure); }, {"lockstep", "LBFGS"});
}

LOCKSTEP_THREAD_TEST(TpAdversary, AttentionTakesMasks, 2) {
  const auto build = [] { return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 4)); };
  auto [model, whole] = pair_of(build);
  parallelize_module(*model, line(world), {{"", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
  const auto padding = at::tensor({0, 0, 0, 1, 1, 0, 0, 0, 0, 1}, at::kLong).to(at::kBool).view({2, 5});
  const auto causal = at::ones({5, 5}, at::kBool).triu(1);
  for (int mode = 0; mode < 8; ++mode) {
    model->zero_grad();
    whole->zero_grad();
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    const auto run = [&](torch::nn::MultiheadAttention& each) {
      auto x = batch(1, {5, 2, 8}).clone().requires_grad_();
      auto [y, weights] = each(x, x * 2, x + 1, (mode & 1) != 0 ? padding : at::Tensor(), /*need_weights=*/false,
                               (mode & 2) != 0 ? causal : at::Tensor());
      y.pow(2).sum().backward();
      inputs.push_back(x.grad());
      return y.detach();
    };
    const auto mine = given_or_refused("mask " + std::to_string(mode), false, [&] {
      std::optional<ImplicitReplication> replication;
      if (mode >= 4) replication.emplace();
      return run(model);
    });
    if (!mine) continue;
    expect_close("attention", *mine, run(whole));
    expect_close("input", inputs[0], inputs[1]);
    expect_parts(*model, *whole);
  }
}

// An input that a divided and a plain layer share, frozen and thawed layers between
LOCKSTEP_THREAD_TEST(TpAdversary, LayersFreezeAndThawInTurns, 2) {
  auto [model, whole] = pair_of([] { return Two(); });
  parallelize_module(model, line(world), {{"*.in", ColwiseParallel()}, {"*.out", RowwiseParallel()}});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  torch::optim::SGD of_whole(whole->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
  for (int step = 0; step < 4; ++step) {
    for (auto* each : {&model, &whole}) {
      for (auto& parameter : (*each)->first->parameters()) parameter.set_requires_grad(step % 2 == 0);
      for (auto& parameter : (*each)->second->in->parameters()) parameter.set_requires_grad(step != 2);
    }
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto x = batch(step).clone().requires_grad_();
    const auto y = batch(step).clone().requires_grad_();
    model(x).pow(2).mean().backward();
    whole(y).pow(2).mean().backward();
    expect_close("x", x.grad(), y.grad());
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
  }
}

// What a member holds, as a tensor of the program's own: gradients go where the parameter is.
LOCKSTEP_THREAD_TEST(TpAdversary, GatheredMembersAndViewsOfThemAreDifferentiated, 3) {
  Pair pair(line(world), 10);
  const auto penalty_of = [](Mlp& each) {
    const auto whole_weight = whole_of(each->in->weight);
    const auto turned = whole_of(each->out->weight.t().slice(0, 1, 9));
    return whole_weight.pow(2).sum() + (turned * whole_weight.slice(0, 1, 9)).sum();
  };
  pair.both([&](Mlp& each) { (each(batch(1)).pow(2).sum() + penalty_of(each)).backward(); });
  pair.expect_same();
  // Of this rank's part, and under other placements.
  pair.both([](Mlp& each) { each->zero_grad(); });
  const auto own = DTensor(pair.model->in->weight).to_local().pow(2).sum();
  const auto moved = DTensor(DTensor(pair.model->out->weight.t()).redistribute({Shard(1)})).tensor().pow(3).sum();
  (own + whole_of(moved)).backward();
  (pair.whole->in->weight.pow(2).sum() + pair.whole->out->weight.pow(3).sum()).backward();
  expect_close("in", pair.model->in->named_parameters()["weight"].grad(),
               layout_of(pair.model->in->named_parameters()["weight"])->cut(pair.whole->in->weight.grad()));
  expect_close("out", pair.model->out->named_parameters()["weight"].grad(),
               layout_of(pair.model->out->named_parameters()["weight"])->cut(pair.whole->out->weight.grad()));
}

// A mask on a weight's gradient: nobody would call it there.
LOCKSTEP_THREAD_TEST(TpAdversary, HooksOfMembersAreRefused, 2) {
  Pair pair(line(world));
  pair.model->in->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0; });
  expect_error([&] { pair.model(batch(1)); }, {"'in'", "hook", "named_parameters()"});
}

struct RoutedImpl : torch::nn::Module {
  RoutedImpl()
      : first(register_module("first", torch::nn::Linear(8, 6))),
        second(register_module("second", torch::nn::Linear(8, 6))) {}
  at::Tensor forward(const at::Tensor& x, bool takes_first) { return takes_first ? first(x) : second(x); }
  torch::nn::Linear first;
  torch::nn::Linear second;
};
TORCH_MODULE(Routed);

// One tensor for all batches, filled element by element, and layers that take turns.
LOCKSTEP_THREAD_TEST(TpAdversary, LayersInTurnsSeeWhatWasWrittenByPointer, 2) {
  auto [model, whole] = pair_of([] { return Routed(); });
  const ColwiseParallel style({.input_layouts = Shard(0), .output_layouts = Replicate()});
  parallelize_module(model, line(world), {{"*", style}});
  const auto x = at::zeros({2, 8});
  for (const bool is_training : {true, false}) {
    const at::AutoGradMode mode(is_training);
    at::Tensor last;
    for (int step = 0; step < 4; ++step) {
      const auto all = batch(step, {4, 8});
      const auto mine = all.chunk(2)[world.rank()].contiguous();
      std::memcpy(x.data_ptr(), mine.data_ptr(), mine.numel() * sizeof(float));
      last = model(x, step % 2 == 0);
      expect_close("output", last, whole(all, step % 2 == 0));
    }
  }
}

// An input that is to have gradients from its second use on.
LOCKSTEP_THREAD_TEST(TpAdversary, AnInputMayRequireGradientsLater, 2) {
  auto [model, whole] = pair_of([] { return Routed(); });
  parallelize_module(model, line(world),
                     {{"*", ColwiseParallel({.input_layouts = Shard(0), .output_layouts = Replicate()})}});
  const auto all = batch(1, {4, 8}).clone();
  auto x = all.chunk(2)[world.rank()].clone();
  const auto first = model(x, true);
  x.requires_grad_();
  (first * model(x, false)).sum().backward();
  auto z = all.clone();
  const auto other = whole(z, true);
  z.requires_grad_();
  (other * whole(z, false)).sum().backward();
  expect_close("x", x.grad(), z.grad().chunk(2)[world.rank()]);
  expect_parts(*model, *whole);
}

// A DTensor as a leaf of the program's own, beside plain parameters
LOCKSTEP_THREAD_TEST(TpAdversary, LeavesOfTheProgramTrain, 3) {
  const auto mesh = line(world);
  const auto train = [&](bool cuts) {
    auto w = batch(1, {8, 10}).clone();
    auto b = batch(2, {10}).clone();
    if (cuts) {
      w = placed(w, mesh, Shard(1));
      b = placed(b, mesh, Shard(0));
    }
    w.requires_grad_();
    b.requires_grad_();
    torch::optim::Adam optimizer({w, b}, torch::optim::AdamOptions(0.05).weight_decay(0.1));
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      auto x = batch(step);
      if (cuts) x = placed(x, mesh, Replicate());
      const auto loss = (at::addmm(b, x, w).tanh().pow(2).mean() + 0.01 * w.pow(2).sum()) * 3;
      loss.backward();
      torch::nn::utils::clip_grad_norm_({w, b}, 0.7);
      torch::nn::utils::clip_grad_value_({w, b}, 0.3);
      optimizer.step();
    }
    return std::pair{whole_of(w).detach(), whole_of(b).detach()};
  };
  const auto mine = train(true);
  const auto expected = train(false);
  expect_close("w", mine.first, expected.first);
  expect_close("b", mine.second, expected.second);
  // Into a file.
  std::stringstream file;
  expect_error([&] { torch::save(placed(batch(1), mesh, Shard(1)), file); }, {"DTensor"});
}

struct TableImpl : torch::nn::Module {
  explicit TableImpl(const torch::nn::EmbeddingOptions& options)
      : table(register_module("table", torch::nn::Embedding(options))) {}
  at::Tensor forward(const at::Tensor& ids) { return table(ids); }
  torch::nn::Embedding table;
};
TORCH_MODULE(Table);

// Rows that get no gradient, gradients by frequency, rows that are scaled or sparse.
LOCKSTEP_THREAD_TEST(TpAdversary, OptionsOfEmbeddingsCount, 3) {
  const auto ids = at::tensor({0, 7, 7, 10, 3, 9, 7, 0}, at::kLong).view({2, 4});
  const std::vector<std::pair<std::string, torch::nn::EmbeddingOptions>> all = {
      {"padding_idx", torch::nn::EmbeddingOptions(11, 6).padding_idx(7)},
      {"padding_idx of the last rank", torch::nn::EmbeddingOptions(11, 6).padding_idx(10)},
      {"scale_grad_by_freq", torch::nn::EmbeddingOptions(11, 6).scale_grad_by_freq(true)},
      {"max_norm", torch::nn::EmbeddingOptions(11, 6).max_norm(0.5)},
      {"sparse", torch::nn::EmbeddingOptions(11, 6).sparse(true)},
  };
  for (const Style& style : {Style(ColwiseParallel({.output_layouts = Replicate()})), Style(RowwiseParallel())}) {
    for (const auto& [name, options] : all) {
      SCOPED_TRACE(name + " " + style->to_string());
      auto [model, whole] = pair_of([&, &options = options] { return Table(options); });
      parallelize_module(model, line(world), {{"table", style}});
      const auto is_refused = name == "max_norm" || name == "sparse";
      const auto mine = given_or_refused(name, is_refused, [&, &model = model] {
        const auto y = model(ids);
        y.pow(2).sum().backward();
        return y.detach();
      });
      if (!mine) continue;
      const auto expected = whole(ids);
      expected.pow(2).sum().backward();
      expect_close(name, *mine, expected.detach());
      expect_parts(*model, *whole);
    }
  }
}

// A tied head, classes that are cut, and the data divided as well.
LOCKSTEP_THREAD_TEST(TpAdversary, ATiedHeadTrainsOnTwoAxes, 4) {
  const auto mesh = square();
  auto [model, whole] = pair_of([] { return LanguageModel(); });
  parallelize_module(model, mesh["tp"],
                     {{"table", RowwiseParallel()}, {"head", ColwiseParallel({.use_local_output = false})}});
  fully_shard(model, {.mesh = mesh["dp"]});
  torch::optim::SGD optimizer(unique_parameters(*model), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD of_whole(unique_parameters(*whole), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    const auto ids = built_from_seed([] { return at::randint(11, {6}, at::kLong); }, step);
    const auto target = built_from_seed([] { return at::randint(11, {6}, at::kLong); }, 20 + step);
    const auto rank = mesh.get_local_rank("dp");
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto loss = [&, &model = model] {
      const LossParallel scope;
      return functional::cross_entropy(model(ids.chunk(2)[rank]), target.chunk(2)[rank]);
    }();
    loss.backward();
    functional::cross_entropy(whole(ids), target).backward();
    optimizer.step();
    of_whole.step();
    expect_state(*model, *whole);
  }
}

// Norms whose gradients are sums over the sequence's pieces, averaged over the data as well.
LOCKSTEP_THREAD_TEST(TpAdversary, CutSequencesTrainInsideOfDdp, 4) {
  const auto mesh = square();
  auto [model, whole] = pair_of([] { return Block(); });
  parallelize_module(model, mesh["tp"], block_plan());
  DistributedDataParallel<Block> ddp(model, mesh["dp"].get_group());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torch::optim::SGD of_whole(whole->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    const auto x = batch(step, {4, 5, 8});
    const auto mine = x.chunk(2)[mesh.get_local_rank("dp")];
    whole_of(ddp(placed(mine, mesh["tp"], Shard(1))).pow(2).mean()).backward();
    whole(x).pow(2).mean().backward();
    expect_parts(*model, *whole);
    optimizer.step();
    of_whole.step();
  }
}

// What is computed again is computed outside of the scope of its forward.
LOCKSTEP_THREAD_TEST(TpAdversary, ALossOverCutClassesIsComputedAgain, 3) {
  auto [model, whole] = pair_of([] { return torch::nn::Linear(8, 11); });
  parallelize_module(model, line(world), ColwiseParallel({.use_local_output = false}));
  const auto target = at::tensor({10, 0, 4}, at::kLong);
  for (const bool is_inside : {true, false}) {
    model->zero_grad();
    whole->zero_grad();
    const auto loss_of = [&, &model = model](const at::Tensor& x) {
      std::optional<LossParallel> scope;
      if (is_inside) scope.emplace();
      return whole_of(functional::cross_entropy(model(x), target));
    };
    const auto mine = given_or_refused("computed again", false, [&] {
      at::Tensor loss;
      {
        std::optional<LossParallel> scope;
        if (!is_inside) scope.emplace();
        loss = checkpoint(loss_of, batch(1).clone().requires_grad_());
      }
      loss.backward();
      return loss.detach();
    });
    if (!mine) continue;
    const auto expected = functional::cross_entropy(whole(batch(1)), target);
    expected.backward();
    expect_close("loss", *mine, expected.detach());
    expect_parts(*model, *whole);
  }
}

}  // namespace
}  // namespace lockstep::tp_adversary_test
