#include "lockstep/state/python_format.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

/// libtorch counts in integers, Python in tensors.
constexpr const char* kStep = "step";

c10::impl::GenericDict made_dict(const c10::TypePtr& key) {
  return c10::impl::GenericDict(key, c10::AnyType::get());
}

c10::IValue member(const c10::IValue& dict, const char* key) {
  TORCH_CHECK(dict.isGenericDict() && dict.toGenericDict().contains(key),
              "[lockstep/state] this is no optimizer's state_dict of Python: there is no '", key, "'");
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
    c10::impl::GenericList indices(c10::AnyType::get());
    for (const auto index : group.params) indices.push_back(index);
    options.insert("params", indices);
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
  for (const auto& each : groups.toListRef()) {
    auto& group = dict.param_groups.emplace_back();
    const auto params = member(each, "params");
    for (const auto& index : params.toListRef()) group.params.push_back(index.toInt());
    for (const auto& item : each.toGenericDict()) {
      const auto& name = item.key().toStringRef();
      if (name != "params" && !item.value().isNone()) group.options.emplace(name, item.value());
    }
  }
  return dict;
}

std::vector<char> torch_save_bytes(const c10::IValue& value) {
  std::vector<char> pickled;
  torch::jit::Pickler pickler(
      [&](const char* bytes, std::size_t size) { pickled.insert(pickled.end(), bytes, bytes + size); },
      /*tensor_table=*/nullptr, /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
      /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  std::vector<char> file;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* bytes, std::size_t size) {
    const auto* first = static_cast<const char*>(bytes);
    file.insert(file.end(), first, first + size);
    return size;
  });
  const auto& tensors = pickler.tensorData();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto memory = torch::jit::getWriteableTensorData(tensors[i]);
    writer.writeRecord(str("data/", i), memory.data(), memory.sizeInBytes());
  }
  writer.writeRecord("data.pkl", pickled.data(), pickled.size());
  writer.writeEndOfFile();
  return file;
}

void save_python_state(const std::string& path, const OptimizerStateDict& dict) {
  const auto bytes = torch_save_bytes(to_python(dict));
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  TORCH_CHECK(out, "[lockstep/state] cannot write ", path, ": ", std::strerror(errno));
}

OptimizerStateDict load_python_state(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  TORCH_CHECK(in, "[lockstep/state] cannot read ", path, ": ", std::strerror(errno));
  return from_python(torch::jit::pickle_load({std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()}));
}

}  // namespace lockstep
