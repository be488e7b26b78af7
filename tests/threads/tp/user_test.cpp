// What someone meets who tries tensor parallelism for the first time: modules that differ between ranks, uneven parts,
// plans that miss, losses with smoothing. Errors are alike on every rank and say what to write instead.
#include <functional>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/nn/tied_parameters.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/loss_parallel.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/tp/prepared.h"
#include "tests/support/dtensor_line.h"
#include "tests/support/tensor_parallel_pairs.h"

namespace lockstep::tp_user_test {
namespace {

using namespace tensor_parallel_pairs;  // NOLINT(google-build-using-namespace)
using testing::expect_error;
using testing::line;

const ParallelPlan& mlp_plan() {
  static const ParallelPlan plan = {{"in", ColwiseParallel()}, {"out", RowwiseParallel()}};
  return plan;
}

void on_both_backends(const std::function<void(const World&)>& body) {
  for (const auto* backend : {"threads", "gloo"}) {
    SCOPED_TRACE(backend);
    testing::run_threads_in_gtest({.world_size = 2, .backend = backend}, body);
  }
}

// Sizes, dtypes, frozen weights: over gloo they were accepted, and computed something.
TEST(TpUser, ModulesThatDifferBetweenRanksAreRefused) {
  on_both_backends([](const World& world) {
    const bool is_other = world.rank() == 1;
    const auto refused = [&](Mlp model, const std::vector<std::string>& texts) {
      expect_error([&] { parallelize_module(model, line(world), mlp_plan()); }, texts);
      EXPECT_EQ(layout_of(model->parameters()[0]), nullptr);
    };
    refused(Mlp(8, is_other ? 16 : 12),
            {"parallelize_module()", "parameter 'in.weight'", "rank 0: 'Float [12, 8]", "rank 1: 'Float [16, 8]"});
    Mlp of_doubles(8, 12);
    if (is_other) of_doubles->out->to(at::kDouble);
    refused(of_doubles, {"parameter 'out.weight'", "'Float [8, 12]", "'Double [8, 12]"});
    Mlp frozen(8, 12);
    if (is_other) frozen->in->bias.set_requires_grad(false);
    refused(frozen, {"parameter 'in.bias'", "requires_grad", "frozen"});
    // The group is usable still.
    auto [model, whole] = pair_of([] { return Mlp(8, 12); });
    parallelize_module(model, line(world), mlp_plan());
    expect_close("output", model(at::ones({2, 8})), whole(at::ones({2, 8})));
  });
}

TEST(TpUser, ARankAloneInParallelizeModuleSaysSo) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto mesh = line(world);
    Mlp model(8, 12);
    expect_error(
        [&] {
          if (world.rank() == 0) return parallelize_module(model, mesh, mlp_plan());
          all_reduce(at::ones({3}), mesh.get_group());
        },
        {"of parallelize_module()"});
  });
}

struct DroppingImpl : torch::nn::Module {
  explicit DroppingImpl(int64_t hidden, double p = 0.5)
      : in(register_module("in", torch::nn::Linear(8, hidden))),
        drop(register_module("drop", torch::nn::Dropout(p))),
        out(register_module("out", torch::nn::Linear(hidden, 8))) {}
  at::Tensor forward(const at::Tensor& x) { return out(drop(at::tanh(in(x)))); }
  torch::nn::Linear in;
  torch::nn::Dropout drop;
  torch::nn::Linear out;
};
TORCH_MODULE(Dropping);

LOCKSTEP_THREAD_TEST(TpUser, UnevenLocalOutputsBeforeDropoutsAreRefused, 2) {
  const auto mesh = line(world);
  for (const int64_t hidden : {15, 33}) {
    Dropping model(hidden);
    expect_error([&] { parallelize_module(model, mesh, mlp_plan()); },
                 {"'in'", std::to_string(hidden) + " features", "'drop'", "use_local_output = false"});
    EXPECT_EQ(layout_of(model->in->named_parameters()["weight"]), nullptr);
    parallelize_module(model, mesh, {{"in", ColwiseParallel({.use_local_output = false})}, {"out", RowwiseParallel()}});
    EXPECT_EQ(model(at::ones({2, 8})).sizes(), (at::IntArrayRef{2, 8}));
  }
  torch::nn::TransformerEncoderLayer layer(torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(33));
  expect_error(
      [&] { parallelize_module(layer, mesh, {{"linear1", ColwiseParallel()}, {"linear2", RowwiseParallel()}}); },
      {"'linear1'", "33 features", "use_local_output = false"});
  // Even parts, or none that are dropped, divide as they did.
  Dropping even(16);
  parallelize_module(even, mesh, mlp_plan());
  auto [none, whole] = pair_of([] { return Dropping(15, 0.0); });
  parallelize_module(none, mesh, mlp_plan());
  expect_close("output", none(at::ones({2, 8})), whole(at::ones({2, 8})));
}

struct AttentiveImpl : torch::nn::Module {
  AttentiveImpl()
      : in(register_module("in", torch::nn::Linear(8, 15))),
        attention(register_module(
            "attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.1)))) {}
  torch::nn::Linear in;
  torch::nn::MultiheadAttention attention;
};
TORCH_MODULE(Attentive);

LOCKSTEP_THREAD_TEST(TpUser, DropoutsOfAttentionsAndOtherKindsCount, 2) {
  Attentive model;
  expect_error([&] { parallelize_module(model, line(world), {{"in", ColwiseParallel()}}); },
               {"'in'", "'attention'", "use_local_output = false"});
  torch::nn::Sequential other(torch::nn::Linear(8, 15), torch::nn::AlphaDropout(0.1));
  expect_error([&] { parallelize_module(other, line(world), {{"0", ColwiseParallel()}}); }, {"'0'", "'1'"});
}

// No collective needs such a norm's input: nobody else would notice.
TEST(TpUser, PiecesOfSequencesOfDifferentLengthsAreRefused) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    parallelize_module(norm, line(world), SequenceParallel());
    norm(at::ones({2, 3, 8}));
    // Rank 0 has seen its size before, and goes on to the next collective.
    expect_error([&] { DTensor(norm(at::ones({2, 3 - world.rank(), 8}))).full_tensor(); },
                 {"the sizes of plain pieces"});
  });
  on_both_backends([](const World& world) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    parallelize_module(norm, line(world), SequenceParallel());
    expect_error([&] { norm(at::ones({2, 3 - world.rank(), 8})); },
                 {"the sizes of plain pieces", "[2, 3, 8]", "[2, 2, 8]"});
  });
  on_both_backends([](const World& world) {
    Prepared<torch::nn::Dropout> dropout(0.5);
    parallelize_module(dropout, line(world), SequenceParallel());
    expect_error([&] { dropout(at::ones({2, 3 - world.rank(), 8})); },
                 {"the sizes of plain pieces", "[2, 3, 8]", "[2, 2, 8]"});
  });
}

LOCKSTEP_THREAD_TEST(TpUser, SmoothedLabelsMayBePlain, 2) {
  const auto mesh = line(world);
  const auto target = at::tensor({6, 0, -100, 3}, at::kLong);
  const auto weights = at::arange(1, 8, at::kFloat);
  for (const bool is_weighted : {false, true}) {
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum}) {
      for (const bool is_gathered : {false, true}) {
        const auto loss_of = [&](const at::Tensor& logits) {
          return at::cross_entropy_loss(logits, target, is_weighted ? weights : at::Tensor(), reduction, -100, 0.1);
        };
        auto [model, whole] = pair_of([] { return torch::nn::Linear(8, 7); });
        parallelize_module(model, mesh, ColwiseParallel({.use_local_output = false}));
        const auto x = testing::numbers({4, 8}, 1);
        at::Tensor loss;
        {
          const LossParallel scope;
          loss = loss_of(model(x));
        }
        const auto gathered = DTensor(loss).full_tensor();
        (is_gathered ? gathered : loss).backward();
        const auto expected = loss_of(whole(x));
        expected.backward();
        expect_close("loss", gathered.detach(), expected.detach());
        expect_parts(*model, *whole);
      }
    }
  }
}

// The plan of docs/tensor-parallel.md
LOCKSTEP_THREAD_TEST(TpUser, AnEncoderLayerTrainsOnACutSequence, 2) {
  const auto mesh = line(world);
  auto [model, whole] = pair_of([] {
    return torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(8, 4).dim_feedforward(33).dropout(0));
  });
  const RowwiseParallel rowwise({.output_layouts = Shard(0), .use_local_output = false});
  parallelize_module(model, mesh,
                     {{"self_attn", ColwiseParallel({.input_layouts = Shard(0)})},
                      {"self_attn.out_proj", rowwise},
                      {"norm*", SequenceParallel({.sequence_dim = 0})},
                      {"linear1", ColwiseParallel({.input_layouts = Shard(0), .use_local_output = false})},
                      {"linear2", rowwise}});
  const auto x = testing::numbers({5, 3, 8}, 1);
  const auto piece = distribute_tensor(x, mesh, {Shard(0)}, {.src_data_rank = std::nullopt});
  const auto y = model(piece.tensor());
  const auto expected = whole(x);
  expect_close("output", DTensor(y).full_tensor().detach(), expected.detach());
  y.pow(3).sum().backward();
  expected.pow(3).sum().backward();
  expect_parts(*model, *whole);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : e(register_module("e", torch::nn::Embedding(10, 8))), h(register_module("h", torch::nn::Linear(8, 10))) {}
  torch::nn::Embedding e;
  torch::nn::Linear h;
};
TORCH_MODULE(Tied);

LOCKSTEP_THREAD_TEST(TpUser, ErrorsNameWhatToWriteInstead, 2) {
  Tied tied;
  tied->h->weight = tied->e->weight;
  expect_error([&] { parallelize_module(tied, line(world), {{"h", ColwiseParallel()}}); },
               {"'h.weight'", "tie_parameter()"});
  Mlp model(8, 12);
  parallelize_module(model, line(world), {{"out", RowwiseParallel()}});
  expect_error([&] { model(at::ones({2, 8})); }, {"'out'", "12 features", "input_layouts = Replicate()"});
}

class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

LOCKSTEP_THREAD_TEST(TpUser, APathThatMatchesNothingIsWarnedOfOnce, 2) {
  Mlp model(8, 12);
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    parallelize_module(model, line(world), {{"layers.0.in", ColwiseParallel()}});
  }
  ASSERT_EQ(warnings.texts.size(), 1U);
  for (const auto* text : {"'layers'", "'layers.0.in'", "in, out"}) {
    EXPECT_NE(warnings.texts[0].find(text), std::string::npos) << warnings.texts[0];
  }
}

}  // namespace
}  // namespace lockstep::tp_user_test
