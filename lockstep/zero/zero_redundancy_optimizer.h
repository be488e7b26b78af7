// ZeroRedundancyOptimizer: optimizer state divided among the ranks. Python's torch.distributed.optim of that name.
//
//   lockstep::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(ddp.parameters(), {1e-3}, world.group());
//
// It is a torch::optim::Optimizer, so schedulers take it, and a Joinable. See docs/zero.md.
#pragma once

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/optim/optimizers.h"
#include "lockstep/zero/optimizer.h"

namespace lockstep {
namespace detail {

template <class Optim, class... Bases>
inline constexpr bool kIsOneOf = (std::is_same_v<Optim, Bases> || ...);

/// What an optimizer is built from: the type it names `Options`, or that of the libtorch optimizer it derives from.
template <class Optim>
auto options_type() {
  if constexpr (requires { typename Optim::Options; }) {
    return std::type_identity<typename Optim::Options>();
  } else if constexpr (std::derived_from<Optim, torch::optim::Adam>) {
    return std::type_identity<torch::optim::AdamOptions>();
  } else if constexpr (std::derived_from<Optim, torch::optim::AdamW>) {
    return std::type_identity<torch::optim::AdamWOptions>();
  } else if constexpr (std::derived_from<Optim, torch::optim::SGD>) {
    return std::type_identity<torch::optim::SGDOptions>();
  } else if constexpr (std::derived_from<Optim, torch::optim::Adagrad>) {
    return std::type_identity<torch::optim::AdagradOptions>();
  } else if constexpr (std::derived_from<Optim, torch::optim::RMSprop>) {
    return std::type_identity<torch::optim::RMSpropOptions>();
  } else if constexpr (std::derived_from<Optim, torch::optim::LBFGS>) {
    return std::type_identity<torch::optim::LBFGSOptions>();
  }
}

/// The optimizers whose update of an element depends on nothing but that element's gradient and state. Of your own:
/// those that say so by `static constexpr bool kIsElementwise = true`.
template <class Optim>
constexpr bool is_elementwise_optimizer() {
  if constexpr (requires { Optim::kIsElementwise; }) return Optim::kIsElementwise;
  return kIsOneOf<Optim, torch::optim::Adam, torch::optim::AdamW, torch::optim::SGD, torch::optim::Adagrad,
                  torch::optim::RMSprop, optim::Adadelta, optim::Adagrad, optim::Adam, optim::Adamax, optim::AdamW,
                  optim::RMSprop, optim::Rprop, optim::SGD>;
}

/// Whether the class or one it derives from overrides libtorch's load(), which does nothing.
template <class Optim>
constexpr bool has_load() {
  if constexpr (requires { &Optim::load; }) {
    return !std::is_same_v<decltype(&Optim::load), void (torch::optim::Optimizer::*)(torch::serialize::InputArchive&)>;
  }
  return true;  // several of that name
}

}  // namespace detail

/// `Optim` is any optimizer that can be built from parameter groups and options: those of torch::optim,
/// lockstep::optim, and your own. One of your own derives from one of libtorch's or names its options type `Options`;
/// it must accept empty groups and step without a closure, and override save() and load() if it keeps state of a type
/// of its own: that is tried on a parameter of one element. What it steps it takes from param_groups(), which change;
/// its own members stay as they are, and are in no checkpoint.
template <class Optim>
class ZeroRedundancyOptimizer final : public ZeroOptimizer {
  static_assert(std::derived_from<Optim, torch::optim::Optimizer>, "the local optimizer must be a torch::optim one");

 public:
  using LocalOptions = typename decltype(detail::options_type<Optim>())::type;
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  /// Local: runs no collective. `params` must be the same, in the same order, on all ranks. Refuses, naming positions:
  /// no parameter, undefined ones, those that are no leaves, sparse ones, different types of device, a parameter listed
  /// twice.
  explicit ZeroRedundancyOptimizer(const ParamGroups& params, LocalOptions options = {}, ZeroOptions zero = {})
      : ZeroOptimizer(params, type_of(options), std::move(zero)) {}
  explicit ZeroRedundancyOptimizer(std::vector<at::Tensor> params, LocalOptions options = {}, ZeroOptions zero = {})
      : ZeroRedundancyOptimizer(ParamGroups{{std::move(params)}}, std::move(options), std::move(zero)) {}
  /// A null group, which new_group() gives to ranks that are not in it, is refused.
  ZeroRedundancyOptimizer(const ParamGroups& params, LocalOptions options, const GroupPtr& group)
      : ZeroRedundancyOptimizer(params, std::move(options), ZeroOptions{.process_group = group}) {}
  ZeroRedundancyOptimizer(std::vector<at::Tensor> params, LocalOptions options, const GroupPtr& group)
      : ZeroRedundancyOptimizer(std::move(params), std::move(options), ZeroOptions{.process_group = group}) {}

  /// The learning rate alone: ZeroRedundancyOptimizer<optim::SGD>(params, 0.1). Options of libtorch's take it anyway.
  template <class Params, optim::LearningRate Number>
    requires requires(LocalOptions options) { options.lr = 0.1; }
  ZeroRedundancyOptimizer(Params params, Number lr, ZeroOptions zero = {})
      : ZeroRedundancyOptimizer(std::move(params), optim::with_lr<LocalOptions>(lr), std::move(zero)) {}
  template <class Params, optim::LearningRate Number>
    requires requires(LocalOptions options) { options.lr = 0.1; }
  ZeroRedundancyOptimizer(Params params, Number lr, const GroupPtr& group)
      : ZeroRedundancyOptimizer(std::move(params), optim::with_lr<LocalOptions>(lr), group) {}

  using ZeroOptimizer::step;
  /// step() with `local_step(optimizer)` in place of the local optimizer's own: for steps that take arguments. What it
  /// returns is returned.
  template <std::invocable<Optim&> LocalStep>
  at::Tensor step(LocalStep local_step) {
    return step_with(
        [&](torch::optim::Optimizer& local, const LossClosure&) { return local_step(static_cast<Optim&>(local)); },
        nullptr);
  }

  /// The optimizer of this rank's shard: Python's `optim`. With ZeroPartition::kElements its parameters are replaced
  /// now and then, and their state with them.
  Optim& local_optimizer() { return static_cast<Optim&>(local()); }

 private:
  static LocalOptimizerType type_of(const LocalOptions& options) {
    using GroupOptions = std::decay_t<decltype(*made(options))>;
    return {.name = c10::demangle_type<Optim>(),
            .is_elementwise = detail::is_elementwise_optimizer<Optim>(),
            .needs_all_parameters = std::derived_from<Optim, torch::optim::LBFGS>,
            .has_load = detail::has_load<Optim>(),
            .defaults = made(options),
            .make = [options](const ParamGroups& groups) { return std::make_unique<Optim>(groups, options); },
            .add_group = [](torch::optim::Optimizer& optimizer,
                            const auto& group) { static_cast<Optim&>(optimizer).add_param_group(group); },
            .assign =
                [](const auto& from, auto& to) {
                  const auto* source = dynamic_cast<const GroupOptions*>(&from);
                  auto* target = dynamic_cast<GroupOptions*>(&to);
                  if (source == nullptr || target == nullptr) return false;
                  *target = *source;
                  return true;
                }};
  }
  /// As parameter groups carry them.
  static auto made(const LocalOptions& options) {
    if constexpr (std::derived_from<LocalOptions, torch::optim::OptimizerOptions>) {
      return std::make_unique<LocalOptions>(options);
    } else {
      return std::make_unique<optim::GroupOptions<LocalOptions>>(options);
    }
  }
};

}  // namespace lockstep
