// Trains MLPStack on a 2x2 mesh, tensor parallel inside and fully_shard() outside, and compares with Python: losses,
// gradients and weights of every step, and what each rank holds.
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/nn/module_tensors.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/gtest.h"
#include "tests/support/oracle_reference.h"

namespace lockstep::mlp_stack_oracle_test {

using oracle::at_key;
using oracle::tensors_by_name;
using testing::check_equal;

constexpr testing::Tolerance kRounding{.relative = 1e-9, .absolute = 1e-11};

using Named = std::map<std::string, at::Tensor>;

struct Case {
  explicit Case(const c10::IValue& value) : all(value), options(at_key(all, "options")) {}

  bool is(const std::string& option) const { return at_key(options, option).toBool(); }
  std::string describe() const {
    return str("dim ", at_key(options, "dim").toInt(), is("is_sequence_parallel") ? ", sequence parallel" : "",
               is("is_checkpointed") ? ", checkpointed" : "", is("reshard_after_forward") ? ", resharded" : "");
  }

  c10::IValue all;
  c10::IValue options;
};

testing::MLPStack make_model(const Case& subject, const DeviceMesh& mesh) {
  testing::MLPStack model(at_key(subject.options, "dim").toInt(), subject.is("is_sequence_parallel"));
  model->to(at::kDouble);
  {
    const at::NoGradGuard no_grad;
    const auto state = tensors_by_name(at_key(subject.all, "state"));
    for (const auto& item : model->named_parameters()) item.value().copy_(state.at(item.key()));
  }
  const FullyShardOptions options{.reshard_after_forward = subject.is("reshard_after_forward")};
  model->parallelize(mesh["tp"], mesh["dp"], subject.is("is_checkpointed"), options);
  return model;
}

/// What this rank holds of every tensor, by what its parameter's layout says.
template <class Get>
void compare_parts(torch::nn::Module& model, const Named& whole, const Get& get, const std::string& what) {
  for (const auto& [name, shard] : detail::parameters_of(model, {})) {
    check_equal(str(what, " '", name, "'"), get(shard), layout_of(shard)->cut(whole.at(name)), kRounding);
  }
}

void compare(const Case& subject, const DeviceMesh& mesh, std::size_t rank) {
  auto model = make_model(subject, mesh);
  const auto mine = at_key(subject.all, "ranks").toListRef()[rank];
  const auto inputs = oracle::tensors_of(at_key(mine, "inputs"));
  const auto losses = oracle::tensors_of(at_key(mine, "losses"));
  const auto gradients = at_key(subject.all, "gradients").toListRef().vec();
  const auto parameters = at_key(subject.all, "parameters").toListRef().vec();
  std::vector<at::Tensor> shards;
  for (const auto& [name, shard] : detail::parameters_of(*model, {})) shards.push_back(shard);
  torch::optim::SGD optimizer(shards, torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto gradient_of = [](const at::Tensor& shard) { return shard.grad(); };
  const auto value_of = [](const at::Tensor& shard) { return shard.detach(); };
  for (std::size_t step = 0; step < inputs.size(); ++step) {
    const auto what = str(subject.describe(), ", step ", step);
    optimizer.zero_grad();
    const auto loss = model->forward(inputs[step]).pow(2).mean();
    check_equal("loss, " + what, (is_dtensor(loss) ? DTensor(loss).full_tensor() : loss).detach(), losses[step],
                kRounding);
    loss.backward();
    compare_parts(*model, tensors_by_name(gradients[step]), gradient_of, str("gradient, ", what, ":"));
    optimizer.step();
    compare_parts(*model, tensors_by_name(parameters[step]), value_of, str("parameter, ", what, ":"));
  }
  const auto local_gradients = tensors_by_name(at_key(mine, "local_gradients"));
  const auto local_parameters = tensors_by_name(at_key(mine, "local_parameters"));
  for (const auto& [name, shard] : detail::parameters_of(*model, {})) {
    const auto what = str(subject.describe(), ", '", name, "'");
    check_equal("this rank's gradient, " + what, shard.grad(), local_gradients.at(name), kRounding);
    check_equal("this rank's part, " + what, shard.detach(), local_parameters.at(name), kRounding);
  }
}

// TEST-36, TP-36, TP-38, TP-49, TP-50, TP-53, TP-54, TP-57
TEST(MlpStackOracle, TrainsAsPythonDoes) {
  const auto reference = oracle::run_reference("tp/mlp_stack_reference.py");
  if (reference.isNone()) GTEST_SKIP() << "there is no Python to compare with";
  ASSERT_FALSE(reference.toListRef().empty());
  testing::run_threads_in_gtest({.world_size = 4}, [&](const World& world) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    for (const auto& each : reference.toListRef()) compare(Case(each), mesh, static_cast<std::size_t>(world.rank()));
  });
}

}  // namespace lockstep::mlp_stack_oracle_test
