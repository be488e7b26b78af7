#include "lockstep/graph/autograd_part.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>

#include "lockstep/intercept/storage_owner.h"

namespace lockstep::graph {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What autograd recorded inside, from one run.
struct Inside {
  variable_list inputs;   // those that need gradients
  variable_list outputs;  // those that have any
  bool is_whole = true;

  /// The inner graph's memory, as autograd frees its own after a backward.
  void let_go() {
    inputs.clear();
    outputs.clear();
    is_whole = false;
  }
};
struct Capsule : torch::CustomClassHolder {
  explicit Capsule(std::shared_ptr<Inside> what) : inside(std::move(what)) {}
  std::shared_ptr<Inside> inside;
};

/// Lets those who own parameters' memory notice this backward, not the one inside, whose end is not the end of it.
void enter_backward(const variable_list& inputs) {
  for (const auto& input : inputs) {
    if (!storage_owner_of(input)) continue;
    static_cast<void>(input.detach());
    return;
  }
}

struct PartFunction : torch::autograd::Function<PartFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, const GraphFunction* function) {
    auto inside = std::make_shared<Inside>();
    // As the program runs it: who is told of operators on parameters asks whether they are recorded.
    const c10::AutoGradMode with_gradients(true);
    variable_list fresh;
    std::vector<std::int64_t> needed;
    fresh.reserve(inputs.size());
    for (const auto& input : inputs) {
      if (!input.defined() || !input.requires_grad()) {
        fresh.push_back(input);
        continue;
      }
      needed.push_back(static_cast<std::int64_t>(fresh.size()));
      fresh.push_back(input.detach().requires_grad_());
      inside->inputs.push_back(fresh.back());
    }
    const auto results = (*function)(fresh);
    variable_list given;
    variable_list constant;
    std::vector<bool> has_gradient;
    for (const auto& result : results) {
      has_gradient.push_back(result.defined() && result.requires_grad());
      if (has_gradient.back()) inside->outputs.push_back(result);
      given.push_back(result.defined() ? result.detach() : result);
      if (result.defined() && !has_gradient.back()) constant.push_back(given.back());
    }
    context->mark_non_differentiable(constant);
    context->set_materialize_grads(false);
    std::vector<std::int64_t> places;
    for (std::size_t i = 0; i < has_gradient.size(); ++i) {
      if (has_gradient[i]) places.push_back(static_cast<std::int64_t>(i));
    }
    context->saved_data["places"] = places;
    context->saved_data["needed"] = needed;
    context->saved_data["count"] = static_cast<std::int64_t>(inputs.size());
    context->saved_data["inside"] = c10::IValue::make_capsule(c10::make_intrusive<Capsule>(std::move(inside)));
    return given;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK(
        !c10::GradMode::is_enabled(),
        "[lockstep/graph] a part that the backend 'autograd' compiled is differentiated once. Compile with the ",
        "backend 'eager' for second derivatives.");
    const auto capsule = c10::static_intrusive_pointer_cast<Capsule>(context->saved_data["inside"].toCapsule());
    const auto& inside = *capsule->inside;
    TORCH_CHECK(capsule->inside->is_whole, "[lockstep/graph] backward runs a second time through a compiled part. ",
                "Keep the graph of the first one: backward(…, /*retain_graph=*/true).");
    enter_backward(inside.inputs);
    variable_list outputs;
    variable_list given;
    const auto places = context->saved_data["places"].toIntVector();
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto& grad = grads[static_cast<std::size_t>(places[i])];
      if (!grad.defined()) continue;
      outputs.push_back(inside.outputs[i]);
      given.push_back(grad);
    }
    const bool keeps = torch::autograd::get_current_graph_task_keep_graph();
    variable_list gradients(inside.inputs.size());
    if (!outputs.empty() && !inside.inputs.empty()) {
      gradients = torch::autograd::grad(outputs, inside.inputs, given, keeps, /*create_graph=*/false,
                                        /*allow_unused=*/true);
    }
    if (!keeps) capsule->inside->let_go();
    // One for each input of apply(): tensors, then the function.
    variable_list all(static_cast<std::size_t>(context->saved_data["count"].toInt()) + 1);
    const auto needed = context->saved_data["needed"].toIntVector();
    for (std::size_t i = 0; i < needed.size(); ++i) all[static_cast<std::size_t>(needed[i])] = gradients[i];
    return all;
  }
};

}  // namespace

GraphFunction as_one_node(GraphFunction function) {
  return [function = std::move(function)](const std::vector<at::Tensor>& inputs) {
    const bool has_gradients =
        c10::GradMode::is_enabled() &&
        std::any_of(inputs.begin(), inputs.end(), [](const auto& i) { return i.defined() && i.requires_grad(); });
    if (!has_gradients) return function(inputs);
    return PartFunction::apply(at::TensorList(inputs), &function);
  };
}

}  // namespace lockstep::graph
