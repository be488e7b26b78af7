#include "lockstep/checkpoint/value_json.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/json_text.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::ordered_json;

// What JSON has no form for is an object of one item, with one of these names.
constexpr const char* kNumber = "float";
constexpr const char* kTuple = "tuple";
constexpr const char* kDict = "dict";

Json json_of_double(double value) {
  if (std::isfinite(value)) return value;
  return {{kNumber, std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

Json json_of(const c10::IValue& value, const std::string& name, int depth);

template <class Items>
Json json_of_items(const Items& items, const std::string& name, int depth) {
  Json json = Json::array();
  for (const auto& item : items) json.push_back(json_of(item, name, depth));
  return json;
}

Json json_of(const c10::IValue& value, const std::string& name, int depth) {
  // Each level here is up to two of JSON, and an index puts values below two of its own.
  TORCH_CHECK(2 * depth + 4 < kDeepestJson, "[lockstep/checkpoint] '", name, "' is nested too deep");
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return json_of_double(value.toDouble());
  if (value.isString()) {
    TORCH_CHECK(is_text(value.toStringRef()), "[lockstep/checkpoint] '", name,
                "' is no UTF-8 text: give it as bytes, or as a tensor");
    return value.toStringRef();
  }
  if (value.isTuple()) return {{kTuple, json_of_items(value.toTupleRef().elements(), name, depth + 1)}};
  if (value.isList()) return json_of_items(value.toListRef(), name, depth + 1);
  if (value.isGenericDict()) {
    Json items = Json::object();
    for (const auto& item : value.toGenericDict()) {
      TORCH_CHECK(item.key().isString() && is_text(item.key().toStringRef()), "[lockstep/checkpoint] '", name,
                  "' is a dict by something else than names");
      items[item.key().toStringRef()] = json_of(item.value(), name, depth + 1);
    }
    return {{kDict, std::move(items)}};
  }
  TORCH_CHECK(false, "[lockstep/checkpoint] '", name, "' is a ", value.tagKind(),
              ", which a checkpoint cannot hold as a value");
}

/// Typed, as libtorch's own lists are, where all are of one type.
c10::IValue list_from(const Json& json, const std::string& name) {
  std::vector<c10::IValue> items;
  for (const auto& item : json) items.push_back(value_from(item, name));
  const auto all = [&](bool (c10::IValue::*is_so)() const) {
    return !items.empty() && std::all_of(items.begin(), items.end(), [&](const auto& each) { return (each.*is_so)(); });
  };
  const auto typed = [&](auto list) {
    for (const auto& item : items) list.push_back(item.to<typename decltype(list)::value_type>());
    return list;
  };
  if (all(&c10::IValue::isInt)) return typed(c10::List<int64_t>());
  if (all(&c10::IValue::isDouble)) return typed(c10::List<double>());
  if (all(&c10::IValue::isBool)) return typed(c10::List<bool>());
  if (all(&c10::IValue::isString)) return typed(c10::List<std::string>());
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& item : items) list.push_back(item);
  return list;
}

c10::IValue special_from(const Json& json, const std::string& name) {
  const auto& key = json.begin().key();
  const auto& content = json.begin().value();
  if (key == kNumber && content.is_string()) {
    const auto text = content.get<std::string>();
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf" || text == "-inf") return (text == "inf" ? 1 : -1) * std::numeric_limits<double>::infinity();
  }
  if (key == kTuple && content.is_array()) {
    std::vector<c10::IValue> items;
    for (const auto& item : content) items.push_back(value_from(item, name));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (key == kDict && content.is_object()) {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [item, value] : content.items()) dict.insert(item, value_from(value, name));
    return dict;
  }
  TORCH_CHECK(false, "[lockstep/checkpoint] the value of '", name, "' has an unknown form: \"", key, "\"");
}

}  // namespace

Json json_of(const c10::IValue& value, const std::string& name) {
  return json_of(value, name, 0);
}

c10::IValue value_from(const Json& json, const std::string& name) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) {
    const bool fits = !json.is_number_unsigned() || json.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
    TORCH_CHECK(fits, "[lockstep/checkpoint] the value of '", name, "' is too large a number: ", json.get<uint64_t>());
    return json.get<int64_t>();
  }
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) return list_from(json, name);
  TORCH_CHECK(json.is_object() && json.size() == 1, "[lockstep/checkpoint] the value of '", name,
              "' has an unknown form");
  return special_from(json, name);
}

}  // namespace lockstep::detail
