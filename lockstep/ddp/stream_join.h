// The streams of accelerators on which something was written, so that one stream can go on with all of it. Internal to
// ddp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

namespace lockstep::detail {

class StreamJoin {
 public:
  /// Something is enqueued on the device's current stream. Nothing is to be done for a CPU.
  void note(c10::Device device);
  /// Lets the current stream wait for what is enqueued on the others, and forgets them. The host does not wait. Returns
  /// whether there were others.
  bool join_into_current();

 private:
  std::vector<c10::Stream> streams_;
};

/// The current stream reads the tensor, which is another's: its memory is not given away before.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace lockstep::detail
