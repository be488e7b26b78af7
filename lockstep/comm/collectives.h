// Collectives on tensors, under Python's names. Each comes twice: `all_reduce` blocks until the result may be read,
// `launch_all_reduce` returns a Pending to wait for.
//
// All are collective over `group`, the default one if it is left out: every rank makes the same calls in the same
// order. A null group is refused, since it is what new_group() returns to ranks that are not in it. A group of one rank
// costs a copy at most. Tensors must be dense; outputs must be contiguous where the backend demands it (gloo and NCCL
// do, threads do not).
#pragma once

#include <vector>

#include "lockstep/comm/pending.h"

namespace lockstep {

/// Reduces `tensor` over the ranks, in place, on all of them.
void all_reduce(const at::Tensor& tensor, const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_all_reduce(const at::Tensor& tensor, const GroupPtr& group = default_group(),
                                        ReduceOp op = ReduceOp::SUM);

/// Reduces several tensors of one dtype and device in one operation.
void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const GroupPtr& group = default_group(),
                          ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                                  const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);

/// Reduces onto group rank `root`; `tensor` is undefined on the others afterwards.
void reduce(const at::Tensor& tensor, int root, const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_reduce(const at::Tensor& tensor, int root, const GroupPtr& group = default_group(),
                                    ReduceOp op = ReduceOp::SUM);

/// Copies `tensor` of group rank `root` to all ranks, in place.
void broadcast(const at::Tensor& tensor, int root, const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_broadcast(const at::Tensor& tensor, int root, const GroupPtr& group = default_group());

/// outputs[r] receives rank r's input.
void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                        const GroupPtr& group = default_group());

/// `output` receives the inputs of all ranks, one after the other; it has world_size times their elements.
void all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                                                    const GroupPtr& group = default_group());
void all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                      const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                              const std::vector<at::Tensor>& inputs,
                                                              const GroupPtr& group = default_group());

/// `output` receives the reduction over all ranks of their inputs[my rank].
void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                    const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                            const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);

/// `output` receives my share of the reduction of all ranks' inputs, which have world_size times its elements.
void reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group = default_group(),
                           ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                                   const GroupPtr& group = default_group(),
                                                   ReduceOp op = ReduceOp::SUM);
void reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                     const GroupPtr& group = default_group(), ReduceOp op = ReduceOp::SUM);
[[nodiscard]] Pending launch_reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                                             const std::vector<at::Tensor>& inputs,
                                                             const GroupPtr& group = default_group(),
                                                             ReduceOp op = ReduceOp::SUM);

/// On `root`, outputs[r] receives rank r's input; elsewhere outputs is empty.
void gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root,
            const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs, int root,
                                    const GroupPtr& group = default_group());

/// `output` receives inputs[my rank] of `root`; elsewhere inputs is empty.
void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
             const GroupPtr& group = default_group());
[[nodiscard]] Pending launch_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                                     const GroupPtr& group = default_group());

/// outputs[r] receives what rank r has in inputs[my rank].
void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                const GroupPtr& group = default_group());

/// As all_to_all, with the pieces lying in one tensor along dim 0: equal ones, or of the sizes given.
void all_to_all_single(const at::Tensor& output, const at::Tensor& input, const GroupPtr& group = default_group(),
                       const std::vector<int64_t>& output_splits = {}, const std::vector<int64_t>& input_splits = {});
[[nodiscard]] Pending launch_all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                               const GroupPtr& group = default_group(),
                                               const std::vector<int64_t>& output_splits = {},
                                               const std::vector<int64_t>& input_splits = {});

}  // namespace lockstep
