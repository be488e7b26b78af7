// Compiled<M>: a module M whose forward is captured once and runs through a backend from then on. Under
// DistributedDataParallel it is cut where gradient buckets end, so that their reductions overlap with backward.
//
//   DistributedDataParallel ddp(Compiled<Net>(options), group);       // an M: built as one, with M's names and members
//   Compiled<Net> faster(*net);                                       // shares the tensors of one that is there
//   compile(ddp);                                                     // a wrapper that is there
//
// What a capture bakes in is guarded: looks of inputs and parameters, arguments that are no tensors, train or eval,
// gradients on or off, autocast. Members that are no tensors are not, since nobody can list them: give a module whose
// forward depends on any a function capture_guard(const M&) beside it. A call that differs captures anew, up to
// CompileOptions::max_captures times; then the module runs as it is, with a warning. See docs/graph.md.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/graph/capture.h"
#include "lockstep/graph/program.h"
#include "lockstep/nn/capture_mark.h"
#include "lockstep/nn/forward_of.h"
#include "lockstep/nn/tensor_tree.h"

namespace lockstep {

namespace graph {

enum class SplitMode {
  kSplit,  // where gradient buckets end, inside of a DistributedDataParallel; whole elsewhere
  kOff     // never
};

struct CompileOptions {
  /// By name (backends.h), or a function of one's own.
  std::string backend = "autograd";
  Backend custom_backend = nullptr;
  SplitMode mode = SplitMode::kSplit;
  /// None: the caps of the wrapper it runs in.
  std::optional<std::size_t> bucket_bytes_cap = std::nullopt;
  std::optional<std::size_t> first_bucket_cap = std::nullopt;
  /// Makes the wrapper's buckets those of the cuts, in the first forward, which then is a collective of its group.
  bool aligns_buckets = false;
  /// A checkpoint() inside stays whole: one operator, with all the parameters in it. Without, it is refused where the
  /// graph is cut. It must write to nothing from outside, such as running statistics.
  bool keeps_regions = false;
  std::size_t max_captures = 8;
  Dump dump = nullptr;
};

namespace detail {

/// All of its bits.
std::string exact_text(double value);

template <class T>
concept Comparable = std::integral<T> || std::floating_point<T> || std::is_enum_v<T> || std::same_as<T, std::string>;

/// The parts of an argument that are no tensors, as text, so that captures are told apart by them. Types of your own
/// need a function capture_guard(value) beside them.
template <class T>
void add_guard(const T& value, std::string& text) {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (std::is_base_of_v<at::TensorBase, Plain>) {
    text += value.defined() ? "T" : "-";
  } else if constexpr (requires { capture_guard(value); }) {
    text += str("{", capture_guard(value), "}");
  } else if constexpr (std::is_enum_v<Plain>) {
    text += str(static_cast<std::underlying_type_t<Plain>>(value), ";");
  } else if constexpr (std::floating_point<Plain>) {
    text += exact_text(static_cast<double>(value));
  } else if constexpr (std::same_as<Plain, std::string>) {
    text += str(value.size(), ":", value);
  } else if constexpr (Comparable<Plain>) {
    text += str(value, ";");
  } else if constexpr (lockstep::detail::kIsTuple<Plain>) {
    std::apply([&](const auto&... each) { (add_guard(each, text), ...); }, value);
  } else if constexpr (lockstep::detail::kIsOptional<Plain>) {
    text += value ? "?" : "!";
    if (value) add_guard(*value, text);
  } else if constexpr (lockstep::detail::IsMap<Plain>) {
    for (const auto& [key, each] : value) {
      add_guard(key, text);
      add_guard(each, text);
    }
    text += ".";
  } else if constexpr (lockstep::detail::IsSequence<Plain>) {
    for (const auto& each : value) add_guard(each, text);
    text += ".";
  } else {
    static_assert(!sizeof(T*),
                  "a compiled forward cannot tell values of this type apart: give its namespace a "
                  "function std::string capture_guard(const T&)");
  }
}

}  // namespace detail

/// Captures and runs; what Compiled<M> and compile() share. Not for several threads at once.
class Compiler {
 public:
  Compiler(CompileOptions options, std::string name);
  ~Compiler();
  Compiler(const Compiler&) = delete;
  Compiler& operator=(const Compiler&) = delete;

  struct Result {
    std::vector<at::Tensor> outputs;
    std::shared_ptr<void> shape;  // what the capture with these guards returned, by `keep`
  };
  /// A module's forward on fakes; its result's form goes into `shape`.
  using OnFakes =
      std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& fakes, std::shared_ptr<void>& shape)>;
  /// The outputs for these inputs, through the program whose guards fit, which is made if there is none; none if there
  /// are too many: run the module itself. `forward` runs the module on fakes, and keeps what it returned in
  /// `shape`.
  std::optional<Result> run(torch::nn::Module& module, const std::vector<at::Tensor>& inputs,
                            const std::string& plain_arguments, const OnFakes& forward);

  /// The program of the last run; throws before the first.
  const Program& program() const;
  std::size_t captures() const;
  /// Why each capture but the first was made: how the call differed from the one before.
  const std::vector<std::string>& recapture_reasons() const { return recapture_reasons_; }

 private:
  struct Entry;

  /// Null if no program fits.
  const Entry* find(const std::vector<at::Tensor>& inputs, const std::string& plain_arguments) const;
  const Entry* add(torch::nn::Module& module, const std::vector<at::Tensor>& inputs, const std::string& plain_arguments,
                   const OnFakes& forward);

  const CompileOptions options_;
  const std::string name_;
  std::vector<std::unique_ptr<Entry>> entries_;
  const Entry* last_ = nullptr;
  std::vector<std::string> recapture_reasons_;
  bool has_warned_ = false;
};

namespace detail {

/// What a module's own capture_guard() says, if there is one.
template <class M>
std::string guard_of_module([[maybe_unused]] const M& module) {
  if constexpr (requires { capture_guard(module); }) {
    return str("{", capture_guard(module), "}");
  } else {
    return {};
  }
}

/// Calls `forward(args…)` of `module` through the compiler.
template <class Output, class Forward, class... Args>
Output run_compiled(Compiler& compiler, torch::nn::Module& module, std::string of_module, const Forward& forward,
                    const Args&... args) {
  if (is_capturing()) return forward(args...);  // its operators are part of what is being compiled around it
  std::string plain = std::move(of_module);
  (add_guard(args, plain), ...);
  std::tuple<Args...> copies(args...);
  std::vector<at::Tensor> inputs;
  visit_tensors(copies, [&](at::Tensor& tensor) { inputs.push_back(tensor); });
  const auto tensors_of = [](Output& output) {
    std::vector<at::Tensor> tensors;
    visit_tensors(output, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
    return tensors;
  };
  auto result =
      compiler.run(module, inputs, plain, [&](const std::vector<at::Tensor>& fakes, std::shared_ptr<void>& shape) {
        auto on_fakes = copies;
        std::size_t next = 0;
        visit_tensors(on_fakes, [&](at::Tensor& tensor) { tensor = fakes[next++]; });
        auto output = std::make_shared<Output>(std::apply(forward, on_fakes));
        auto tensors = tensors_of(*output);
        // Its form is kept, not its fakes.
        visit_tensors(*output, [](at::Tensor& tensor) { tensor = at::Tensor(); });
        shape = std::move(output);
        return tensors;
      });
  if (!result) return forward(args...);
  Output output = *std::static_pointer_cast<Output>(result->shape);
  std::size_t next = 0;
  visit_tensors(output, [&](at::Tensor& tensor) { tensor = result->outputs[next++]; });
  return output;
}

}  // namespace detail

template <class M, class Forward = typename lockstep::detail::ForwardOf<M>::type>
class CompiledImpl;

template <class M, class Class, class Result, class... Args>
class CompiledImpl<M, Result (Class::*)(Args...)> : public M {
 public:
  using M::M;
  /// Takes over the tensors and children of a module that is there already.
  explicit CompiledImpl(const M& module) : M(module) {}

  Result forward(Args... args) {
    if (!compiler_) compiler_ = std::make_unique<Compiler>(options_, this->name());
    return detail::run_compiled<std::remove_cvref_t<Result>>(
        *compiler_, *this, detail::guard_of_module(static_cast<const M&>(*this)),
        [this](const std::remove_cvref_t<Args>&... each) { return M::forward(each...); }, args...);
  }

  /// Before the first forward.
  void set_compile_options(CompileOptions options) {
    TORCH_CHECK(!compiler_, "[lockstep/graph] set_compile_options() comes after the first forward.");
    options_ = std::move(options);
  }
  /// Throws before the first forward.
  const Compiler& compiler() const {
    TORCH_CHECK(compiler_, "[lockstep/graph] nothing has been compiled yet: there was no forward.");
    return *compiler_;
  }

 private:
  CompileOptions options_;
  std::unique_ptr<Compiler> compiler_;
};

template <class M, class Class, class Result, class... Args>
class CompiledImpl<M, Result (Class::*)(Args...) const> : public CompiledImpl<M, Result (Class::*)(Args...)> {
 public:
  using CompiledImpl<M, Result (Class::*)(Args...)>::CompiledImpl;
};

}  // namespace graph

using graph::CompileOptions;
using graph::SplitMode;

/// Holds it, as Checkpointed<M> does.
template <class M>
class Compiled : public torch::nn::ModuleHolder<graph::CompiledImpl<typename detail::ImplementationOf<M>::type>> {
 public:
  using torch::nn::ModuleHolder<graph::CompiledImpl<typename detail::ImplementationOf<M>::type>>::ModuleHolder;

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
};

namespace graph::detail {

template <class Wrapper, class Module, class Class, class Result, class... Args>
std::shared_ptr<Compiler> compile_wrapped(Wrapper& wrapper, Module& module, CompileOptions options,
                                          Result (Class::* /*forward*/)(Args...)) {
  auto compiler = std::make_shared<Compiler>(std::move(options), module.name());
  using Output = std::remove_cvref_t<Result>;
  wrapper.replace_forward(std::function<Output(const std::remove_cvref_t<Args>&...)>(
      [compiler, &module](const std::remove_cvref_t<Args>&... args) {
        return run_compiled<Output>(
            *compiler, module, guard_of_module(module),
            [&module](const std::remove_cvref_t<Args>&... each) { return module.forward(each...); }, args...);
      }));
  return compiler;
}

}  // namespace graph::detail

/// Lets a wrapper that is there, such as a DistributedDataParallel, run its module compiled. What comes back tells of
/// captures and cuts.
template <class Wrapper>
std::shared_ptr<graph::Compiler> compile(Wrapper& wrapper, CompileOptions options = {}) {
  auto& module = *wrapper.module();
  using Module = std::remove_cvref_t<decltype(module)>;
  return graph::detail::compile_wrapped(wrapper, module, std::move(options),
                                        typename detail::ForwardOf<Module>::type{});
}

}  // namespace lockstep
