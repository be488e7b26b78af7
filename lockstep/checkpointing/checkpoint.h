// Activation checkpointing: what a function would save for backward is dropped, and computed again when backward needs
// it. Python's torch.utils.checkpoint with use_reentrant=False, for functions of any arguments and results.
//
//   auto y = lockstep::checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
//   auto z = lockstep::checkpoint(block, y);   // a holder; its running statistics are updated once
//
// The function must do the same when it runs again: docs/checkpointing.md says what is taken care of.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpointing/policy.h"
#include "lockstep/nn/capture_mark.h"
#include "lockstep/nn/tensor_tree.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

enum class DeterminismCheck {
  kDefault,  // recomputed tensors have the sizes, dtype and device of those that were dropped
  kNone
};

struct CheckpointOptions {
  /// The default generators of the CPU, of the devices of the arguments and of the current accelerator give the same
  /// numbers again; then they go on from where they were.
  bool preserve_rng_state = true;
  /// The same for generators of the program's own.
  std::vector<at::Generator> generators = {};
  DeterminismCheck determinism_check = DeterminismCheck::kDefault;
  /// Recomputation ends when all is there that backward needs, in the middle of the function: by an exception that is
  /// no std::exception.
  bool early_stop = true;
  /// Errors list the operators of forward and recomputation. Slow.
  bool debug = false;
  /// Which operators are not run again; none if it is empty.
  CheckpointPolicyFn policy = {};
  /// Kept results may be changed in place between forward and backward. Otherwise that is an error.
  bool allow_cache_entry_mutation = false;
  /// Makes what lives around the function: while it runs, and again while it runs again.
  std::function<std::shared_ptr<void>(bool is_recompute)> context_fn = {};
  /// What errors call it.
  std::string name = {};
};

namespace detail {

class CheckpointFrame;

/// Lives while a function runs whose activations are dropped. `tensors` are those among its arguments; `recompute` runs
/// it again with the same ones.
class CheckpointedRun {
 public:
  using Recompute = std::function<void(const std::vector<at::Tensor>& tensors)>;

  CheckpointedRun(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors, Recompute recompute);
  ~CheckpointedRun();
  CheckpointedRun(const CheckpointedRun&) = delete;
  CheckpointedRun& operator=(const CheckpointedRun&) = delete;

 private:
  struct Scopes;

  std::shared_ptr<CheckpointFrame> frame_;
  std::unique_ptr<Scopes> scopes_;
};

/// While a function runs again, its module's running statistics are left alone: forward has updated them. These are
/// buffers called running_mean, running_var and num_batches_tracked. Does nothing in a forward.
class KeptStatistics {
 public:
  explicit KeptStatistics(const torch::nn::Module* module);  // null: none
  ~KeptStatistics();
  KeptStatistics(const KeptStatistics&) = delete;
  KeptStatistics& operator=(const KeptStatistics&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // buffer, what it held
};

template <class T>
inline constexpr bool kIsBorrowed = false;
template <class T>
inline constexpr bool kIsBorrowed<c10::ArrayRef<T>> = true;
template <class T, std::size_t kExtent>
inline constexpr bool kIsBorrowed<std::span<T, kExtent>> = true;

/// A kept argument as the function got it: as an lvalue or as an rvalue.
template <class Arg, class Kept>
decltype(auto) as_given(Kept& kept) {
  if constexpr (std::is_lvalue_reference_v<Arg>) {
    return (kept);
  } else {
    return std::move(kept);
  }
}

/// Holders of modules that can be called so.
template <class F, class... Args>
concept HoldsModule = requires(F& function, Args&&... args) {
  function.ptr()->named_buffers();
  function->forward(std::forward<Args>(args)...);
};

template <class F, class... Args>
concept CanBeCalled = std::invocable<F&, Args...> || HoldsModule<F, Args...>;

/// A Sequential cannot be called as a function, though it is one.
template <class F, class... Args>
  requires CanBeCalled<F, Args...>
decltype(auto) call(F& function, Args&&... args) {
  if constexpr (HoldsModule<F, Args...>) {
    const KeptStatistics statistics(function.ptr().get());
    return function->forward(std::forward<Args>(args)...);
  } else {
    return std::invoke(function, std::forward<Args>(args)...);
  }
}

RegionRun checkpointed_region(const CheckpointOptions& options);

/// checkpoint() in a forward that is being captured: what the function does becomes one node, which is a checkpoint in
/// every run.
template <class F, class... Args>
decltype(auto) capture_checkpoint(RegionRecorder& recorder, const CheckpointOptions& options, F& function,
                                  Args&&... args) {
  using Output = decltype(call(function, std::forward<Args>(args)...));
  if constexpr (std::is_void_v<Output>) {
    check_not_capturing("checkpoint() of a function that returns nothing");
    call(function, std::forward<Args>(args)...);
  } else {
    const auto begin = recorder.begin_region("checkpoint()");
    decltype(auto) output = call(function, std::forward<Args>(args)...);
    std::vector<at::Tensor> tensors;
    const auto note = [&](at::Tensor& tensor) { tensors.push_back(tensor); };
    if constexpr (std::is_reference_v<Output>) {
      auto copy = output;
      visit_tensors(copy, note);
    } else {
      visit_tensors(output, note);
    }
    recorder.end_region(begin, "checkpoint()", tensors, checkpointed_region(options));
    return output;
  }
}

}  // namespace detail

/// What `function(args…)` returns. Tensors that it saves for backward are dropped, and computed again by another
/// `function(args…)` when backward needs the first of them. It and the arguments are copied for that, modules by their
/// holders; the tensors among the arguments are kept as autograd keeps them, so changing one in place before backward
/// is an error. What the function refers to otherwise must live until then. Nests. Local; without gradients it just
/// calls the function.
template <class F, class... Args>
  requires detail::CanBeCalled<F, Args...>
decltype(auto) checkpoint(const CheckpointOptions& options, F&& function, Args&&... args) {
  static_assert((!detail::kIsBorrowed<std::decay_t<Args>> && ...),
                "checkpoint() keeps its arguments until backward: give it a vector instead of an ArrayRef or a span.");
  static_assert((std::is_copy_constructible_v<std::decay_t<Args>> && ...),
                "checkpoint() keeps copies of its arguments until backward: give it a shared_ptr to what has none.");
  if (auto* const recorder = region_recorder()) {
    return detail::capture_checkpoint(*recorder, options, function, std::forward<Args>(args)...);
  }
  if (!c10::GradMode::is_enabled()) return detail::call(function, std::forward<Args>(args)...);
  using Kept = std::pair<std::decay_t<F>, std::tuple<std::decay_t<Args>...>>;
  const auto kept = std::make_shared<Kept>(std::piecewise_construct, std::forward_as_tuple(std::as_const(function)),
                                           std::forward_as_tuple(std::as_const(args)...));
  std::vector<at::Tensor> tensors;
  visit_tensors(kept->second, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
  const detail::CheckpointedRun run(options, tensors, [kept](const std::vector<at::Tensor>& again) {
    auto [function, arguments] = *kept;
    std::size_t next = 0;
    visit_tensors(arguments, [&](at::Tensor& tensor) { tensor = again[next++]; });
    std::apply([&function = function](
                   auto&... each) { static_cast<void>(detail::call(function, detail::as_given<Args>(each)...)); },
               arguments);
  });
  return detail::call(function, std::forward<Args>(args)...);
}
template <class F, class... Args>
  requires detail::CanBeCalled<F, Args...>
decltype(auto) checkpoint(F&& function, Args&&... args) {
  return checkpoint(CheckpointOptions(), std::forward<F>(function), std::forward<Args>(args)...);
}

/// Runs layers one after the other, in `segments` parts of equal length, all but the last one checkpointed. `layers` is
/// a torch::nn::Sequential, or a range of functions or AnyModules.
template <class Layers>
at::Tensor checkpoint_sequential(Layers&& layers, std::int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options = {});

/// Decides for all checkpoints of this thread whose forward runs while it lives, whatever their options say.
class SetCheckpointEarlyStop {
 public:
  explicit SetCheckpointEarlyStop(bool is_enabled);
  ~SetCheckpointEarlyStop();
  SetCheckpointEarlyStop(const SetCheckpointEarlyStop&) = delete;
  SetCheckpointEarlyStop& operator=(const SetCheckpointEarlyStop&) = delete;

 private:
  const int outer_;
};
[[nodiscard]] inline SetCheckpointEarlyStop set_checkpoint_early_stop(bool is_enabled) {
  return SetCheckpointEarlyStop(is_enabled);
}

namespace detail {

void check_segments(std::int64_t segments, std::size_t layers);

template <class Layer>
at::Tensor run_layer(Layer& layer, const at::Tensor& input) {
  if constexpr (requires { layer.forward(input); }) {
    return layer.forward(input);
  } else if constexpr (requires { layer->forward(input); }) {
    return layer->forward(input);
  } else {
    return layer(input);
  }
}

/// The module of an AnyModule or a holder, whose statistics are kept; null if it is none.
template <class Layer>
const torch::nn::Module* module_of(const Layer& layer) {
  if constexpr (requires { layer.ptr().get(); }) {
    return layer.ptr().get();
  } else {
    return nullptr;
  }
}

}  // namespace detail

template <class Layers>
at::Tensor checkpoint_sequential(Layers&& layers, std::int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options) {
  if constexpr (requires { layers->begin(); }) {
    return checkpoint_sequential(*layers, segments, std::move(input), options);
  } else {
    using Layer = std::decay_t<decltype(*layers.begin())>;
    const std::vector<Layer> all(layers.begin(), layers.end());
    detail::check_segments(segments, all.size());
    const auto count = all.size() / static_cast<std::size_t>(segments);
    const auto run = [](std::vector<Layer> part, at::Tensor tensor) {
      for (auto& layer : part) {
        const detail::KeptStatistics statistics(detail::module_of(layer));
        tensor = detail::run_layer(layer, tensor);
      }
      return tensor;
    };
    auto begin = all.begin();
    for (std::int64_t segment = 1; segment < segments; ++segment, begin += static_cast<std::ptrdiff_t>(count)) {
      std::vector<Layer> part(begin, begin + static_cast<std::ptrdiff_t>(count));
      input = checkpoint(
          options, [run, part = std::move(part)](const at::Tensor& tensor) { return run(part, tensor); }, input);
    }
    return run({begin, all.end()}, input);
  }
}

}  // namespace lockstep
