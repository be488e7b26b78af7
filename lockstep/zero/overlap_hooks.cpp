#include "lockstep/zero/overlap_hooks.h"

#include <c10/util/Exception.h>

#include "lockstep/base/str.h"
#include "lockstep/ddp/ddp_base.h"
#include "lockstep/zero/overlap.h"

namespace lockstep {
namespace {

CommHook made(const char* name, const CommHook& hook, DdpBase& ddp, ZeroOptimizer& zero, bool shard_buckets,
              detail::OverlapForm form) {
  TORCH_CHECK(hook.run, "[lockstep/zero] ", name, " was given no hook");
  auto& overlap = zero.overlap_for(name);
  overlap.check_can_attach(ddp.engine(), shard_buckets);
  return {.name = str(name, "(", hook.name, ")"),
          .run =
              [overlap = overlap.shared_from_this(), inner = hook.run, form](GradBucket& bucket) {
                auto future = inner(bucket);
                TORCH_CHECK(future, "the wrapped hook returned no future");
                overlap->on_bucket(bucket, future, form);
                return future;
              },
          .check = hook.check,
          // Not before: a registration may be refused, and then DDP stays as it is.
          .on_registered =
              [overlap = overlap.shared_from_this(), engine = std::weak_ptr<DdpEngine>(ddp.shared_engine()),
               shard_buckets, inner = hook.on_registered] {
                if (const auto alive = engine.lock()) overlap->attach(*alive, shard_buckets);
                if (inner) inner();
              }};
}

}  // namespace

CommHook hook_with_zero_step(const CommHook& hook, DdpBase& ddp, ZeroOptimizer& zero, bool shard_buckets) {
  return made("hook_with_zero_step", hook, ddp, zero, shard_buckets, detail::OverlapForm::kAfterLastBucket);
}

CommHook hook_with_zero_step_interleaved(const CommHook& hook, DdpBase& ddp, ZeroOptimizer& zero, bool shard_buckets) {
  return made("hook_with_zero_step_interleaved", hook, ddp, zero, shard_buckets, detail::OverlapForm::kInterleaved);
}

}  // namespace lockstep
