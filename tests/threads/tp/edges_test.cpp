// What programs may ask of divided layers beside training them: gradients of members, other dtypes, plain pieces,
// masks, inputs that several layers share.
#include <mutex>

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/fsdp/sharded_files.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/tp/prepared.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/error_text.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep::tp_edges_test {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;

at::Tensor batch(uint64_t seed, at::IntArrayRef sizes = {3, 8}) {
  return built_from_seed([&] { return at::randn(sizes); }, seed);
}

DeviceMesh line(const World& world) {
  return init_device_mesh("cpu", {world.world_size()});
}

at::Tensor whole_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor;
}

// A layer of another dtype than its input: libtorch's error, as one device gives it
LOCKSTEP_THREAD_TEST(TpEdges, InputsOfOtherDtypesAreRefused, 2) {
  const auto mesh = line(world);
  for (const bool has_bias : {true, false}) {
    const auto build = [&] { return torch::nn::Linear(torch::nn::LinearOptions(8, 4).bias(has_bias)); };
    for (const bool is_colwise : {true, false}) {
      auto [model, whole] = pair_of(build);
      model->to(at::kDouble);
      whole->to(at::kDouble);
      const Style style =
          is_colwise ? Style(ColwiseParallel()) : Style(RowwiseParallel({.input_layouts = Replicate()}));
      parallelize_module(*model, mesh, style);
      for (const auto& x : {batch(1), batch(1, {2, 3, 8})}) {
        expect_error([&] { whole(x); }, {"dtype"});
        expect_error([&] { model(x); }, {"dtype"});
        expect_error([&] { model(x.clone().requires_grad_()); }, {"dtype"});
      }
    }
  }
}

// With respect to a member: this rank's part, as of the registered parameter
LOCKSTEP_THREAD_TEST(TpEdges, GradientsOfMembersAreThoseOfParameters, 3) {
  auto [model, whole] = pair_of([] { return Mlp(8, 10); });
  parallelize_module(model, line(world), {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  const auto members_of = [](Mlp& each) {
    return std::vector<at::Tensor>{each->in->weight, each->in->bias, each->out->weight, each->out->bias};
  };
  const auto names = std::vector<std::string>{"in.weight", "in.bias", "out.weight", "out.bias"};
  for (int step = 0; step < 2; ++step) {
    const auto expected = torch::autograd::grad({whole(batch(step)).pow(2).sum()}, members_of(whole));
    const auto mine = torch::autograd::grad({model(batch(step)).pow(2).sum()}, members_of(model));
    const auto parameters = model->named_parameters();
    for (size_t i = 0; i < names.size(); ++i) {
      expect_close(names[i], mine[i], layout_of(parameters[names[i]])->cut(expected[i]));
      EXPECT_FALSE(parameters[names[i]].grad().defined()) << names[i];
    }
    // In a graph that is differentiated again.
    for (auto* each : {&model, &whole}) {
      (*each)->zero_grad();
      const auto loss = (*each)(batch(step)).pow(2).sum();
      const auto of_bias = torch::autograd::grad({loss}, {(*each)->out->bias}, {}, true, true)[0];
      (loss + of_bias.pow(2).sum()).backward();
    }
    expect_parts(*model, *whole);
    model->zero_grad();
    whole->zero_grad();
  }
  // And one that the graph really does not have.
  const auto loss = model->in(batch(1)).pow(2).sum();
  expect_error([&] { torch::autograd::grad({loss}, {model->out->weight}); }, {"not have been used"});
}

struct DroppingImpl : torch::nn::Module {
  DroppingImpl() : drop(register_module("drop", Prepared<torch::nn::Dropout>(0.5))) {}
  at::Tensor forward(const at::Tensor& x) { return drop(x) * 3; }
  Prepared<torch::nn::Dropout> drop;
};
TORCH_MODULE(Dropping);

// TP-37, TP-44: plain pieces of a sequence are dropped as one device drops them
LOCKSTEP_PROCESS_TEST(TpEdges, DropsOfPlainPiecesWhatOneDeviceDrops, 2) {
  const auto mesh = line(world);
  for (const bool use_local_output : {true, false}) {
    Dropping model;
    parallelize_module(model, mesh, {{"drop", SequenceParallel({.use_local_output = use_local_output})}});
    const auto x = at::arange(1, 49, at::kFloat).view({2, 6, 4});
    torch::manual_seed(5);
    const auto expected = Dropping()(x);
    torch::manual_seed(5);
    const auto mine = model(x.chunk(2, 1)[world.rank()]);
    EXPECT_EQ(is_dtensor(mine), !use_local_output);
    const auto local = is_dtensor(mine) ? DTensor(mine).to_local() : mine;
    expect_close("dropped", local, expected.chunk(2, 1)[world.rank()]);
    model->eval();
    expect_close("evaluated", whole_of(model(x.chunk(2, 1)[world.rank()])).narrow(1, 0, 3),
                 use_local_output ? x.chunk(2, 1)[world.rank()] * 3 : x.narrow(1, 0, 3) * 3);
  }
}

// TP-37: one that cannot is refused, before anything is cut
LOCKSTEP_THREAD_TEST(TpEdges, DropoutsThatCannotBePreparedAreRefused, 2) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Dropout(0.5));
  expect_error([&] { parallelize_module(model, line(world), {{"0", ColwiseParallel()}, {"1", SequenceParallel()}}); },
               {"SequenceParallel", "'1'", "Prepared<torch::nn::Dropout>", "leave it out"});
  EXPECT_EQ(layout_of(model->parameters()[0]), nullptr);
}

struct QkvImpl : torch::nn::Module {
  QkvImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        q(register_module("q", torch::nn::Linear(8, 4))),
        k(register_module("k", torch::nn::Linear(8, 4))),
        v(register_module("v", torch::nn::Linear(8, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = norm(x);
    const auto query = q(y);
    const auto key = k(y);
    return query * key + v(y);
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear q;
  torch::nn::Linear k;
  torch::nn::Linear v;
};
TORCH_MODULE(Qkv);

// Plain pieces that a layer leaves are gathered once for all that use them, with gradients and without
LOCKSTEP_THREAD_TEST(TpEdges, PlainInputsAreGatheredOnceForAll, 2) {
  auto [model, whole] = pair_of([] { return Qkv(); });
  parallelize_module(model, line(world),
                     {{"norm", SequenceParallel({.use_local_output = true})},
                      {"[qkv]", ColwiseParallel({.input_layouts = Shard(1)})}});
  model(batch(0, {2, 3, 8}));  // sizes are compared when they are new
  for (const bool is_training : {true, false, false}) {
    const at::AutoGradMode mode(is_training);
    for (int step = 0; step < 2; ++step) {
      const auto x = batch(step, {2, 6, 8});
      const testing::Recorder recorder;
      const auto y = model(x.chunk(2, 1)[world.rank()]);
      EXPECT_EQ(recorder.events("launch").size(), 1u) << is_training;
      expect_close("output", y, whole(x).chunk(2, 2)[world.rank()]);
    }
  }
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  const auto x = batch(9, {2, 6, 8});
  expect_close("frozen", model(x.chunk(2, 1)[world.rank()]), whole(x).chunk(2, 2)[world.rank()]);
}

// Masks of libtorch's attention, which all ranks have whole
LOCKSTEP_THREAD_TEST(TpEdges, AttentionTakesPlainMasks, 2) {
  const auto padding = at::tensor({0, 0, 0, 1, 1, 0, 0, 0, 0, 1}, at::kLong).to(at::kBool).view({2, 5});
  const auto causal = at::ones({5, 5}, at::kBool).triu(1);
  const auto added = built_from_seed([] { return at::randn({5, 5}); }, 7);
  const std::vector<at::Tensor> masks = {{}, causal, added};
  for (const bool same_inputs : {true, false}) {
    auto [model, whole] =
        pair_of([] { return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 4)); });
    parallelize_module(*model, line(world), {{"", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
    for (size_t i = 0; i < masks.size(); ++i) {
      for (const bool pads : {false, true}) {
        model->zero_grad();
        whole->zero_grad();
        std::vector<at::Tensor> outputs;
        std::vector<at::Tensor> inputs;
        for (auto* each : {&model, &whole}) {
          auto x = batch(1, {5, 2, 8}).clone().requires_grad_();
          const auto key = same_inputs ? x : x * 2;
          const auto value = same_inputs ? x : x + 1;
          const auto y = std::get<0>((*each)(x, key, value, pads ? padding : at::Tensor(), false, masks[i]));
          y.pow(2).sum().backward();
          outputs.push_back(y.detach());
          inputs.push_back(x.grad());
        }
        SCOPED_TRACE("mask " + std::to_string(i) + (pads ? ", padded" : ""));
        expect_close("attention", outputs[0], outputs[1]);
        expect_close("input", inputs[0], inputs[1]);
        expect_parts(*model, *whole);
      }
    }
    // One that is learned would need a gradient that is summed over heads.
    auto learned = added.clone().requires_grad_();
    const auto x = batch(1, {5, 2, 8});
    expect_error([&] { model(x, x, x, at::Tensor(), false, learned); }, {"ordinary tensor", "ImplicitReplication"});
  }
}

struct PiecesImpl : torch::nn::Module {
  PiecesImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))),
        in(register_module("in", torch::nn::Linear(8, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return in(norm(x)); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear in;
};
TORCH_MODULE(Pieces);

/// Of a sequence of 5, of which ranks have 3 and 2; after `before` sequences of 6.
void expect_uneven_pieces_are_refused(const World& world, int before) {
  // A group of its own: one that a rank has left cannot be used again.
  const auto mesh = DeviceMesh::from_group(new_group({0, 1}), "cpu");
  Pieces model;
  parallelize_module(model, mesh,
                     {{"norm", SequenceParallel({.use_local_output = true})},
                      {"in", ColwiseParallel({.input_layouts = Shard(1), .output_layouts = Replicate()})}});
  for (int i = 0; i < before; ++i) model(batch(i, {2, 6, 8}).chunk(2, 1)[world.rank()]);
  expect_error([&] { model(batch(9, {2, 5, 8}).chunk(2, 1)[world.rank()]); }, {"sizes", "[2, 2, 8]"});
}

void expect_passed_over_gloo(int before, const std::string& name) {
  const auto body = [before](const World& world) { expect_uneven_pieces_are_refused(world, before); };
  const auto report = testing::run_processes_from_gtest({.world_size = 2, .backend = "gloo"}, body, name);
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// Pieces of different sizes, where the backend does not notice: an error on all ranks, and nobody aborts
TEST(TpEdges, UnevenPlainPiecesAreRefusedOverGloo) {
  expect_passed_over_gloo(0, "at first");
}

// The same where one rank has a size that it had before
TEST(TpEdges, UnevenPlainPiecesAreRefusedLaterOverGloo) {
  expect_passed_over_gloo(2, "later");
}

LOCKSTEP_THREAD_TEST(TpEdges, UnevenPlainPiecesAreRefusedAmongThreads, 2) {
  expect_uneven_pieces_are_refused(world, 2);
}

// Replicas of a slice save to one path: one of them writes, and parts are of one save
LOCKSTEP_THREAD_TEST(TpEdges, OneOfTheReplicasSaves, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  static std::optional<testing::TempDir> dir;
  static std::once_flag once;
  std::call_once(once, [] { dir.emplace(); });
  const auto path = dir->file("state");
  auto [model, whole] = pair_of([] { return Mlp(8, 12); });
  parallelize_module(model, mesh["tp"], {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  for (int save = 0; save < 3; ++save) {
    {
      const at::NoGradGuard no_grad;
      for (auto* each : {&model->in, &whole->in}) (*each)->named_parameters()["bias"].add_(save);
    }
    save_sharded(*model, path);
    auto again = built_from_seed([] { return Mlp(8, 12); }, 40);
    load_sharded(*again, path);
    for (const auto& each : whole->named_parameters()) {
      expect_close(each.key(), again->named_parameters()[each.key()].detach(), each.value().detach());
    }
    barrier(world.group());
  }
  // One that nobody can write is an error for all of them.
  expect_error([&] { save_sharded(*model, dir->file("nowhere") + "/state"); }, {"was not saved", "nowhere"});
  // Stages of a pipeline hold different things.
  const auto stage = mesh.get_local_rank("dp");
  auto other = built_from_seed([&] { return Mlp(8, 4 + 8 * stage); }, 1);
  parallelize_module(other, mesh["tp"], {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  int refused = 0;
  try {
    save_sharded(*other, dir->file("stage"));
  } catch (const c10::Error& error) {
    refused = 1;
    EXPECT_NE(std::string(error.what()).find("paths of their own"), std::string::npos);
  }
  auto count = at::full({1}, refused, at::kLong);
  all_reduce(count, world.group());
  EXPECT_EQ(count.item<int64_t>(), 2);
  save_sharded(*other, dir->file("stage" + std::to_string(stage)));
}

// Parts of parameters have small state already
LOCKSTEP_THREAD_TEST(TpEdges, ZeroSaysWhatToDoWithParts, 2) {
  Mlp model(8, 12);
  parallelize_module(model, line(world), {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}});
  expect_error(
      [&] {
        ZeroRedundancyOptimizer<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1),
                                                   {.process_group = world.group()});
      },
      {"parameter 0", "[12, 8]", "is a shard already", "ordinary optimizer", "fully_shard()"});
}

}  // namespace
}  // namespace lockstep::tp_edges_test
