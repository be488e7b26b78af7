// What the tests of ZeRO's overlap with DDP share.
#pragma once

#include "lockstep/ddp/default_hooks.h"
#include "lockstep/zero/overlap_hooks.h"
#include "lockstep/zero/overlap_info.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::zero_overlap_fixtures {

using namespace ddp_models;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using zero_fixtures::copies_of;
using zero_fixtures::expect_same;
using zero_fixtures::kRows;
using zero_fixtures::kSizes;
using zero_fixtures::loss_of;
using zero_fixtures::on_ranks;
using zero_fixtures::small_buckets;
using zero_fixtures::Within;
using Zero = ZeroRedundancyOptimizer<SGD>;

inline constexpr Within kClose{1e-5};

inline SGDOptions sgd() {
  return SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
}

inline ZeroOptions overlapped(const GroupPtr& group) {
  return {.process_group = group, .overlap_with_ddp = true};
}

enum class Form { kAfterLast, kInterleaved };

template <class Ddp>
CommHook hook_of(Form form, Ddp& ddp, ZeroOptimizer& zero, bool shard_buckets = false) {
  const auto inner = allreduce_hook(ddp.process_group());
  return form == Form::kInterleaved ? hook_with_zero_step_interleaved(inner, ddp, zero, shard_buckets)
                                    : hook_with_zero_step(inner, ddp, zero, shard_buckets);
}

template <class Ddp>
void train_once(Ddp& ddp, const World& world, int step, int64_t columns = kSizes[0]) {
  zero_grads(ddp);
  loss_of(ddp, world, step, columns).backward();
}

/// Parameters after DDP and a plain optimizer have taken steps `first` to `last` - 1.
template <class Optimizer = SGD, class Options = SGDOptions>
std::vector<at::Tensor> plain_result(const World& world, int first, int last, const Options& options = sgd(),
                                     const std::vector<int64_t>& sizes = kSizes) {
  DistributedDataParallel ddp(mlp(sizes), world.group());
  Optimizer optimizer(ddp.parameters(), options);
  for (int step = first; step < last; ++step) {
    train_once(ddp, world, step, sizes[0]);
    optimizer.step();
  }
  return copies_of(ddp.parameters());
}

}  // namespace lockstep::zero_overlap_fixtures
