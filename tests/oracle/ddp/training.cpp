#include "tests/oracle/ddp/training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/str.h"

namespace lockstep::ddp_oracle {
namespace {

/// By Python's name; empty is none.
std::optional<at::ScalarType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  TORCH_CHECK(name == "float32", "the test does not know the dtype '", name, "'");
  return at::kFloat;
}

}  // namespace

DdpOptions options_of(const Case& file_case) {
  const auto options = file_case.facts["options"];
  DdpOptions result;
  for (const auto& name : options.keys()) {
    const auto value = options[name];
    if (name == "bucket_cap_mb") {
      result.bucket_cap_mb = value.number();
    } else if (name == "bucket_cap_mb_list") {
      for (std::size_t i = 0; i < value.size(); ++i) result.bucket_cap_mb_list.push_back(value[i].number());
    } else if (name == "broadcast_buffers") {
      result.broadcast_buffers = value.flag();
    } else if (name == "forward_sync_buffers") {
      result.forward_sync_buffers = value.flag();
    } else if (name == "init_sync") {
      result.init_sync = value.flag();
    } else if (name == "find_unused_parameters") {
      result.find_unused_parameters = value.flag();
    } else if (name == "skip_all_reduce_unused_params") {
      result.skip_all_reduce_unused_params = value.flag();
    } else if (name == "static_graph") {
      result.static_graph = value.flag();
    } else if (name == "gradient_as_bucket_view") {
      result.gradient_as_bucket_view = value.flag();
    } else if (name == "batched_grad_copy") {
      result.batched_grad_copy = value.flag();
    } else if (name == "mixed_precision") {
      result.mixed_precision = MixedPrecision{.param_dtype = dtype_of(value[0].text()),
                                              .reduce_dtype = dtype_of(value[1].text()),
                                              .buffer_dtype = dtype_of(value[2].text())};
    } else {
      TORCH_CHECK(false, "the test does not know the option '", name, "'");
    }
  }
  return result;
}

EnvironmentScope::EnvironmentScope(const Case& file_case) : names_(file_case.facts["environment"].keys()) {
  for (const auto& name : names_) {
    ::setenv(name.c_str(), file_case.facts["environment"][name].text().c_str(), /*overwrite=*/1);
  }
}

EnvironmentScope::~EnvironmentScope() {
  for (const auto& name : names_) ::unsetenv(name.c_str());
}

namespace {

void load(const NamedTensors& tensors, const Node& values) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  TORCH_CHECK(names == values.keys(), "the twin has ", join(names, ", "), ", the model ", join(values.keys(), ", "));
  // Strides are Python's too. A copy, which begins in memory as Python's own tensors do: that may decide how they are
  // multiplied.
  for (const auto& [name, tensor] : tensors) tensor.set_data(values[name].tensor().clone());
}

}  // namespace

std::shared_ptr<Model> initial_model(const Case& file_case, int rank, c10::Device device) {
  auto model = make_model(file_case.facts["model"].text());
  const auto initial = file_case.ranks[rank]["given"]["initial"];
  if (!initial.has("parameters")) {
    model->to(device);
    return model;
  }
  load(parameters_of(*model), initial["parameters"]);
  load(detail::buffers_of(*model, {}), initial["buffers"]);
  model->to(device);
  const auto frozen = file_case.facts["frozen"].texts();
  for (const auto& [name, parameter] : parameters_of(*model)) {
    parameter.set_requires_grad(std::find(frozen.begin(), frozen.end(), name) == frozen.end());
  }
  if (const auto ignored = file_case.facts["ignored"].texts(); !ignored.empty()) {
    set_params_and_buffers_to_ignore_for_model(model, ignored);
  }
  return model;
}

torch::optim::SGD make_optimizer(const torch::nn::Module& model, const Case& file_case) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : parameters_of(model)) parameters.push_back(parameter);
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(file_case.facts["learning_rate"].number())
                                           .momentum(file_case.facts["momentum"].number()));
}

RankStep rank_step(const Case& file_case, int rank, std::size_t step, c10::Device device) {
  const auto given = file_case.ranks[rank]["given"]["steps"][step];
  RankStep result{.batches = {}, .uses = given["uses"].integers()};
  const auto batches = given["batches"];
  for (std::size_t i = 0; i < batches.size(); ++i) {
    // Copies for the same reason as in load().
    result.batches.push_back({batches[i][0].tensor().clone().to(device), batches[i][1].tensor().clone().to(device)});
  }
  return result;
}

void zero_gradients(const torch::nn::Module& model, const std::string& how) {
  for (const auto& [name, parameter] : parameters_of(model)) {
    auto& gradient = parameter.mutable_grad();
    if (how == "keep" || !gradient.defined()) continue;
    if (how == "none") {
      gradient.reset();
    } else {
      gradient.zero_();
    }
  }
}

at::Tensor flat_state(const torch::nn::Module& model, bool has_buffers) {
  auto tensors = parameters_of(model);
  if (has_buffers) {
    for (auto& buffer : detail::buffers_of(model, {})) tensors.push_back(buffer);
  }
  std::vector<at::Tensor> parts;
  for (const auto& [name, tensor] : tensors) {
    const auto value = tensor.detach();
    parts.push_back((value.is_complex() ? at::view_as_real(value) : value).to(at::kDouble).flatten());
  }
  return at::cat(parts);
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance, const std::string& what) {
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const auto ours = actual.detach().cpu().contiguous();
  const auto theirs = expected.cpu().contiguous();
  const auto describe = [&] {
    return str(what, ": differs by up to ", (ours - theirs).abs().max().item().toDouble(), "; the largest value is ",
               theirs.abs().max().item().toDouble());
  };
  if (ours.numel() == 0) return;
  if (!tolerance) {
    EXPECT_EQ(std::memcmp(ours.const_data_ptr(), theirs.const_data_ptr(), ours.nbytes()), 0) << describe();
  } else {
    EXPECT_TRUE(at::allclose(ours, theirs, *tolerance, *tolerance)) << describe();
  }
}

void expect_gradients(const torch::nn::Module& model, const Node& expected, Tolerance tolerance) {
  for (const auto& [name, parameter] : parameters_of(model)) {
    const auto what = str("gradient of ", name);
    const auto& gradient = parameter.grad();
    const auto theirs = expected[name];
    ASSERT_EQ(gradient.defined(), !theirs.is_none()) << what;
    if (!gradient.defined()) continue;
    ASSERT_EQ(gradient.layout() == at::kStrided, theirs.is_tensor()) << what << " is sparse for one only";
    if (theirs.is_tensor()) {
      EXPECT_EQ(gradient.strides(), theirs.tensor().strides()) << what;
      expect_same(gradient, theirs.tensor(), tolerance, what);
      continue;
    }
    const auto merged = gradient.coalesce();
    expect_same(merged.indices(), theirs["indices"].tensor(), std::nullopt, what + ", its rows");
    expect_same(merged.values(), theirs["values"].tensor(), tolerance, what);
  }
}

}  // namespace lockstep::ddp_oracle
