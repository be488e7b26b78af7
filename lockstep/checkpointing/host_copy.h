// Copies of tensors on the host. Internal to checkpointing.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// Of the same geometry where it has no gaps. In pinned memory, if there is an accelerator, the copy may still be on
/// its way when this returns: whoever reads it by the same stream sees it whole.
at::Tensor copy_to_host(const at::Tensor& tensor, bool is_pinned);

}  // namespace lockstep::detail
