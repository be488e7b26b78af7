// send and recv of the shm backend: tensors as messages. Internal to comm.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/shm/messages.h"

namespace lockstep::detail {

/// Both return at once. The tensor may have any strides; it stays alive until the message has gone or come.
c10::intrusive_ptr<c10d::Work> send_tensor(shm::Messages& messages, const at::Tensor& tensor, int to, int tag,
                                           std::chrono::milliseconds timeout);
/// `from` may be shm::Messages::kAnyRank; the work's sourceRank() then says who it was.
c10::intrusive_ptr<c10d::Work> receive_tensor(shm::Messages& messages, const at::Tensor& tensor, int from, int tag,
                                              std::chrono::milliseconds timeout);

shm::DType shm_dtype(at::ScalarType type);

}  // namespace lockstep::detail
