#include "lockstep/ddp/scatter_gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/chunk.h>
#include <c10/util/Exception.h>

namespace lockstep::detail {

std::vector<at::Tensor> scatter_tensor(const at::Tensor& tensor, const std::vector<c10::Device>& devices, int64_t dim) {
  TORCH_CHECK(!devices.empty(), "[lockstep/ddp] scatter_to_devices needs at least one device");
  TORCH_CHECK(tensor.dim() > 0, "[lockstep/ddp] a tensor without dims cannot be scattered along dim ", dim);
  auto chunks = tensor.chunk(static_cast<int64_t>(devices.size()), dim);
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i] = chunks[i].to(devices[i], /*non_blocking=*/true);
  return chunks;
}

at::Tensor gather_tensor(const std::vector<at::Tensor>& parts, c10::Device device, int64_t dim) {
  std::vector<at::Tensor> moved;
  bool has_scalar = false;
  for (const auto& part : parts) {
    has_scalar = has_scalar || part.dim() == 0;
    moved.push_back((part.dim() == 0 ? part.unsqueeze(0) : part).to(device, /*non_blocking=*/true));
  }
  if (has_scalar) {
    TORCH_WARN_ONCE("[lockstep/ddp] gathered tensors without dims, such as losses, become a vector");
  }
  return at::cat(moved, has_scalar ? 0 : dim);
}

void check_same_structure(std::size_t part, std::size_t tensors, std::size_t expected) {
  TORCH_CHECK(tensors == expected, "[lockstep/ddp] parts to gather must be alike: the first holds ", expected,
              " tensors, part ", part, " ", tensors);
}

}  // namespace lockstep::detail
