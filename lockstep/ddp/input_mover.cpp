#include "lockstep/ddp/input_mover.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/base/env.h"

namespace lockstep::detail {

at::Tensor move_input(const at::Tensor& input, c10::Device device) {
  if (input.device() == device) return input;
  if (!input.device().is_cpu() || env("PYTORCH_DDP_USE_SIDE_STREAM").value_or("1") != "1") {
    return input.to(device, /*non_blocking=*/true);
  }
  // On a stream of its own, so that it need not wait for what the device still computes.
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto current = guard.getStream(device);
  const auto side = guard.getStreamFromGlobalPool(device);
  at::Tensor moved;
  c10::Event copied(device.type());
  {
    const c10::StreamGuard on_side(side);
    moved = input.to(device, /*non_blocking=*/true);
    copied.record(side);
  }
  copied.block(current);
  guard.recordDataPtrOnStream(moved.storage().data_ptr(), current);
  return moved;
}

}  // namespace lockstep::detail
