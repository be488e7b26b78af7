// Checkpointed<M>: a module M whose forward is checkpointed. It is an M: built as one, with M's forward, names and
// members, and it goes wherever M goes, into Sequential, AnyModule, fully_shard() and files.
//
//   torch::nn::Sequential model(lockstep::Checkpointed<Block>(64), lockstep::Checkpointed<Block>(64), Head(64));
//
// Code that calls forward() through a pointer to M itself runs it as it is, unless M's forward is virtual.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/nn/forward_of.h"

namespace lockstep {

template <class M, class Forward = typename detail::ForwardOf<M>::type>
class CheckpointedImpl;

template <class M, class Class, class Result, class... Args>
class CheckpointedImpl<M, Result (Class::*)(Args...)> : public M {
 public:
  using M::M;
  /// Takes over the tensors and children of a module that is there already.
  explicit CheckpointedImpl(const M& module) : M(module) {}

  Result forward(Args... args) { return run(std::forward<Args>(args)...); }

  /// The same with the defaults of M's forward.
  template <class... Some>
  decltype(auto) run(Some&&... args) {
    // The module lives until backward has run; one that no shared_ptr holds is the program's business.
    const auto call = [this, self = this->weak_from_this().lock()](auto&&... each) -> decltype(auto) {
      const detail::KeptStatistics statistics(this);
      return M::forward(std::forward<decltype(each)>(each)...);
    };
    auto options = options_;
    if (options.name.empty()) options.name = this->name();
    return checkpoint(options, call, std::forward<Some>(args)...);
  }

  void set_checkpoint_options(CheckpointOptions options) { options_ = std::move(options); }
  const CheckpointOptions& checkpoint_options() const { return options_; }

  /// M's clone is no checkpointed one.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    const auto plain = M::clone(device);
    if constexpr (std::is_copy_constructible_v<M>) {
      if (const auto* module = dynamic_cast<const M*>(plain.get())) {
        auto copy = std::make_shared<CheckpointedImpl>(*module);
        copy->options_ = options_;
        return copy;
      }
    }
    return plain;
  }

 private:
  CheckpointOptions options_;
};

template <class M, class Class, class Result, class... Args>
class CheckpointedImpl<M, Result (Class::*)(Args...) const> : public CheckpointedImpl<M, Result (Class::*)(Args...)> {
 public:
  using CheckpointedImpl<M, Result (Class::*)(Args...)>::CheckpointedImpl;
};

/// Holds it. `M` is a holder such as torch::nn::Linear, or a module's class. Made from the arguments of M's
/// constructor; or from a module (Checkpointed<Block>(*block)), whose tensors and children it shares.
template <class M>
class Checkpointed : public torch::nn::ModuleHolder<CheckpointedImpl<typename detail::ImplementationOf<M>::type>> {
 public:
  using torch::nn::ModuleHolder<CheckpointedImpl<typename detail::ImplementationOf<M>::type>>::ModuleHolder;

  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->run(std::forward<Args>(args)...);
  }
};

}  // namespace lockstep
