#include "lockstep/checkpointing/host_copy.h"

#include <ATen/ops/empty_like.h>

namespace lockstep::detail {

at::Tensor copy_to_host(const at::Tensor& tensor, bool is_pinned) {
  if (tensor.layout() != at::kStrided || !is_pinned || tensor.is_cpu()) {
    return tensor.is_cpu() ? tensor.tensor_data() : tensor.cpu();
  }
  auto copy = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
  copy.copy_(tensor, /*non_blocking=*/true);
  return copy;
}

}  // namespace lockstep::detail
