#include "lockstep/ddp/second_round.h"

#include <c10/core/GradMode.h>

#include <numeric>

#include "lockstep/base/rank_local.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/futures.h"

namespace lockstep::detail {

GroupPtr SecondRound::group_for(const GroupPtr& group, c10::Device device) {
  if (parent_ == group) return own_;
  parent_ = group;
  // NCCL's futures are complete at once, as a lone rank's are: callbacks run where they are set, in order. Groups that
  // others made cannot be doubled.
  const bool runs_in_order =
      group->getSize() == 1 || traits_of(*group->getBackend(device.type())).runs_on_current_stream;
  if (runs_in_order || backend_spec(group).empty()) {
    own_ = group;
  } else {
    std::vector<int> ranks(static_cast<std::size_t>(group->getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
    own_ = new_group(group, ranks);
  }
  return own_;
}

FuturePtr SecondRound::run(const GradBucket& bucket, const GroupPtr& group, const std::vector<FuturePtr>& first,
                           std::function<at::Tensor()> next, std::function<at::Tensor()> finish) {
  if (bucket.index() == 0) last_launched_.reset();  // a step that failed must not fail the next
  auto awaited = first;
  if (last_launched_) awaited.push_back(last_launched_);
  const auto ready = all_of(awaited);
  const auto launched = ready->createInstance(c10::NoneType::get());
  last_launched_ = launched;
  auto& rank = RankScope::current();
  const auto launch_next = [=, &rank, next = std::move(next)](c10::ivalue::Future& done) {
    const EnterRank as_this_rank(rank);
    const at::NoGradGuard no_grad;
    try {
      done.value();
      wait_on_stream(first);
      auto future = launch_all_reduce(next(), group).future();
      launched->markCompleted();
      return future;
    } catch (...) {
      // Those behind it must not wait for ever, nor go on: the order is lost.
      launched->setErrorIfNeeded(std::current_exception());
      throw;
    }
  };
  return ready->thenAsync(launch_next, c10::ListType::ofTensors())
      ->then(
          [finish = std::move(finish)](c10::ivalue::Future& done) {
            const at::NoGradGuard no_grad;
            done.value();
            return c10::IValue(finish());
          },
          c10::TensorType::get());
}

}  // namespace lockstep::detail
