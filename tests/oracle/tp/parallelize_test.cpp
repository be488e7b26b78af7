// Compares parallelize_module() with Python's: outputs, gradients of inputs and parameters, and collectives, over
// models, plans and layouts.
#include "lockstep/tp/parallelize_module.h"

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/tp/loss_parallel.h"
#include "tests/oracle/tp/tp_models.h"
#include "tests/support/oracle_collectives.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::parallelize_oracle_test {

using oracle::at_key;
using oracle::tensors_by_name;
using testing::check_equal;

// Gloo sums in another order than we do, and Python computes attention in another way.
constexpr testing::Tolerance kRounding{.relative = 1e-9, .absolute = 1e-10};

Placement layout_of_record(const c10::IValue& record, const std::string& key) {
  const auto written = at_key(record, key).toListRef().vec();
  return written[0].toInt() == 1 ? Placement(Shard(written[1].toInt())) : Placement(Replicate());
}

/// Python prepares the input of a module once for its layers. Here layers share what they bring an input to: each is
/// told what it gets.
std::optional<Placement> prepared_input(const c10::IValue& plan, const std::string& path) {
  const auto dot = path.rfind('.');
  const auto parent = dot == std::string::npos ? "" : path.substr(0, dot);
  if (path.empty() || !plan.toGenericDict().contains(parent)) return {};
  const auto record = at_key(plan, parent);
  if (at_key(record, "style").toStringRef() != "prepare_input") return {};
  return layout_of_record(record, "input");
}

ParallelPlan plan_of(const c10::IValue& records) {
  ParallelPlan plan;
  for (const auto& item : records.toGenericDict()) {
    const auto& path = item.key().toStringRef();
    const auto& record = item.value();
    const auto style = at_key(record, "style").toStringRef();
    if (style == "prepare_input") continue;
    const bool is_local = at_key(record, "is_local").toBool();
    if (style == "sequence") {
      plan.emplace_back(
          path, SequenceParallel({.sequence_dim = at_key(record, "dim").toInt(), .use_local_output = is_local}));
      continue;
    }
    auto input = layout_of_record(record, "input");
    const auto output = layout_of_record(record, "output");
    if (style == "colwise") {
      if (const auto prepared = prepared_input(records, path)) input = *prepared;
      plan.emplace_back(
          path, ColwiseParallel({.input_layouts = input, .output_layouts = output, .use_local_output = is_local}));
    } else {
      plan.emplace_back(
          path, RowwiseParallel({.input_layouts = input, .output_layouts = output, .use_local_output = is_local}));
    }
  }
  return plan;
}

void load(torch::nn::Module& module, const c10::IValue& state) {
  const at::NoGradGuard no_grad;
  const auto values = tensors_by_name(state);
  for (const auto& item : module.named_parameters()) item.value().copy_(values.at(item.key()));
}

/// libtorch's Linear adds its bias after its product, when that has left as the output. So a bias that is cut is
/// gathered for an output that is cut otherwise, and a whole one's gradient is brought together where outputs are cut.
/// Python does neither.
oracle::Counts moved_biases(const c10::IValue& subject, const std::string& pass) {
  oracle::Counts counts;
  const auto state = at_key(subject, "state").toGenericDict();
  for (const auto& item : at_key(subject, "plan").toGenericDict()) {
    const auto& path = item.key().toStringRef();
    const auto& record = item.value();
    const auto style = at_key(record, "style").toStringRef();
    const bool is_linear = (style == "colwise" || style == "rowwise") && path != "tokens";
    if (!is_linear || !state.contains(path.empty() ? "bias" : path + ".bias")) continue;
    const auto output = layout_of_record(record, "output");
    const bool is_cut = sharded_dim(output).has_value();
    const bool is_cut_last = sharded_dim(output) == -1;
    if (style == "colwise" && !is_cut_last && pass == "forward") ++counts["all_gather"];
    if (style == "colwise" && is_cut && !is_cut_last && pass == "backward") ++counts["reduce_scatter"];
    if (style == "rowwise" && is_cut && pass == "backward") ++counts[is_cut_last ? "all_gather" : "all_reduce"];
  }
  return counts;
}

void compare_collectives(const std::string& pass, const c10::IValue& subject, const testing::Recorder& recorder) {
  const auto ours = oracle::launched(recorder);
  auto python = oracle::counts_of(at_key(subject, pass));
  // Parameters are plain tensors, and so are their gradients: what Python leaves to the optimizer is done at once.
  if (pass == "backward") oracle::add(python, oracle::counts_of(at_key(subject, "late")));
  oracle::add(python, moved_biases(subject, pass));
  EXPECT_TRUE(oracle::are_as_good(ours, python)) << at_key(subject, "name").toStringRef() << ", " << pass << ": "
                                                 << oracle::to_text(ours) << "; Python: " << oracle::to_text(python);
}

/// What is summed up as the loss: all of the output if that is the loss.
at::Tensor loss_of(const at::Tensor& output, const c10::Dict<c10::IValue, c10::IValue>& mine) {
  if (!mine.contains("weights")) return output;
  const auto local = is_dtensor(output) ? DTensor(output).to_local() : output;
  return (local * mine.at("weights").toTensor()).sum();
}

void compare(const c10::IValue& subject, const DeviceMesh& mesh) {
  const auto name = at_key(subject, "name").toStringRef();
  SCOPED_TRACE(name);
  const auto mine =
      at_key(subject, "ranks").toListRef()[static_cast<std::size_t>(mesh.get_local_rank())].toGenericDict();
  const auto [module, run] =
      oracle::make_tp_model(at_key(subject, "model").toStringRef(), at_key(subject, "arguments"));
  load(*module, at_key(subject, "state"));
  parallelize_module(*module, mesh, plan_of(at_key(subject, "plan")));

  auto inputs = oracle::tensors_of(mine.at("inputs"));
  inputs[0] = inputs[0].clone().set_requires_grad(inputs[0].is_floating_point());
  std::optional<LossParallel> loss_parallel;
  if (at_key(subject, "has_loss_parallel").toBool()) loss_parallel.emplace();
  {
    // Sizes of plain pieces are compared when they are new, which Python does not do.
    const at::NoGradGuard no_grad;
    run(inputs);
  }
  testing::Recorder forward;
  const auto output = run(inputs);
  check_equal("output, " + name, (is_dtensor(output) ? DTensor(output).to_local() : output).detach(),
              mine.at("output").toTensor(), kRounding);
  compare_collectives("forward", subject, forward);
  const testing::Recorder backward;
  loss_of(output, mine).backward();
  compare_collectives("backward", subject, backward);

  if (mine.contains("input_gradient")) {
    check_equal("input's gradient, " + name, inputs[0].grad(), mine.at("input_gradient").toTensor(), kRounding);
  }
  const auto gradients = tensors_by_name(at_key(subject, "gradients"));
  for (const auto& item : module->named_parameters()) {
    const auto layout = layout_of(item.value());
    const auto& whole = gradients.at(item.key());
    check_equal(str("gradient of '", item.key(), "', ", name), item.value().grad(), layout ? layout->cut(whole) : whole,
                kRounding);
  }
}

const c10::IValue& reference() {
  static const auto value = oracle::run_reference("tp/parallelize_reference.py");
  return value;
}

class ParallelizeOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (reference().isNone()) GTEST_SKIP() << "there is no Python to compare with";
  }

  /// The cases of models of these names, of which there are at least `fewest`.
  static void compare_cases(const std::vector<std::string>& models, std::size_t fewest) {
    for (const int ranks : {2, 4}) {
      std::vector<c10::IValue> cases;
      for (const auto& each : reference().toListRef()) {
        const bool is_meant = std::count(models.begin(), models.end(), at_key(each, "model").toStringRef()) > 0;
        if (is_meant && at_key(each, "world_size").toInt() == ranks) cases.push_back(each);
      }
      ASSERT_GE(cases.size(), fewest);
      testing::run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
        const auto mesh = init_device_mesh("cpu", {world.world_size()});
        for (const auto& each : cases) compare(each, mesh);
      });
    }
  }
};

// TP-33, TP-34, TP-35, TP-36
TEST_F(ParallelizeOracle, Linear) {
  compare_cases({"linear"}, 60);
}

TEST_F(ParallelizeOracle, Embedding) {
  compare_cases({"embedding"}, 30);
}

// TP-37
TEST_F(ParallelizeOracle, Norms) {
  compare_cases({"layer_norm", "rms_norm"}, 8);
}

// TP-43
TEST_F(ParallelizeOracle, Mlp) {
  compare_cases({"mlp"}, 10);
}

// TP-39, TP-43: the gradient of what q, k and v share is reduced once
TEST_F(ParallelizeOracle, Attention) {
  compare_cases({"attention", "fused_attention"}, 14);
}

TEST_F(ParallelizeOracle, Block) {
  compare_cases({"block"}, 4);
}

// TP-46, TP-47
TEST_F(ParallelizeOracle, LossParallel) {
  compare_cases({"classifier"}, 14);
}

TEST_F(ParallelizeOracle, Transformer) {
  compare_cases({"transformer"}, 2);
}

}  // namespace lockstep::parallelize_oracle_test
