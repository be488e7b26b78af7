#include "lockstep/nn/output_sink.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Callback final : torch::CustomClassHolder {
  explicit Callback(std::function<void()> function) : run(std::move(function)) {}
  const std::function<void()> run;
};

struct DdpSink : torch::autograd::Function<DdpSink> {
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Callback>& on_backward, bool clones,
                               at::TensorList tensors) {
    // What the loss leaves out gets no gradient, rather than zeros.
    context->set_materialize_grads(false);
    context->saved_data["on_backward"] = c10::IValue::make_capsule(on_backward);
    if (!clones) return tensors.vec();
    variable_list results;
    for (const auto& tensor : tensors) results.push_back(tensor.clone());
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    c10::static_intrusive_pointer_cast<Callback>(context->saved_data["on_backward"].toCapsule())->run();
    variable_list results(2);
    results.insert(results.end(), gradients.begin(), gradients.end());
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> pass_through_sink(const std::vector<at::Tensor>& tensors, bool clones,
                                          std::function<void()> on_backward) {
  auto results = tensors;
  variable_list through;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].grad_fn()) continue;
    through.push_back(tensors[i]);
    places.push_back(i);
  }
  if (through.empty() || !c10::GradMode::is_enabled()) return results;
  const auto passed =
      DdpSink::apply(c10::make_intrusive<Callback>(std::move(on_backward)), clones, at::TensorList(through));
  for (std::size_t i = 0; i < places.size(); ++i) results[places[i]] = passed[i];
  return results;
}

}  // namespace lockstep::detail
