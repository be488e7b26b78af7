// Compares ZeroRedundancyOptimizer with Python's: parameters after every step and the consolidated state, and state
// files in both directions.
#include <torch/serialize.h>

#include <cstdlib>
#include <fstream>

#include "lockstep/base/str.h"
#include "lockstep/state/python_format.h"
#include "lockstep/testing/temp_dir.h"
#include "tests/support/oracle_reference.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using oracle::at_key;
using oracle::tensors_of;
using torch::optim::AdagradOptions;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Python's loops and libtorch's divide and multiply in another order.
constexpr Within kRounding{2e-6};

const c10::IValue& reference() {
  static const auto value = oracle::run_reference("zero/zero_reference.py");
  return value;
}

class ZeroOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (reference().isNone()) GTEST_SKIP() << "there is no Python to compare with";
  }
};

std::vector<at::Tensor> leaves_of(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> leaves;
  for (const auto& value : values) leaves.push_back(value.clone().requires_grad_());
  return leaves;
}

void set_gradients_of(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                      std::size_t step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = step == 2 && i == 1 ? at::Tensor() : gradients[i].clone();
  }
}

/// Both have options Python does not, and the other way round.
void expect_same_common_options(const NamedValues& actual, const NamedValues& expected) {
  for (const auto& [name, value] : actual) {
    const auto found = expected.find(name);
    if (found == expected.end() || value.isNone()) continue;
    // Python says 0 for 0.0.
    const auto wanted =
        value.isDouble() && found->second.isInt() ? c10::IValue(1.0 * found->second.toInt()) : found->second;
    EXPECT_EQ(value, wanted) << name;
  }
  EXPECT_EQ(actual.count("lr"), 1U);
}

template <class Optim, class Options>
void compare(const World& world, const c10::IValue& subject, const Options& options, const Options& second_options) {
  const auto before = tensors_of(at_key(subject, "before"));
  const auto gradients = at_key(subject, "gradients").toList();
  const auto after = at_key(subject, "after").toList();
  const bool has_groups = at_key(subject, "has_groups").toBool();
  for (auto& [name, zero] : ways(world.group())) {
    // With views or without: as in Python; elements are compared with both.
    if (zero.partition != ZeroPartition::kElements &&
        zero.parameters_as_bucket_view != at_key(subject, "as_view").toBool()) {
      continue;
    }
    SCOPED_TRACE(str(c10::demangle_type<Optim>(), ", ", name, has_groups ? ", two groups" : ""));
    const auto parameters = leaves_of(before);
    std::vector<OptimizerParamGroup> groups;
    if (has_groups) {
      std::vector<std::vector<at::Tensor>> members(2);
      for (std::size_t i = 0; i < parameters.size(); ++i) members[i % 2].push_back(parameters[i]);
      groups.emplace_back(members[0]);
      groups.emplace_back(members[1], std::make_unique<Options>(second_options));
    } else {
      groups.emplace_back(parameters);
    }
    ZeroRedundancyOptimizer<Optim> optimizer(groups, options, zero);
    for (std::size_t step = 0; step < gradients.size(); ++step) {
      set_gradients_of(parameters, tensors_of(gradients.get(step)), step);
      optimizer.step();
      expect_same(parameters, tensors_of(after.get(step)), str("step ", step), kRounding);
    }
    optimizer.consolidate_state_dict();
    if (world.rank() != 0) continue;
    const auto& actual = optimizer.state_dict();
    const auto expected = from_python(at_key(subject, "state"));
    ASSERT_EQ(actual.state.size(), expected.state.size());
    for (const auto& [index, values] : expected.state) {
      expect_same_values(actual.state.at(index), values, str("state ", index), kRounding);
    }
    ASSERT_EQ(actual.param_groups.size(), expected.param_groups.size());
    for (std::size_t i = 0; i < expected.param_groups.size(); ++i) {
      EXPECT_EQ(actual.param_groups[i].params, expected.param_groups[i].params);
      expect_same_common_options(actual.param_groups[i].options, expected.param_groups[i].options);
    }
  }
}

// ZERO-9, ZERO-15, ZERO-26, ZERO-35, ZERO-37
TEST_F(ZeroOracle, ParametersAndStateAgreeWithPython) {
  const auto cases = at_key(reference(), "cases");
  for (const auto& subject : cases.toListRef()) {
    const auto optimizer = at_key(subject, "optimizer").toStringRef();
    const auto world_size = static_cast<int>(at_key(subject, "world_size").toInt());
    testing::run_threads_in_gtest({.world_size = world_size}, [&](const World& world) {
      if (optimizer == "Adam") {
        compare<torch::optim::Adam>(world, subject, AdamOptions(0.01).weight_decay(0.1),
                                    AdamOptions(0.003).weight_decay(0.1));
      } else if (optimizer == "AdamW") {
        compare<torch::optim::AdamW>(world, subject, AdamWOptions(0.01).amsgrad(true),
                                     AdamWOptions(0.003).amsgrad(true));
      } else if (optimizer == "SGD") {
        compare<torch::optim::SGD>(world, subject, SGDOptions(0.1).momentum(0.9).nesterov(true),
                                   SGDOptions(0.003).momentum(0.9).nesterov(true));
      } else {
        compare<torch::optim::Adagrad>(world, subject, AdagradOptions(0.1), AdagradOptions(0.003));
      }
    });
  }
}

/// Loads a plain state of Python and goes on as it did; returns this and what C++ would save at that point.
template <class Optim>
c10::IValue go_on_from_python(const World& world, const std::string& name, const ZeroOptions& zero) {
  const auto saved = at_key(at_key(reference(), "plain"), name);
  const auto gradients = at_key(reference(), "gradients").toList();
  const auto parameters = leaves_of(tensors_of(at_key(saved, "values")));
  ZeroRedundancyOptimizer<Optim> optimizer(parameters, {1.0}, zero);
  optimizer.load_state_dict(from_python(at_key(saved, "state")));
  optimizer.consolidate_state_dict();
  c10::impl::GenericDict again(c10::StringType::get(), c10::AnyType::get());
  if (world.rank() == 0) {
    again.insert("values", at_key(saved, "values"));
    again.insert("state", to_python(optimizer.state_dict()));
  }
  for (const std::size_t step : {2, 3}) {
    const auto given = tensors_of(gradients.get(step));
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = given[i].clone();
    optimizer.step();
  }
  expect_same(parameters, tensors_of(at_key(saved, "after")), name, kRounding);
  return again;
}

// ZERO-40, ZERO-41
TEST_F(ZeroOracle, StateMovesFromPythonAndBack) {
  for (const std::size_t way : {0, 1, 2}) {
    c10::impl::GenericDict written(c10::StringType::get(), c10::AnyType::get());
    testing::run_threads_in_gtest({.world_size = 3}, [&](const World& world) {
      const auto zero = ways(world.group())[way].second;
      const auto keep = [&](const std::string& name, const c10::IValue& state) {
        if (world.rank() == 0) written.insert(name, state);
      };
      keep("Adam", go_on_from_python<torch::optim::Adam>(world, "Adam", zero));
      keep("AdamW", go_on_from_python<torch::optim::AdamW>(world, "AdamW", zero));
      keep("SGD", go_on_from_python<torch::optim::SGD>(world, "SGD", zero));
      keep("Adagrad", go_on_from_python<torch::optim::Adagrad>(world, "Adagrad", zero));
    });
    const testing::TempDir folder;
    const auto file = folder.file("state");
    const auto bytes = torch_save_bytes(written);
    std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const auto results = oracle::run_reference("zero/zero_reference.py", file);
    EXPECT_EQ(results.toGenericDict().size(), 4U);
    for (const auto& each : results.toGenericDict()) {
      const auto name = each.key().toStringRef();
      expect_same(tensors_of(each.value()), tensors_of(at_key(at_key(at_key(reference(), "plain"), name), "after")),
                  name);
    }
  }
}

// ZERO-41
TEST_F(ZeroOracle, StateFilesOpenInPython) {
  const testing::TempDir folder;
  const auto path = folder.file("state");
  const auto parameters = parameters_of({{4, 3}, {}, {5}});
  torch::optim::Adam plain(parameters, 0.25);
  set_gradients(parameters, 1);
  plain.step();
  save_python_state(path, state_dict_of(plain));
  expect_same_state(load_python_state(path), state_dict_of(plain));
  const auto script =
      str("import torch; p = [torch.zeros(4, 3), torch.zeros(()), torch.zeros(5)]; a = torch.optim.Adam(p); ",
          "a.load_state_dict(torch.load(\"", path, "\")); s = a.state_dict(); ",
          "assert s[\"param_groups\"][0][\"lr\"] == 0.25; assert s[\"state\"][2][\"step\"] == 1; ", "torch.save(s, \"",
          path, "\")");
  ASSERT_EQ(std::system(str("'", std::getenv("LOCKSTEP_PYTHON"), "' -c '", script, "'").c_str()), 0);
  const auto back = load_python_state(path);
  ASSERT_EQ(back.state.size(), 3U);
  for (const auto& [index, values] : back.state) {
    expect_same_values(values, state_dict_of(plain).state.at(index), str("state ", index));
  }
  testing::expect_error([&] { load_python_state(path + ".nowhere"); }, {"cannot read", ".nowhere"});
  testing::expect_error([&] { save_python_state(path + ".d/state", back); }, {"cannot write", "No such file"});
}

TEST(PythonState, OfAnotherFormIsRefused) {
  testing::expect_error([] { from_python(c10::IValue(3)); }, {"there is no 'state'"});
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("state", c10::impl::GenericDict(c10::IntType::get(), c10::AnyType::get()));
  testing::expect_error([&] { from_python(dict); }, {"there is no 'param_groups'"});
}

}  // namespace
}  // namespace lockstep
