#include "lockstep/zero/python_state.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

namespace lockstep {
namespace {

/// libtorch counts in integers, Python in tensors.
constexpr const char* kStep = "step";

c10::impl::GenericDict made_dict(const c10::TypePtr& key) {
  return c10::impl::GenericDict(key, c10::AnyType::get());
}

c10::IValue member(const c10::IValue& dict, const char* key) {
  TORCH_CHECK_VALUE(dict.isGenericDict() && dict.toGenericDict().contains(key),
                    "[lockstep/zero] this is no optimizer's state_dict of Python: there is no '", key, "'");
  return dict.toGenericDict().at(key);
}

}  // namespace

c10::IValue to_python(const OptimizerStateDict& dict) {
  auto state = made_dict(c10::IntType::get());
  for (const auto& [index, values] : dict.state) {
    auto of_parameter = made_dict(c10::StringType::get());
    for (const auto& [name, value] : values) {
      const bool is_count = name == kStep && value.isInt();
      of_parameter.insert(name, is_count ? at::scalar_tensor(static_cast<double>(value.toInt()), at::kFloat) : value);
    }
    state.insert(index, of_parameter);
  }
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const auto& group : dict.param_groups) {
    auto options = made_dict(c10::StringType::get());
    for (const auto& [name, value] : group.options) options.insert(name, value);
    options.insert("params", c10::List<int64_t>(group.params));
    groups.push_back(options);
  }
  auto whole = made_dict(c10::StringType::get());
  whole.insert("state", state);
  whole.insert("param_groups", groups);
  return whole;
}

OptimizerStateDict from_python(const c10::IValue& value) {
  OptimizerStateDict dict;
  const auto state = member(value, "state");
  const auto groups = member(value, "param_groups");
  for (const auto& each : state.toGenericDict()) {
    NamedValues values;
    for (const auto& item : each.value().toGenericDict()) {
      if (item.value().isNone()) continue;
      const auto& name = item.key().toStringRef();
      const bool is_count = name == kStep && item.value().isTensor();
      values.emplace(name, is_count ? c10::IValue(item.value().toTensor().item().toLong()) : item.value());
    }
    if (!values.empty()) dict.state.emplace(each.key().toInt(), std::move(values));
  }
  for (const c10::IValue& each : groups.toList()) {
    auto& group = dict.param_groups.emplace_back();
    for (const c10::IValue& index : member(each, "params").toList()) group.params.push_back(index.toInt());
    for (const auto& item : each.toGenericDict()) {
      const auto& name = item.key().toStringRef();
      if (name != "params" && !item.value().isNone()) group.options.emplace(name, item.value());
    }
  }
  return dict;
}

}  // namespace lockstep
