// Hooks that send gradients as bytes: Python's quantization_hooks. A value x travels as round(x / scale) + zero_point
// between 0 and 255, with scale and zero point from the smallest and largest value of the tensor, or of each row.
// Every rank gathers the others' bytes and averages what they stand for; no mean is off by more than half the ranks'
// mean scale. Sparse gradients are averaged as they are.
#pragma once

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

/// Python's quantization_pertensor_hook: one scale for a bucket.
CommHook quantization_per_tensor_hook(GroupPtr group = nullptr);

/// Python's quantization_perchannel_hook: one scale for every `bucket_size` elements.
CommHook quantization_per_channel_hook(GroupPtr group = nullptr, int64_t bucket_size = 512);

}  // namespace lockstep
