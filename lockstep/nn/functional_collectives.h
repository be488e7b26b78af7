// Collectives that autograd knows. They return new tensors, and the backward of each is another of them: so they may be
// differentiated as often as needed. Values and gradients are those of Python's
// torch.distributed._functional_collectives (broadcast and reduce: of torch.distributed.nn.functional): the loss is the
// sum of all ranks' losses, and the gradient of a rank's input counts what it does to every rank's output.
//
// Collective over the group and blocking, forward and backward: if one rank calls backward through them, all do, in one
// order. Nothing is recorded where no gradient is asked for. In a group of one rank they are copies and contact nobody.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/comm/call.h"
#include "lockstep/comm/group.h"

namespace lockstep::functional {

/// The reduction over the ranks, on all of them. Backward: the same of the gradients. Only sums and averages have
/// gradients; the others refuse a tensor that requires one.
at::Tensor all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op = ReduceOp::SUM);

/// All ranks' tensors, which are of one size, one after the other along `dim`. Backward: reduce_scatter of the sum.
at::Tensor all_gather(const at::Tensor& tensor, const GroupPtr& group, int64_t dim = 0);

/// This rank's part of the reduction, which is cut evenly along `dim`. Backward: all_gather, divided if `op` is AVG.
at::Tensor reduce_scatter(const at::Tensor& tensor, const GroupPtr& group, int64_t dim = 0,
                          ReduceOp op = ReduceOp::SUM);

/// Sends the r-th piece along dim 0 to rank r, and returns what came, in rank order: equal pieces, or of the sizes
/// given. Backward: the same with the splits exchanged.
at::Tensor all_to_all_single(const at::Tensor& tensor, const GroupPtr& group,
                             const std::vector<int64_t>& output_splits = {},
                             const std::vector<int64_t>& input_splits = {});

/// The tensor of group rank `root`, on all ranks; the others give one of its sizes. Backward: reduce of the sum.
at::Tensor broadcast(const at::Tensor& tensor, int root, const GroupPtr& group);

/// The reduction on group rank `root`, zeros elsewhere. Backward: broadcast of the root's gradient.
at::Tensor reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op = ReduceOp::SUM);

}  // namespace lockstep::functional
