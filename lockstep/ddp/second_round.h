// Hooks of two rounds: what is summed in the second depends on the sums of the first.
//
// All ranks must make the same calls of a group in the same order. First rounds are launched by the hooks themselves,
// bucket after bucket. A second one is launched by a callback, at a moment that differs between ranks, so it goes
// through a group of its own, and one bucket's follows the other's.
#pragma once

#include <functional>
#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep::detail {

class SecondRound {
 public:
  /// Where second rounds of hooks on `group` are summed. Collective over `group` if none was made for it yet.
  GroupPtr group_for(const GroupPtr& group, c10::Device device);

  /// When all of `first` are there, computes `next` and sums it over `group`'s ranks; when that is there, the future
  /// gets `finish`. Both may run on another thread. Does not block. `first` is not empty; `group` is group_for() of
  /// theirs.
  FuturePtr run(const GradBucket& bucket, const GroupPtr& group, const std::vector<FuturePtr>& first,
                std::function<at::Tensor()> next, std::function<at::Tensor()> finish);

 private:
  // Hooks are called one after the other, so nothing here is shared between threads.
  GroupPtr parent_;
  GroupPtr own_;
  FuturePtr last_launched_;  // of this step: completes when the last bucket's second round was launched
};

}  // namespace lockstep::detail
