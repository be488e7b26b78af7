#include "lockstep/nn/output_marks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace lockstep::detail {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class MarkHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit MarkHook(std::shared_ptr<OutputMark> mark) : mark_(std::move(mark)) {}
  variable_list operator()(const variable_list& gradients) override {
    mark_->reached();
    return gradients;
  }
  const OutputMark& mark() const { return *mark_; }

 private:
  const std::shared_ptr<OutputMark> mark_;
};

}  // namespace

bool mark_outputs(const std::vector<at::Tensor*>& outputs, const std::shared_ptr<OutputMark>& mark) {
  const Node* last = nullptr;
  for (const auto* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    auto& node = *output->grad_fn();
    if (&node == last) continue;  // outputs of one node
    // Among hooks of tensors it is the first: a hook of the program's may run a backward of its own.
    node.add_tensor_pre_hook(std::make_unique<MarkHook>(mark));
    last = &node;
  }
  return last != nullptr;
}

void visit_marks(const at::Tensor& root, const std::function<bool(const OutputMark& mark)>& visit) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> to_visit;
  const auto add = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) to_visit.push_back(node);
  };
  if (root.defined() && root.grad_fn()) add(root.grad_fn().get());
  while (!to_visit.empty()) {
    auto* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& hook : node->tensor_pre_hooks()) {
      const auto* marked = dynamic_cast<const MarkHook*>(hook.get());
      if (marked != nullptr && !visit(marked->mark())) return;
    }
    for (const auto& edge : node->next_edges()) add(edge.function.get());
  }
}

}  // namespace lockstep::detail
