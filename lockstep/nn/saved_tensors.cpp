#include "lockstep/nn/saved_tensors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/nn/gradient_hooks.h"

namespace lockstep::detail {

// Threads of autograd may hold it longer than the scope lives.
struct SavingFrame : c10::DebugInfoBase, std::enable_shared_from_this<SavingFrame> {
  std::shared_ptr<SavingRule> rule;
  std::shared_ptr<SavingFrame> outer;
  std::atomic<bool> is_open = true;
};

namespace {

constexpr int kNotRecomputing = -2;  // -1 is what libtorch calls no backward
thread_local int recomputed_task = kNotRecomputing;
thread_local std::vector<Reenter> scopes_around_forward;

constexpr std::string_view kSavingName = "LOCKSTEP_SAVED_TENSORS";

// A kind is a number up to torch 2.12 and the address of a name from then on.
template <class Kind>
Kind make_saving_kind() {
  if constexpr (std::is_enum_v<Kind>) {
    constexpr int kOurs = 0x6d;  // far from libtorch's own, beside intercept's
    return static_cast<Kind>(kOurs);
  } else {
    return Kind(&kSavingName);
  }
}

c10::DebugInfoKind saving_kind() {
  static const auto kind = make_saving_kind<c10::DebugInfoKind>();
  return kind;
}

SavingFrame* innermost_frame() {
  auto* frame = static_cast<SavingFrame*>(c10::ThreadLocalDebugInfo::get(saving_kind()));
  while (frame != nullptr && !frame->is_open) frame = frame->outer.get();
  return frame;
}

std::shared_ptr<SavingFrame> make_saving_frame(std::shared_ptr<SavingRule> rule) {
  auto frame = std::make_shared<SavingFrame>();
  frame->rule = std::move(rule);
  if (auto* outer = innermost_frame()) frame->outer = outer->shared_from_this();
  return frame;
}

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;
using torch::autograd::variable_list;

class SavedContent final : public SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    content_ = tensor.tensor_data();  // counts versions with the tensor
    version_ = content_._version();
  }

  at::Tensor call_unpack_hook() override {
    // Autograd leaves this check to hooks where there are some.
    TORCH_CHECK(content_._version() == version_, "[lockstep/nn] one of the variables needed for gradient computation ",
                "has been modified by an inplace operation: a ", content_.toString(), " of sizes ", content_.sizes(),
                " is at version ", content_._version(), ", but forward used version ", version_,
                ". Change it after backward, or change a clone of it.");
    return content_;
  }

 private:
  at::Tensor content_;
  uint32_t version_ = 0;
};

/// Autograd asks its engine how to save tensors. This one answers that, and leaves everything else to the one that is
/// there otherwise.
class SavingEngine final : public Engine {
 public:
  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    return inner_.load()->execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return inner_.load()->execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return inner_.load()->make_anomaly_metadata();
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (auto* frame = innermost_frame()) return frame->rule->hooks();
    if (auto hooks = inner_.load()->get_default_saved_variable_hooks()) return hooks;
    return contents_ > 0 ? std::make_unique<SavedContent>() : nullptr;
  }

  void enter() {
    const std::lock_guard lock(mutex_);
    ++scopes_;
    // Another one may have taken our place: Python's torch, imported meanwhile.
    auto& current = get_default_engine();
    if (&current == this) return;
    inner_ = &current;
    torch::autograd::set_default_engine_stub([]() -> Engine& { return instance(); });
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--scopes_ > 0 || &get_default_engine() != this) return;
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *instance().inner_.load(); });
  }

  void add_contents(int count) { contents_ += count; }

  static SavingEngine& instance() {
    // Never destroyed: a backward at exit may still come through it.
    static auto& engine = *new SavingEngine;
    return engine;
  }

 private:
  std::atomic<Engine*> inner_ = nullptr;
  std::atomic<int> contents_ = 0;  // scopes that want contents
  std::mutex mutex_;
  int scopes_ = 0;  // guarded by mutex_
};

}  // namespace

EnterSaving::EnterSaving(std::shared_ptr<SavingRule> rule)
    : frame_(make_saving_frame(std::move(rule))), carried_(saving_kind(), frame_) {
  SavingEngine::instance().enter();
}

EnterSaving::~EnterSaving() {
  frame_->is_open = false;
  SavingEngine::instance().leave();
}

SavesContents::SavesContents() {
  SavingEngine::instance().add_contents(1);
  SavingEngine::instance().enter();
}

SavesContents::~SavesContents() {
  SavingEngine::instance().leave();
  SavingEngine::instance().add_contents(-1);
}

bool is_recomputing() {
  return recomputed_task != kNotRecomputing && recomputed_task == torch::autograd::get_current_graph_task_id();
}

Recomputing::Recomputing() : outer_(std::exchange(recomputed_task, torch::autograd::get_current_graph_task_id())) {}

Recomputing::~Recomputing() {
  recomputed_task = outer_;
}

AroundForward::AroundForward(Reenter reenter) {
  scopes_around_forward.push_back(std::move(reenter));
}

AroundForward::~AroundForward() {
  scopes_around_forward.pop_back();
}

const std::vector<Reenter>& around_forward() {
  return scopes_around_forward;
}

}  // namespace lockstep::detail
