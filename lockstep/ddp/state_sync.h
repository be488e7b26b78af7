// Makes the ranks' models the same: compares them, and copies one rank's tensors to all. Collective and blocking.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/nn/parameter_info.h"

namespace lockstep {

inline constexpr std::size_t kBroadcastChunkBytes = std::size_t{250} << 20;

/// Copies the tensors of group rank `source` to all ranks, in place. They travel in flat chunks per dtype and device,
/// two at a time; empty ones do not travel. Autograd does not notice, and neither do tensors saved for a backward.
void broadcast_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group,
                         std::size_t chunk_bytes = kBroadcastChunkBytes, int source = 0);

/// Throws on every rank, with the same words, unless all ranks have the parameters of rank 0: how many, and of each its
/// name, sizes, strides, dtype and kind of gradient.
void verify_parameters_across_ranks(const std::vector<ParameterInfo>& parameters, const GroupPtr& group);

}  // namespace lockstep
