// A module around another one, whose forward it runs with something before and something after it: what
// DistributedDataParallel is, and other wrappers will be.
//
// The inner module is the child "module". It is called through one callable, which another layer may replace: by one
// that recomputes activations, or by a compiled one.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <any>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/nn/module_cast.h"
#include "lockstep/nn/tensor_tree.h"

namespace lockstep {

/// `M` is what a program holds of the inner module: a holder such as torch::nn::Linear, or a shared_ptr.
template <class M>
class WrappedModule : public torch::nn::Module {
 public:
  WrappedModule(const WrappedModule&) = delete;
  WrappedModule& operator=(const WrappedModule&) = delete;

  /// What the inner module's forward takes and returns.
  template <class... Args>
  auto forward(Args&&... args) {
    pre_forward();
    return finish_forward(run_inside(std::forward<Args>(args)...));
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The wrapped module, and its members: module()->weight.
  M& module() { return module_; }
  const M& module() const { return module_; }
  /// As holders are used: wrapper->forward(input), wrapper->parameters(). The wrapper's own, never past it.
  WrappedModule* operator->() { return this; }
  const WrappedModule* operator->() const { return this; }

  /// From now on `forward` is called instead of the inner module's own, by forwards with arguments of just these types;
  /// others are refused. It may call module()->forward(). An empty one undoes it.
  template <class Output, class... Args>
  void replace_forward(std::function<Output(const Args&...)> forward) {
    if (forward) {
      replacement_ = std::move(forward);
    } else {
      replacement_.reset();
    }
  }

 protected:
  WrappedModule(std::string name, M module) : torch::nn::Module(std::move(name)), module_(std::move(module)) {
    register_module("module", detail::as_module(module_));
  }

  /// Before the inner forward.
  virtual void pre_forward() {}
  /// After it, with the tensors of its outputs in place: they may be exchanged. Not called if it threw.
  virtual void post_forward(const std::vector<at::Tensor*>& /*outputs*/) {}
  /// Around the inner forward, on the thread that runs it; leave_inner() also if it throws.
  virtual void enter_inner() {}
  virtual void leave_inner() noexcept {}
  /// If inputs are changed, the inner module gets copies of its arguments in which each tensor is what this made of it.
  virtual bool changes_inputs() const { return false; }
  virtual at::Tensor prepare_input(const at::Tensor& input) const { return input; }

 private:
  struct Inside {
    explicit Inside(WrappedModule& wrapper) : wrapper_(wrapper) { wrapper_.enter_inner(); }
    ~Inside() { wrapper_.leave_inner(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    WrappedModule& wrapper_;
  };

  template <class... Args>
  auto run_inside(Args&&... args) {
    const Inside inside(*this);
    if (!changes_inputs()) return call_inner(std::forward<Args>(args)...);
    return call_inner(prepared(std::forward<Args>(args))...);
  }

  template <class... Args>
  auto call_inner(Args&&... args) {
    using Output = std::remove_cvref_t<decltype(module_->forward(std::forward<Args>(args)...))>;
    using Replacement = std::function<Output(const std::remove_cvref_t<Args>&...)>;
    if (!replacement_.has_value()) return Output(module_->forward(std::forward<Args>(args)...));
    const auto* replacement = std::any_cast<Replacement>(&replacement_);
    TORCH_CHECK(replacement != nullptr, "[lockstep/nn] the forward of ", name(), "'s module was replaced by a ",
                c10::demangle(replacement_.type().name()), ", but called as a ",
                c10::demangle(typeid(Replacement).name()));
    return (*replacement)(args...);
  }

  template <class Arg>
  std::remove_cvref_t<Arg> prepared(Arg&& arg) const {
    std::remove_cvref_t<Arg> copy(std::forward<Arg>(arg));
    visit_tensors(copy, [&](at::Tensor& tensor) { tensor = prepare_input(tensor); });
    return copy;
  }

  template <class Output>
  Output finish_forward(Output output) {
    std::vector<at::Tensor*> tensors;
    visit_tensors(output, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
    post_forward(tensors);
    return output;
  }

  M module_;
  std::any replacement_;  // a std::function of the signature that forward() is called with
};

}  // namespace lockstep
