// Compares fully_shard() with Python's fully_shard and FullyShardedDataParallel: losses of every rank and step, norms,
// shards of gradients and parameters, over models and options.
#include "lockstep/nn/module_tensors.h"
#include "lockstep/testing/fsdp/nested_models.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/fsdp/transformer.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::fsdp_oracle_test {

using oracle::at_key;
using oracle::tensors_of;
using testing::check_equal;
using testing::Tolerance;

// Gloo sums in another order than we do, and Python computes attention in another way, so that is compared in double
// precision. In low precision a value may be rounded to its neighbour.
constexpr Tolerance kDouble{.relative = 1e-10, .absolute = 1e-11};
constexpr Tolerance kFloat{.relative = 1e-5, .absolute = 1e-6};
constexpr Tolerance kLow{.relative = 2e-2, .absolute = 1e-2};  // losses are sums about zero

const c10::IValue& reference() {
  static const auto value = oracle::run_reference("fsdp/fsdp_reference.py");
  return value;
}

class FsdpOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (reference().isNone()) GTEST_SKIP() << "there is no Python to compare with";
  }
};

struct Case {
  explicit Case(const c10::IValue& value) : all(value) {
    for (const auto& item : at_key(all, "options").toGenericDict()) {
      const auto& name = item.key().toStringRef();
      if (name == "reshard_after_forward") {
        reshard_after_forward = item.value().isBool() ? ReshardAfterForward(item.value().toBool())
                                                      : ReshardAfterForward(static_cast<int>(item.value().toInt()));
      }
      if (name == "low_precision") low_precision = true;
      if (name == "accumulates") accumulates = true;
      if (name == "is_hybrid") is_hybrid = true;
      if (name == "is_flat") is_flat = true;
      if (name == "is_replicated") is_replicated = true;
      if (name == "clips") clips = item.value().toDouble();
    }
  }

  FullyShardOptions sharding(const World& world) const {
    FullyShardOptions options{.reshard_after_forward = reshard_after_forward, .use_orig_params = !is_flat};
    if (is_replicated) options.sharding_strategy = ShardingStrategy::kNoShard;
    if (is_hybrid) options.mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
    if (low_precision) options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    return testing::with_mesh(options, world.group());
  }
  bool is_double() const { return model == "transformer"; }
  const Tolerance& tolerance() const { return low_precision ? kLow : is_double() ? kDouble : kFloat; }

  c10::IValue all;
  std::string name = at_key(all, "name").toStringRef();
  std::string model = at_key(all, "model").toStringRef();
  int world_size = static_cast<int>(at_key(all, "world_size").toInt());
  std::optional<ReshardAfterForward> reshard_after_forward;
  bool low_precision = false;
  bool accumulates = false;
  bool is_hybrid = false;
  bool is_flat = false;
  bool is_replicated = false;
  std::optional<double> clips;
};

using Inputs = std::vector<at::Tensor>;

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const Inputs& inputs)> loss;
};

template <class M>
Model test_model(const World& world, const FullyShardOptions& options, at::ScalarType dtype = at::kFloat) {
  const auto model = M::init(
      world.group(),
      {.fsdp_init_mode = testing::FsdpInitMode::kRecursive, .fsdp = options, .deterministic = true, .dtype = dtype});
  testing::wrap_if(!unit_of(*model), *model, options);
  return {model, [model = model.get()](const Inputs& inputs) {
            const auto output = model->forward(inputs);
            return std::is_same_v<M, testing::TransformerWithSharedParams> ? model->get_loss(inputs, output)
                                                                           : output.pow(2).mean();
          }};
}

Model make_model(const Case& subject, const World& world) {
  const auto options = subject.sharding(world);
  if (subject.model == "nested") return test_model<testing::NestedWrappedModule>(world, options);
  if (subject.model == "non_uniform") return test_model<testing::NonUniformReqGradNWM>(world, options);
  if (subject.model == "transformer")
    return test_model<testing::TransformerWithSharedParams>(world, options, at::kDouble);
  if (subject.model == "mlp_stack") {
    testing::MLPStack model(5, true);
    model->parallelize(std::nullopt, *options.mesh, false, options);
    return {model.ptr(),
            [model](const Inputs& inputs) mutable { return model->forward(inputs[0]).pow(2).sin().mean(); }};
  }
  TORCH_CHECK(subject.model == "double_linear", "no model ", subject.model);
  testing::DoubleLinear model(6, /*use_second_linear=*/false);
  fully_shard(model->lin1, options);
  fully_shard(model->lin2, options);
  fully_shard(model, options);
  return {model.ptr(), [model](const Inputs& inputs) mutable { return model->forward(inputs[0])[0].pow(2).mean(); }};
}

ModuleState state_of(const c10::IValue& dict) {
  ModuleState state;
  for (const auto& item : dict.toGenericDict()) state.emplace(item.key().toStringRef(), item.value().toTensor());
  return state;
}

/// Every shard, or its gradient, equals its part of the whole; what is not there is undefined.
template <class Get>
void compare_parts(const torch::nn::Module& module, const ModuleState& whole, const Get& get, const Case& subject,
                   const std::string& what) {
  for (const auto& [name, shard] : detail::parameters_of(module, {})) {
    const auto found = whole.find(name);
    const auto expected = found == whole.end() ? at::Tensor() : layout_of(shard)->cut(found->second);
    check_equal(lockstep::str(what, " '", name, "'"), get(shard), expected, subject.tolerance());
  }
}

void compare(const World& world, const Case& subject) {
  auto model = make_model(subject, world);
  auto root = *unit_of(*model.module);
  // Flat parameters do not know second names of tied ones.
  load_full_state_dict(*model.module, state_of(at_key(subject.all, "state")), {.strict = !subject.is_flat});
  const auto mine = at_key(subject.all, "ranks").toListRef().at(static_cast<std::size_t>(world.rank())).toGenericDict();
  const auto inputs = mine.at("inputs").toListRef();
  const auto losses = tensors_of(mine.at("losses"));
  const auto norms = tensors_of(mine.at("norms"));
  const std::size_t batches = subject.accumulates ? 2 : 1;
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : detail::parameters_of(*model.module, {})) parameters.push_back(tensor);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (i % batches == 0) optimizer.zero_grad();
    const auto batch = tensors_of(inputs[i]);
    const bool is_last_batch = (i + 1) % batches == 0;
    const std::unique_ptr<FsdpNoSync> no_sync(is_last_batch ? nullptr : new FsdpNoSync(root.no_sync()));
    const auto loss = model.loss(batch);
    loss.backward();
    check_equal(str("loss ", i), loss.detach(), losses.at(i), subject.tolerance());
    if (!is_last_batch) continue;
    if (subject.clips) {
      check_equal(str("norm ", i), root.clip_grad_norm_(*subject.clips), norms.at(i / batches), subject.tolerance());
    }
    if (i + 1 == inputs.size() && !subject.is_flat) {
      compare_parts(
          *model.module, state_of(at_key(subject.all, "gradients")),
          [](const at::Tensor& shard) { return shard.grad(); }, subject, "gradient of");
      if (mine.contains("local_gradients")) {
        // Python's fully_shard cuts as we do.
        const auto shards = model.module->named_parameters();
        for (const auto& [name, gradient] : state_of(mine.at("local_gradients"))) {
          check_equal(str("shard of the gradient of '", name, "'"), shards[name].grad(), gradient, subject.tolerance());
        }
      }
    }
    optimizer.step();
  }
  const auto expected = state_of(at_key(subject.all, "parameters"));
  if (!subject.is_flat) {
    compare_parts(
        *model.module, expected, [](const at::Tensor& shard) { return shard.detach(); }, subject, "parameter");
  }
  const auto state = full_state_dict(*model.module);
  for (const auto& [name, tensor] : expected) {
    check_equal(str("whole parameter '", name, "'"), state.at(name), tensor, subject.tolerance());
  }
}

// FSDP-1, FSDP-2, FSDP-16, FSDP-18, FSDP-25 to FSDP-30, FSDP-50, FSDP-51, FSDP-60, FSDP-62, FSDP-65, FSDP-71
TEST_F(FsdpOracle, LossesGradientsAndParametersAgreeWithPython) {
  const auto cases = reference().toListRef();
  EXPECT_GT(cases.size(), 55U);
  for (const auto& value : cases) {
    const Case subject(value);
    SCOPED_TRACE(subject.name);
    testing::run_threads_in_gtest({.world_size = subject.world_size},
                                  [&](const World& world) { compare(world, subject); });
  }
}

}  // namespace lockstep::fsdp_oracle_test
