#include "lockstep/shard/buffer.h"

#include <ATen/ops/empty.h>

#include "lockstep/base/env.h"

namespace lockstep::detail {

at::Tensor allocate_buffer(int64_t elements, const at::TensorOptions& options, const GroupPtr& group) {
  const auto device = options.device();
  // On other devices such memory has a price of its own (registration, alignment), so it is asked for.
  const bool is_wanted = device.is_cpu() || env("LOCKSTEP_DDP_BACKEND_ALLOCATOR").value_or("0") == "1";
  if (is_wanted && elements > 0 && serves_device(group, device.type())) {
    const auto backend = group->getBackend(device.type());
    if (backend->supportsTensorAlloc(device.index())) return backend->allocateTensor(elements, options);
  }
  return at::empty({elements}, options);
}

}  // namespace lockstep::detail
