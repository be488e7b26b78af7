#include "lockstep/ddp/stream_join.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/current_stream.h"

namespace lockstep::detail {

void StreamJoin::note(c10::Device device) {
  if (device.is_cpu()) return;
  const auto stream = current_stream(device);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

bool StreamJoin::join_into_current() {
  bool has_others = false;
  for (const auto& stream : std::exchange(streams_, {})) {
    const auto current = current_stream(stream.device());
    if (stream == current) continue;
    c10::Event written(stream.device_type());
    written.record(stream);
    written.block(current);
    has_others = true;
  }
  return has_others;
}

void keep_for_current_stream(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

}  // namespace lockstep::detail
