#include "lockstep/nn/saved_tensors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "lockstep/nn/gradient_hooks.h"

namespace lockstep::detail {
namespace {

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
    if (auto hooks = inner_.load()->get_default_saved_variable_hooks()) return hooks;
    return std::make_unique<SavedContent>();
  }

  void enter() {
    const std::lock_guard lock(mutex_);
    if (scopes_++ > 0) return;
    inner_ = &get_default_engine();
    torch::autograd::set_default_engine_stub([]() -> Engine& { return instance(); });
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--scopes_ > 0) return;
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *instance().inner_.load(); });
  }

  static SavingEngine& instance() {
    // Never destroyed: a backward at exit may still come through it.
    static auto& engine = *new SavingEngine;
    return engine;
  }

 private:
  std::atomic<Engine*> inner_ = nullptr;
  std::mutex mutex_;
  int scopes_ = 0;  // guarded by mutex_
};

}  // namespace

SavesContents::SavesContents() {
  SavingEngine::instance().enter();
}

SavesContents::~SavesContents() {
  SavingEngine::instance().leave();
}

}  // namespace lockstep::detail
