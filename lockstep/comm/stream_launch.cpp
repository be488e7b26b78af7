#include "lockstep/comm/stream_launch.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/comm/current_stream.h"
#include "lockstep/comm/group_state.h"

namespace lockstep::detail {
namespace {

/// Of high priority: what a collective waits for has been computed, and others may wait for it.
c10::Stream stream_of(GroupState& group, c10::Device device) {
  const std::lock_guard lock(group.mutex);
  const auto found = group.streams.find(device);
  if (found != group.streams.end()) return found->second;
  const auto stream =
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  return group.streams.emplace(device, stream).first->second;
}

}  // namespace

StreamLaunch::StreamLaunch(GroupState& group, c10::Device device, const std::function<void()>& start)
    : device_(device), origin_(current_stream(device)), stream_(stream_of(group, device)), done_(device.type()) {
  c10::Event ready(device.type());
  ready.record(origin_);
  ready.block(stream_);
  {
    const c10::StreamGuard on_own(stream_);
    start();
  }
  done_.record(stream_);
}

bool StreamLaunch::wait() const {
  const auto current = current_stream(device_);
  done_.block(current);
  return current == origin_;
}

c10::intrusive_ptr<c10::ivalue::Future> StreamLaunch::future(const std::vector<at::Tensor>& results) const {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector{device_});
  // It remembers the streams that are current now as those its value comes from.
  const c10::StreamGuard on_own(stream_);
  future->markCompleted(c10::IValue(results));
  return future;
}

void StreamLaunch::protect(const std::vector<at::Tensor>& tensors) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  for (const auto& tensor : tensors) {
    if (tensor.device() == device_) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }
}

}  // namespace lockstep::detail
