// Prepared<M>: a module M whose arguments and results a plan may bring to other layouts. It is an M: built as one, with
// M's forward, names and members, and it goes wherever M goes, into Sequential, AnyModule, Checkpointed<> and files.
//
//   struct BlockImpl : torch::nn::Module {
//     BlockImpl() { register_module("attention", attention); }
//     lockstep::Prepared<Attention> attention{64, 8};
//   };
//   lockstep::parallelize_module(
//       *block, mesh["tp"],
//       {{"attention", lockstep::PrepareModuleInput({.input_layouts = {lockstep::Shard(1)},
//                                                    .desired_input_layouts = {lockstep::Replicate()}})},
//        …});
//
// Until a plan names it, it is M. Code that calls forward() through a pointer to M itself runs it as it is, unless M's
// forward is virtual.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/nn/forward_of.h"
#include "lockstep/nn/tensor_tree.h"
#include "lockstep/tp/prepare.h"

namespace lockstep {

namespace detail {
class PieceSizes;
}

/// What a module of any type is prepared for. Its forward is collective over the mesh where values must travel.
class PreparedModule {
 public:
  /// From the next forward on. Local. Refuses a mesh of several axes, and a module that has been prepared so before.
  void prepare_input(const DeviceMesh& mesh, const PrepareInputOptions& options);
  void prepare_output(const DeviceMesh& mesh, const PrepareOutputOptions& options);
  bool is_input_prepared() const { return input_.has_value(); }
  bool is_output_prepared() const { return output_.has_value(); }

 protected:
  /// Where something may be brought to another layout.
  struct Preparation {
    DeviceMesh mesh;
    OptionalLayouts layouts;
    OptionalLayouts desired;
    bool use_local_output;
    std::shared_ptr<detail::PieceSizes> piece_sizes;

    /// Refuses a number of layouts that is not `count`.
    void check_count(std::size_t count, const std::string& module, const char* things) const;
    /// The tensor at `index`; an undefined one as it is.
    at::Tensor prepared(const at::Tensor& tensor, std::size_t index) const;
    /// Refuses a layout for what is no tensor.
    void check_is_left(std::size_t index, const std::string& module) const;
  };

  std::optional<Preparation> input_;
  std::optional<Preparation> output_;
};

namespace detail {

template <class T>
inline constexpr bool kIsTensor = std::is_convertible_v<T, at::Tensor>;
template <class T>
inline constexpr bool kIsOptionalTensor = std::is_same_v<std::remove_cvref_t<T>, std::optional<at::Tensor>>;

/// What an argument given as `T` is kept as until M's forward has it: tensors are exchanged, the rest is passed on.
template <class T>
using PreparedArgument = std::conditional_t<kIsTensor<T>, at::Tensor,
                                            std::conditional_t<kIsOptionalTensor<T>, std::optional<at::Tensor>, T&&>>;

}  // namespace detail

template <class M, class Forward = typename detail::ForwardOf<M>::type>
class PreparedImpl;

template <class M, class Class, class Result, class... Args>
class PreparedImpl<M, Result (Class::*)(Args...)> : public M, public PreparedModule {
 public:
  using M::M;
  /// Takes over the tensors and children of a module that is there already.
  explicit PreparedImpl(const M& module) : M(module) {}

  Result forward(Args... args) { return run(std::forward<Args>(args)...); }

  /// The same with the defaults of M's forward. Layouts are counted against the arguments that are given.
  template <class... Some>
  decltype(auto) run(Some&&... args) {
    if (!input_) return finished([&]() -> decltype(auto) { return M::forward(std::forward<Some>(args)...); });
    input_->check_count(sizeof...(Some), this->name(), "arguments");
    std::size_t index = 0;
    // In braces: all ranks bring them to their layouts in one order.
    std::tuple<detail::PreparedArgument<Some>...> prepared{argument(std::forward<Some>(args), index++)...};
    return finished([&]() -> decltype(auto) { return call<Some...>(prepared, std::index_sequence_for<Some...>()); });
  }

  /// M's clone is no prepared one.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    const auto plain = M::clone(device);
    if constexpr (std::is_copy_constructible_v<M>) {
      if (const auto* module = dynamic_cast<const M*>(plain.get())) {
        auto copy = std::make_shared<PreparedImpl>(*module);
        static_cast<PreparedModule&>(*copy) = *this;
        return copy;
      }
    }
    return plain;
  }

 private:
  template <class Some>
  detail::PreparedArgument<Some> argument(Some&& given, std::size_t index) const {
    if constexpr (detail::kIsTensor<Some>) {
      return input_->prepared(given, index);
    } else if constexpr (detail::kIsOptionalTensor<Some>) {
      return given ? std::optional<at::Tensor>(input_->prepared(*given, index)) : std::nullopt;
    } else {
      constexpr bool kIsAbsent = std::is_same_v<std::remove_cvref_t<Some>, std::nullopt_t>;
      if constexpr (!kIsAbsent) input_->check_is_left(index, this->name());
      return std::forward<Some>(given);
    }
  }

  template <class... Some, std::size_t... kIndex>
  decltype(auto) call(std::tuple<detail::PreparedArgument<Some>...>& prepared, std::index_sequence<kIndex...>) {
    return M::forward(passed<Some>(std::get<kIndex>(prepared))...);
  }

  /// As it was given, where that is possible: a tensor that was an lvalue is one.
  template <class Some, class Kept>
  static decltype(auto) passed(Kept& kept) {
    if constexpr (std::is_lvalue_reference_v<Some>) {
      return (kept);
    } else {
      return std::move(kept);
    }
  }

  template <class Call>
  auto finished(const Call& call) {
    using Output = std::invoke_result_t<Call>;
    if constexpr (std::is_void_v<Output>) {
      call();
    } else {
      std::remove_cvref_t<Output> result = call();
      if (!output_) return result;
      std::size_t count = 0;
      visit_tensors(result, [&](at::Tensor&) { ++count; });
      output_->check_count(count, this->name(), "results");
      std::size_t index = 0;
      visit_tensors(result, [&](at::Tensor& tensor) { tensor = output_->prepared(tensor, index++); });
      return result;
    }
  }
};

template <class M, class Class, class Result, class... Args>
class PreparedImpl<M, Result (Class::*)(Args...) const> : public PreparedImpl<M, Result (Class::*)(Args...)> {
 public:
  using PreparedImpl<M, Result (Class::*)(Args...)>::PreparedImpl;
};

/// Holds it. `M` is a holder such as torch::nn::Linear, or a module's class. Made from the arguments of M's
/// constructor; or from a module (Prepared<Block>(*block)), whose tensors and children it shares.
template <class M>
class Prepared : public torch::nn::ModuleHolder<PreparedImpl<typename detail::ImplementationOf<M>::type>> {
 public:
  using torch::nn::ModuleHolder<PreparedImpl<typename detail::ImplementationOf<M>::type>>::ModuleHolder;

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->run(std::forward<Args>(args)...);
  }
};

}  // namespace lockstep
