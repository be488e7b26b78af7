// How values travel between workers: each type says how it becomes an IValue and comes back.
//
// Built in: tensors, bool, integers, floating point, enums, strings, optional, pair, tuple, vector, maps, WorkerInfo
// (here), RRef and RemoteModule (beside them). A struct of your own travels once it names its fields:
//
//     struct Batch { at::Tensor input; int64_t step; };
//     auto rpc_fields(Batch& batch) { return std::tie(batch.input, batch.step); }
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/base/str.h"

namespace lockstep::rpc {

using torch::distributed::rpc::WorkerInfo;

/// Specialise it for a type that rpc_fields() cannot describe: to(), from() and name().
template <class T>
struct Wire;

/// A value of another type than the function declares. Where it stood is added by whoever called.
class WireMismatch : public std::runtime_error {
 public:
  WireMismatch(const std::string& expected, const c10::IValue& value);
  WireMismatch(const std::string& expected, const std::string& got);
};

namespace detail {

template <class T>
concept HasFields = std::is_class_v<T> && requires(T& value) { rpc_fields(value); };

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

/// The elements of a tuple.
c10::ArrayRef<c10::IValue> elements_of(const c10::IValue& value, const std::string& expected);
void check_count(std::size_t got, std::size_t expected, const std::string& what);

}  // namespace detail

/// True for what can be an argument or a result.
template <class T>
concept Wired = requires(const T& value, const c10::IValue& wire) {
  { Wire<T>::to(value) } -> std::convertible_to<c10::IValue>;
  { Wire<T>::from(wire) } -> std::convertible_to<T>;
  { Wire<T>::name() } -> std::convertible_to<std::string>;
};

template <>
struct Wire<at::Tensor> {
  // An undefined tensor has no device, which agents ask for.
  static c10::IValue to(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    TORCH_CHECK(tensor.layout() == at::kStrided || tensor.layout() == at::kSparse, "[lockstep/rpc] a tensor of layout ",
                tensor.layout(), " does not travel. Call to_dense() before.");
    return tensor;
  }
  static at::Tensor from(const c10::IValue& value) {
    if (value.isNone()) return {};
    if (!value.isTensor()) throw WireMismatch(name(), value);
    return value.toTensor();
  }
  static std::string name() { return "Tensor"; }
};

template <>
struct Wire<bool> {
  static c10::IValue to(bool value) { return value; }
  static bool from(const c10::IValue& value) {
    if (!value.isBool()) throw WireMismatch(name(), value);
    return value.toBool();
  }
  static std::string name() { return "bool"; }
};

template <std::integral T>
struct Wire<T> {
  static c10::IValue to(T value) {
    if (!std::in_range<std::int64_t>(value)) throw WireMismatch("an integer of 64 bits with sign", str(value));
    return static_cast<std::int64_t>(value);
  }
  static T from(const c10::IValue& value) {
    if (!value.isInt()) throw WireMismatch(name(), value);
    if (!std::in_range<T>(value.toInt())) throw WireMismatch(str("int of ", sizeof(T), " bytes"), str(value.toInt()));
    return static_cast<T>(value.toInt());
  }
  static std::string name() { return "int"; }
};

template <std::floating_point T>
struct Wire<T> {
  static c10::IValue to(T value) { return static_cast<double>(value); }
  static T from(const c10::IValue& value) {
    if (value.isInt()) return static_cast<T>(value.toInt());  // remote<T>("worker", 1) of a constructor<double>()
    if (!value.isDouble()) throw WireMismatch(name(), value);
    return static_cast<T>(value.toDouble());
  }
  static std::string name() { return "float"; }
};

template <class T>
  requires std::is_enum_v<T>
struct Wire<T> {
  using Value = std::underlying_type_t<T>;
  static c10::IValue to(T value) { return Wire<Value>::to(static_cast<Value>(value)); }
  static T from(const c10::IValue& value) { return static_cast<T>(Wire<Value>::from(value)); }
  static std::string name() { return "enum"; }
};

template <>
struct Wire<std::string> {
  static c10::IValue to(const std::string& value) { return value; }
  static std::string from(const c10::IValue& value) {
    if (!value.isString()) throw WireMismatch(name(), value);
    return value.toStringRef();
  }
  static std::string name() { return "str"; }
};

/// Texts in calls that do not know the parameter's type.
template <>
struct Wire<const char*> {
  static c10::IValue to(const char* value) { return std::string(value); }
};

template <class T>
struct Wire<std::optional<T>> {
  // A tuple of none or one: an optional tensor may hold an undefined one.
  static c10::IValue to(const std::optional<T>& value) {
    std::vector<c10::IValue> elements;
    if (value) elements.push_back(Wire<T>::to(*value));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static std::optional<T> from(const c10::IValue& value) {
    const auto elements = detail::elements_of(value, name());
    if (elements.empty()) return std::nullopt;
    detail::check_count(elements.size(), 1, name());
    return Wire<T>::from(elements[0]);
  }
  static std::string name() { return str("Optional[", Wire<T>::name(), "]"); }
};

template <class T>
  requires detail::IsTuple<T>::value
struct Wire<T> {
  static constexpr auto kSize = std::tuple_size_v<T>;
  static c10::IValue to(const T& value) {
    std::vector<c10::IValue> elements;
    elements.reserve(kSize);
    std::apply([&](const auto&... each) { (elements.push_back(Wire<std::decay_t<decltype(each)>>::to(each)), ...); },
               value);
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static T from(const c10::IValue& value) {
    const auto elements = detail::elements_of(value, name());
    detail::check_count(elements.size(), kSize, name());
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return T{Wire<std::tuple_element_t<I, T>>::from(elements[I])...};
    }(std::make_index_sequence<kSize>());
  }
  static std::string name() {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return str("Tuple[", join(std::vector<std::string>{Wire<std::tuple_element_t<I, T>>::name()...}, ", "), "]");
    }(std::make_index_sequence<kSize>());
  }
};

template <class T>
struct Wire<std::vector<T>> {
  static c10::IValue to(const std::vector<T>& value) {
    std::vector<c10::IValue> elements;
    elements.reserve(value.size());
    for (const auto& each : value) elements.push_back(Wire<T>::to(each));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static std::vector<T> from(const c10::IValue& value) {
    const auto elements = detail::elements_of(value, name());
    std::vector<T> result;
    result.reserve(elements.size());
    for (const auto& each : elements) result.push_back(Wire<T>::from(each));
    return result;
  }
  static std::string name() { return str("List[", Wire<T>::name(), "]"); }
};

namespace detail {

template <class Map>
struct WireMap {
  using Key = typename Map::key_type;
  using Value = typename Map::mapped_type;
  static c10::IValue to(const Map& map) {
    std::vector<c10::IValue> elements;
    elements.reserve(2 * map.size());
    for (const auto& [key, value] : map) {
      elements.push_back(Wire<Key>::to(key));
      elements.push_back(Wire<Value>::to(value));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static Map from(const c10::IValue& value) {
    const auto elements = elements_of(value, name());
    check_count(elements.size() % 2, 0, name());
    Map result;
    for (std::size_t i = 0; i < elements.size(); i += 2) {
      result.emplace(Wire<Key>::from(elements[i]), Wire<Value>::from(elements[i + 1]));
    }
    return result;
  }
  static std::string name() { return str("Dict[", Wire<Key>::name(), ", ", Wire<Value>::name(), "]"); }
};

}  // namespace detail

template <class Key, class Value>
struct Wire<std::map<Key, Value>> : detail::WireMap<std::map<Key, Value>> {};
template <class Key, class Value>
struct Wire<std::unordered_map<Key, Value>> : detail::WireMap<std::unordered_map<Key, Value>> {};

template <>
struct Wire<WorkerInfo> {
  static c10::IValue to(const WorkerInfo& info) {
    return c10::ivalue::Tuple::create({c10::IValue(info.name_), c10::IValue(static_cast<std::int64_t>(info.id_))});
  }
  static WorkerInfo from(const c10::IValue& value) {
    auto [worker, id] = Wire<std::pair<std::string, std::int64_t>>::from(value);
    return {std::move(worker), id};
  }
  static std::string name() { return "WorkerInfo"; }
};

template <detail::HasFields T>
struct Wire<T> {
  using Fields = decltype(rpc_fields(std::declval<T&>()));
  static c10::IValue to(const T& value) {
    std::vector<c10::IValue> elements;
    // rpc_fields() hands out references to write to; nothing is written here.
    std::apply([&](auto&... each) { (elements.push_back(Wire<std::decay_t<decltype(each)>>::to(each)), ...); },
               rpc_fields(const_cast<T&>(value)));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  static T from(const c10::IValue& value) {
    const auto elements = detail::elements_of(value, name());
    detail::check_count(elements.size(), std::tuple_size_v<Fields>, name());
    T result;
    std::size_t next = 0;
    std::apply([&](auto&... each) { ((each = Wire<std::decay_t<decltype(each)>>::from(elements[next++])), ...); },
               rpc_fields(result));
    return result;
  }
  static std::string name() {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return str("Struct[",
                 join(std::vector<std::string>{Wire<std::decay_t<std::tuple_element_t<I, Fields>>>::name()...}, ", "),
                 "]");
    }(std::make_index_sequence<std::tuple_size_v<Fields>>());
  }
};

}  // namespace lockstep::rpc
