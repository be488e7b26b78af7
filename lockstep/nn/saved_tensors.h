// What autograd saves of a tensor for backward. As a rule it saves the tensor itself. A thread may have other rules,
// for a scope (EnterSaving): that is what saved-tensor hooks and activation checkpointing are made of. Internal to the
// wrappers and to checkpointing.
//
// libtorch keeps its own stack of such hooks for Python, but autograd asks its engine for them: ours answers that, and
// leaves everything else to the engine that is there otherwise, Python's included.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>
#include <vector>

namespace lockstep::detail {

/// How tensors are saved. May be asked by several threads at once: a backward that builds a graph inside of the scope
/// saves tensors in autograd's threads.
class SavingRule {
 public:
  virtual ~SavingRule() = default;
  /// For one tensor, if it comes to that: only call_pack_hook() means it is saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

struct SavingFrame;

/// The innermost rule of the thread counts. Destroyed by the same thread, the innermost first.
class EnterSaving {
 public:
  explicit EnterSaving(std::shared_ptr<SavingRule> rule);
  ~EnterSaving();
  EnterSaving(const EnterSaving&) = delete;
  EnterSaving& operator=(const EnterSaving&) = delete;

 private:
  std::shared_ptr<SavingFrame> frame_;
  c10::DebugInfoGuard carried_;  // by libtorch, to the threads of backwards that begin inside
};

/// While it lives, autograd saves what tensors hold at that moment, so that they may show other memory afterwards. In
/// all threads, as a forward may use several, unless they have a rule. Tensors that are changed in place before
/// backward are still noticed, with an error.
class SavesContents {
 public:
  SavesContents();
  ~SavesContents();
  SavesContents(const SavesContents&) = delete;
  SavesContents& operator=(const SavesContents&) = delete;
};

/// A forward runs again inside of a backward, on this thread, because its activations were not kept. It is no step of
/// its own: wrappers do nothing but compute.
bool is_recomputing();

/// Makes is_recomputing() true while it lives, outside of backwards that begin inside.
class Recomputing {
 public:
  Recomputing();
  ~Recomputing();
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;

 private:
  const int outer_;
};

/// What a recomputation needs around itself because the forward has it: enters it, until what it returns is destroyed.
using Reenter = std::function<std::shared_ptr<void>()>;

/// Forwards that are to be recomputed take `reenter` along while it lives. Same thread, the innermost first.
class AroundForward {
 public:
  explicit AroundForward(Reenter reenter);
  ~AroundForward();
  AroundForward(const AroundForward&) = delete;
  AroundForward& operator=(const AroundForward&) = delete;
};
/// Of the calling thread, the outermost first.
const std::vector<Reenter>& around_forward();

}  // namespace lockstep::detail
