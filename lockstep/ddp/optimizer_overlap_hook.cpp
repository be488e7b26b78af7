#include "lockstep/ddp/optimizer_overlap_hook.h"

#include <c10/core/GradMode.h>

#include <mutex>
#include <unordered_set>

#include "lockstep/base/rank_local.h"
#include "lockstep/base/str.h"

namespace lockstep {
namespace {

struct Stepper {
  const StepParameter step;
  const bool has_subset;
  std::unordered_set<c10::TensorImpl*> subset;
  std::mutex mutex;  // buckets may be finished by several threads, optimizers are made for one
};

}  // namespace

CommHook hook_then_optimizer(const CommHook& hook, StepParameter step,
                             const std::optional<std::vector<at::Tensor>>& parameters) {
  TORCH_CHECK(hook.run, "[lockstep/ddp] hook_then_optimizer was given no hook");
  TORCH_CHECK(step, "[lockstep/ddp] hook_then_optimizer was given no step");
  const auto stepper = std::make_shared<Stepper>(std::move(step), parameters.has_value());
  for (const auto& parameter : parameters.value_or(std::vector<at::Tensor>())) {
    stepper->subset.insert(parameter.unsafeGetTensorImpl());
  }
  const auto run = [stepper, inner = hook.run](GradBucket& bucket) {
    const auto future = inner(bucket);
    TORCH_CHECK(future, "the wrapped hook returned no future");
    auto& rank = RankScope::current();
    return then(future, [stepper, reduced = bucket, &rank](const at::Tensor& result) mutable {
      const EnterRank as_this_rank(rank);
      const at::NoGradGuard no_grad;
      reduced.set_buffer(result);
      const auto gradients = reduced.gradients();
      const std::lock_guard lock(stepper->mutex);
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const auto& parameter = reduced.parameters()[i];
        if (stepper->has_subset && !stepper->subset.contains(parameter.unsafeGetTensorImpl())) continue;
        stepper->step(parameter, gradients[i]);
      }
      return result;
    });
  };
  return {.name = str("hook_then_optimizer(", hook.name, ")"),
          .run = run,
          .check = hook.check,
          .on_registered = hook.on_registered};
}

}  // namespace lockstep
