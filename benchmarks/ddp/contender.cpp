#include "benchmarks/ddp/contender.h"

#include <ATen/ATen.h>

#include <functional>
#include <limits>
#include <numeric>

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "benchmarks/kit/workload.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/distributed_data_parallel.h"

namespace lockstep::bench {
namespace {

std::function<void()> local_step(const Workload& workload) {
  return [workload] {
    forget_gradients(*workload.module);
    workload.module->forward(workload.input).pow(2).mean().backward();
  };
}

std::function<void()> our_step(const Workload& workload, const World& world, bool forces_copies) {
  const auto ddp =
      std::make_shared<DistributedDataParallel<std::shared_ptr<Trainable>>>(workload.module, world.group());
  // A lone rank leaves gradients where they are, unless somebody wants to see them in a bucket.
  if (forces_copies) ddp->register_comm_hook(allreduce_hook(world.group()));
  return [ddp, workload] {
    forget_gradients(*workload.module);
    ddp->forward(workload.input).pow(2).mean().backward();
  };
}

/// Its constructor has more arguments in later releases.
template <class Reducer>
std::shared_ptr<Reducer> make_reducer(const std::vector<at::Tensor>& parameters, const GroupPtr& group) {
  std::vector<std::size_t> all(parameters.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const std::vector<std::vector<std::size_t>> buckets = {all};
  const std::vector<std::size_t> limits = {std::numeric_limits<std::size_t>::max()};
  const std::vector<bool> sparse(parameters.size(), false);
  const std::unordered_map<std::size_t, std::string> names;
  const int64_t cap = c10d::kDefaultBucketBytesCap;
  const int64_t first = c10d::kDefaultFirstBucketBytes;
  const bool as_view = false;
  using Buckets = decltype(buckets);
  if constexpr (std::is_constructible_v<Reducer, std::vector<at::Tensor>, Buckets, GroupPtr, std::vector<bool>, int64_t,
                                        bool, bool, std::unordered_map<std::size_t, std::string>, int64_t, bool, bool,
                                        std::vector<int64_t>>) {
    return std::make_shared<Reducer>(parameters, buckets, group, sparse, cap, false, as_view, names, first, false,
                                     false, std::vector<int64_t>{});
  } else if constexpr (std::is_constructible_v<Reducer, std::vector<at::Tensor>, Buckets, std::vector<std::size_t>,
                                               GroupPtr, std::vector<bool>, int64_t, bool, bool,
                                               std::unordered_map<std::size_t, std::string>, int64_t, bool, bool>) {
    return std::make_shared<Reducer>(parameters, buckets, limits, group, sparse, cap, false, as_view, names, first,
                                     false, false);
  } else {
    return std::make_shared<Reducer>(parameters, buckets, limits, group, sparse, cap, false, as_view, names, first);
  }
}

std::function<void()> reducer_step(const Workload& workload, const World& world) {
  GroupPtr group = world.group();
  if (world.world_size() > 1 && !world.device().is_cuda()) {
    std::vector<int> ranks(static_cast<std::size_t>(world.world_size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    group = new_group(world.group(), ranks, {.backend = "gloo", .name = "gloo for the reducer"});
  }
  const auto reducer = make_reducer<c10d::Reducer>(workload.module->parameters(), group);
  return [reducer, workload] {
    forget_gradients(*workload.module);
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    const auto loss = workload.module->forward(workload.input).pow(2).mean();
    reducer->prepare_for_backward({});
    loss.backward();
  };
}

}  // namespace

Contender make_contender(const std::string& name, const Case& which, const World& world) {
  const auto workload = make_workload(which.model, which.width, world.device());
  const auto made = [&](std::function<void()> step) { return Contender{name, {{"step", std::move(step)}}}; };
  if (name == "local") return made(local_step(workload));
  if (name == "ours" || name == "ours-copies") return made(our_step(workload, world, name == "ours-copies"));
  TORCH_CHECK(name == "c10d-reducer", "unknown contender ", name);
  return made(reducer_step(workload, world));
}

}  // namespace lockstep::bench
