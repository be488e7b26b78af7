#include "lockstep/ddp/comm_hook.h"

#include "lockstep/comm/collectives.h"
#include "lockstep/ddp/sparse_reduction.h"

namespace lockstep {

std::vector<at::Tensor> GradBucket::gradients() const {
  if (parts_.buffer.is_sparse() || parts_.sparse_rows) return {parts_.buffer};
  std::vector<at::Tensor> views;
  for (std::size_t i = 0; i < parts_.parameters.size(); ++i) {
    const auto& parameter = parts_.parameters[i];
    auto part = parts_.buffer.narrow(0, parts_.offsets[i], parts_.lengths[i]);
    // Complex gradients lie as pairs in a real buffer.
    if (parameter.is_complex() && !part.is_complex()) part = at::view_as_complex(part.view({-1, 2}));
    // As the reducer wrote them; a parameter may have got other strides since.
    const bool is_strided = parts_.strides ? !(*parts_.strides)[i].empty() : parameter.is_non_overlapping_and_dense();
    const at::IntArrayRef strides = parts_.strides ? at::IntArrayRef((*parts_.strides)[i]) : parameter.strides();
    views.push_back(is_strided ? part.as_strided(parameter.sizes(), strides) : part.view(parameter.sizes()));
  }
  return views;
}

FuturePtr completed_future(const at::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), tensor.is_cpu() ? std::vector<c10::Device>{} : std::vector{tensor.device()});
  future->markCompleted(c10::IValue(tensor));
  return future;
}

at::Tensor tensor_of(c10::ivalue::Future& future) {
  future.wait();
  const auto value = future.value();
  if (value.isTensor()) return value.toTensor();
  TORCH_CHECK(value.isTensorList() && !value.toTensorVector().empty(), "a hook's future must hold a tensor, but holds ",
              value.tagKind());
  return value.toTensorVector()[0];
}

FuturePtr then(const FuturePtr& future, std::function<at::Tensor(const at::Tensor& tensor)> change) {
  return future->then(
      [change = std::move(change)](c10::ivalue::Future& done) { return c10::IValue(change(tensor_of(done))); },
      c10::TensorType::get());
}

FuturePtr all_reduce_future(const at::Tensor& tensor, const GroupPtr& group) {
  if (tensor.is_sparse()) return completed_future(sparse_all_reduce(tensor, group));
  return launch_all_reduce(tensor, group).future();
}

}  // namespace lockstep
