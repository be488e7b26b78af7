// Sums of sparse tensors over ranks, on any backend: what is summed are rows, and the ranks need not have the same.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/group.h"

namespace lockstep {

/// The coalesced sum of all ranks' sparse tensors, the same bits on every rank. Collective and blocking: the ranks
/// first tell each other how many rows they have.
at::Tensor sparse_all_reduce(const at::Tensor& tensor, const GroupPtr& group);

}  // namespace lockstep
