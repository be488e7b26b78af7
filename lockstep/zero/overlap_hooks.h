// Comm hooks that step a ZeroRedundancyOptimizer inside of DDP's backward. Python's ddp_zero_hook.
//
//   ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(ddp.parameters(), {1e-3},
//                                                          ZeroOptions{.overlap_with_ddp = true});
//   ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(), ddp, optimizer));
//
// The loop has no optimizer.step(). DDP's first two steps (three of a static graph) update nothing, because buckets
// are laid out anew after them; none is lost if DDP was made with DdpOptions::bucket_plan or find_unused_parameters.
// Functions are local and make hooks, to be registered on the DDP they were made for. See docs/zero.md.
#pragma once

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/zero/optimizer.h"

namespace lockstep {

/// `hook`, which averages gradients, and when the last bucket has been launched, bucket by bucket: the step of this
/// rank's shard and the broadcast of all shards. Backward ends when all parameters are there. With `shard_buckets`
/// shards are some parameters of a bucket, which divides state more evenly; else whole buckets. `ddp` is not kept
/// alive; `zero` must have been made with overlap_with_ddp and live as long as backwards run.
CommHook hook_with_zero_step(const CommHook& hook, DdpBase& ddp, ZeroOptimizer& zero, bool shard_buckets = false);

/// As hook_with_zero_step, with a bucket's step and broadcasts when the next bucket has been launched: better if
/// communication is fast. With find_unused_parameters both do all of it at the end of backward, when it is known which
/// parameters no rank has used.
CommHook hook_with_zero_step_interleaved(const CommHook& hook, DdpBase& ddp, ZeroOptimizer& zero,
                                         bool shard_buckets = false);

}  // namespace lockstep
