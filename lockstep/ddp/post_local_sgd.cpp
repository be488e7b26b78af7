#include "lockstep/ddp/post_local_sgd.h"

#include <c10/util/Logging.h>

#include "lockstep/ddp/default_hooks.h"

namespace lockstep {

GroupPtr PostLocalSGDState::next_group(const GradBucket& bucket) {
  if (iter_ < options_.start_local_sgd_iter) {
    if (bucket.is_last() && ++iter_ == options_.start_local_sgd_iter) {
      LOG(INFO) << "[lockstep/ddp] local SGD starts after " << iter_ << " steps";
    }
    return detail::group_for(bucket, options_.process_group);
  }
  if (!options_.post_local_gradient_allreduce) return nullptr;
  if (!options_.subgroup) options_.subgroup = new_host_group(detail::group_for(bucket, options_.process_group));
  return options_.subgroup;
}

CommHook post_local_sgd_hook(const std::shared_ptr<PostLocalSGDState>& state) {
  TORCH_CHECK(state, "[lockstep/ddp] post_local_sgd_hook was given no state");
  return {.name = "post_localSGD_hook", .run = [state](GradBucket& bucket) {
            const auto group = state->next_group(bucket);
            return group ? detail::average_future(bucket.buffer(), group) : completed_future(bucket.buffer());
          }};
}

}  // namespace lockstep
