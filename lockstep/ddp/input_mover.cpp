#include "lockstep/ddp/input_mover.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>

#include "lockstep/base/env.h"

namespace lockstep::detail {
namespace {

/// This thread's for inputs, so that a forward with many does not go round the pool.
c10::Stream side_stream(c10::Device device) {
  thread_local std::unordered_map<c10::Device, c10::Stream> streams;
  const auto found = streams.find(device);
  if (found != streams.end()) return found->second;
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return streams.emplace(device, stream).first->second;
}

}  // namespace

at::Tensor move_input(const at::Tensor& input, c10::Device device) {
  if (input.device() == device) return input;
  if (!input.device().is_cpu() || env("PYTORCH_DDP_USE_SIDE_STREAM").value_or("1") != "1") {
    return input.to(device, /*non_blocking=*/true);
  }
  // On a stream of its own, so that it need not wait for what the device still computes.
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto current = guard.getStream(device);
  const auto side = side_stream(device);
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
