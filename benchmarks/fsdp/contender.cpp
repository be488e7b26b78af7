#include "benchmarks/fsdp/contender.h"

#include <ATen/ATen.h>

#include <functional>

#include "benchmarks/kit/workload.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/fsdp/fully_shard.h"

namespace lockstep::bench {
namespace {

/// The loss's backward after `forward`, whose gradients are the module's.
std::function<void()> step_of(const Workload& workload, std::function<at::Tensor(const at::Tensor&)> forward) {
  return [workload, forward = std::move(forward)] {
    forget_gradients(*workload.module);
    forward(workload.input).pow(2).mean().backward();
  };
}

/// With one rank too everything is gathered and freed: that is what is measured.
template <class Options>
Options sharding_options(const World& world) {
  Options options;
  options.mesh = DeviceMesh::from_group(world.group(), c10::DeviceTypeName(world.device().type(), /*lower_case=*/true));
  if constexpr (requires { options.force_sharding; }) options.force_sharding = true;
  return options;
}

std::function<at::Tensor(const at::Tensor&)> sharded(const Workload& workload, const World& world, bool shares) {
  auto options = sharding_options<FullyShardOptions>(world);
  options.share_on_host = shares;
  for (const auto& block : workload.module->blocks()) fully_shard(*block, options);
  fully_shard(*workload.module, options);
  return [module = workload.module](const at::Tensor& input) { return module->forward(input); };
}

std::function<at::Tensor(const at::Tensor&)> replicated(const Workload& workload, const World& world) {
  using Ddp = DistributedDataParallel<std::shared_ptr<Trainable>>;
  const auto ddp = std::make_shared<Ddp>(workload.module, world.group());
  return [ddp](const at::Tensor& input) { return ddp->forward(input); };
}

}  // namespace

Contender make_contender(const std::string& name, const Case& which, const World& world) {
  const auto workload = make_workload(which.model, which.width, world.device());
  const auto made = [&](std::function<at::Tensor(const at::Tensor&)> forward) {
    return Contender{name, {{"step", step_of(workload, std::move(forward))}}};
  };
  if (name == "ours") return made(sharded(workload, world, /*shares=*/true));
  if (name == "copied") return made(sharded(workload, world, /*shares=*/false));
  if (name == "ddp") return made(replicated(workload, world));
  TORCH_CHECK(name == "local", "unknown contender ", name);
  return made([module = workload.module](const at::Tensor& input) { return module->forward(input); });
}

}  // namespace lockstep::bench
