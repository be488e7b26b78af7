#include "lockstep/nn/output_sink.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DdpSink : torch::autograd::Function<DdpSink> {
  static variable_list forward(AutogradContext* context, bool clones, at::TensorList tensors) {
    // What the loss leaves out gets no gradient, rather than zeros.
    context->set_materialize_grads(false);
    if (!clones) return tensors.vec();
    variable_list results;
    for (const auto& tensor : tensors) results.push_back(tensor.clone());
    return results;
  }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    variable_list results(1);  // for `clones`
    results.insert(results.end(), gradients.begin(), gradients.end());
    return results;
  }
};

}  // namespace

std::vector<at::Tensor> pass_through_sink(const std::vector<at::Tensor>& tensors, bool clones) {
  auto results = tensors;
  variable_list through;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || !tensors[i].grad_fn()) continue;
    through.push_back(tensors[i]);
    places.push_back(i);
  }
  if (through.empty() || !c10::GradMode::is_enabled()) return results;
  const auto passed = DdpSink::apply(clones, at::TensorList(through));
  for (std::size_t i = 0; i < places.size(); ++i) results[places[i]] = passed[i];
  return results;
}

}  // namespace lockstep::detail
