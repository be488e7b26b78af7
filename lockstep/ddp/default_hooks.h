// The comm hooks of torch.distributed.algorithms.ddp_comm_hooks.default_hooks and debugging_hooks:
//
//   ddp.register_comm_hook(fp16_compress_hook(group));
//   ddp.register_comm_hook(bf16_compress_wrapper(power_sgd_hook(state)));
//
// Functions make hooks and are local. No group means the default one. All hooks take gradients that are not divided
// and give their mean, except noop_hook(). None of them blocks on dense gradients; sparse ones are summed in the call.
#pragma once

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

/// What DDP without a hook does: divides, then sums. To measure or to start from.
CommHook allreduce_hook(GroupPtr group = nullptr);
/// Casts to float16, divides, sums, casts back.
CommHook fp16_compress_hook(GroupPtr group = nullptr);
/// As fp16_compress_hook, in bfloat16. Registration tries a sum of that type, collective over `group`, and refuses if
/// the backend cannot do it.
CommHook bf16_compress_hook(GroupPtr group = nullptr);
/// Leaves every rank its own gradients: shows how fast a step would be without communication.
CommHook noop_hook();

/// `hook` sees the bucket in float16 (a copy of it); what it gives is cast back to the bucket's dtype.
CommHook fp16_compress_wrapper(const CommHook& hook);
/// In bfloat16. Registration tries a sum of that type over the wrapper's group, as bf16_compress_hook() does.
CommHook bf16_compress_wrapper(const CommHook& hook);

/// Python's dist.BuiltinCommHookType.
enum class BuiltinCommHookType { kAllReduce, kFp16Compress };
/// Refuses values that are no type. Python's _register_builtin_comm_hook().
CommHook builtin_hook(BuiltinCommHookType type, GroupPtr group = nullptr);

namespace detail {

/// `group`; if it is null, the group of the wrapper that made the bucket, else the default one. (Python takes the
/// default one, and averages over ranks that do not take part if the wrapper has a smaller group.)
GroupPtr group_for(const GradBucket& bucket, const GroupPtr& group);

/// Divides `tensor` by the number of ranks, in place, and sums it. Dividing first keeps small types from overflowing.
FuturePtr average_future(const at::Tensor& tensor, const GroupPtr& group);

/// Collective over `group`. Throws c10::Error, which names `what`, if its backend cannot sum tensors of `dtype`.
void check_can_sum(const std::string& what, at::ScalarType dtype, const GroupPtr& group, c10::Device device);

}  // namespace detail
}  // namespace lockstep
