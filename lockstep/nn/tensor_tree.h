// Tensors inside what a module takes and returns: containers of the standard library, and your own types.
//
// For a type of your own, give its namespace a function that visits the tensors in it; that is all:
//
//   struct Output { at::Tensor logits; std::optional<at::Tensor> loss; };
//   template <class Visit>
//   void for_each_tensor(Output& output, Visit&& visit) {
//     lockstep::visit_tensors(output.logits, visit);
//     lockstep::visit_tensors(output.loss, visit);
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace lockstep {

namespace detail {

struct AnyVisit {
  void operator()(at::Tensor&) const {}
};

template <class T>
concept HasOwnVisit = requires(T& value, AnyVisit visit) { for_each_tensor(value, visit); };

template <class T>
inline constexpr bool kIsTuple = false;
template <class... Ts>
inline constexpr bool kIsTuple<std::tuple<Ts...>> = true;
template <class A, class B>
inline constexpr bool kIsTuple<std::pair<A, B>> = true;

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <class T>
inline constexpr bool kIsVariant = false;
template <class... Ts>
inline constexpr bool kIsVariant<std::variant<Ts...>> = true;

template <class T>
concept IsMap = requires(T& value) {
  typename T::mapped_type;
  value.begin()->second;
};

template <class T>
concept IsSequence = !IsMap<T> && requires(T& value) {
  typename T::value_type;
  value.begin();
  value.end();
} && !std::is_same_v<typename T::value_type, char>;

}  // namespace detail

/// Calls visit(tensor) for every tensor in `value`, as a reference that may be assigned to. What it does not know holds
/// none.
template <class T, class Visit>
void visit_tensors(T& value, Visit&& visit) {
  using Plain = std::remove_cv_t<T>;
  if constexpr (std::is_base_of_v<at::TensorBase, Plain> && std::is_convertible_v<Plain&, at::Tensor&>) {
    visit(static_cast<at::Tensor&>(value));
  } else if constexpr (detail::HasOwnVisit<T>) {
    for_each_tensor(value, visit);
  } else if constexpr (detail::kIsTuple<Plain>) {
    std::apply([&](auto&... parts) { (visit_tensors(parts, visit), ...); }, value);
  } else if constexpr (detail::kIsOptional<Plain>) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (detail::kIsVariant<Plain>) {
    std::visit([&](auto& part) { visit_tensors(part, visit); }, value);
  } else if constexpr (detail::IsMap<Plain>) {
    for (auto& [key, part] : value) visit_tensors(part, visit);
  } else if constexpr (detail::IsSequence<Plain>) {
    if constexpr (!std::is_const_v<std::remove_reference_t<decltype(*value.begin())>>) {
      for (auto& part : value) visit_tensors(part, visit);
    }
  }
}

}  // namespace lockstep
