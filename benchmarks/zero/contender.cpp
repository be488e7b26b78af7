#include "benchmarks/zero/contender.h"

#include <ATen/ATen.h>

#include <memory>

#include "benchmarks/kit/workload.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/state/optimizer_state.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/zero/streaming.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"

namespace lockstep::bench {
namespace {

using Bytes = std::map<std::string, double>;
using Zero = ZeroRedundancyOptimizer<optim::AdamW>;

// Less than the largest tensors of the models have.
constexpr int64_t kChunkBytes = 256 << 10;

/// By how much the tensors of this thread rose above what is left of them in the end.
double passing_bytes(const std::function<void()>& collect) {
  const testing::MemoryProbe probe;
  collect();
  const auto use = probe.total();
  return static_cast<double>(use.peak_bytes - use.current_bytes);
}

Bytes bytes_of(Zero& optimizer) {
  const auto report = optimizer.memory_report();
  const auto ranks = optimizer.process_group()->getSize();
  // AdamW has two numbers for each element.
  Bytes bytes = {{"state", static_cast<double>(report.state)},
                 {"even-share", 2 * static_cast<double>(report.parameters) / ranks}};
  if (ranks == 1) return bytes;
  bytes["consolidation-at-once"] = passing_bytes([&] { optimizer.consolidate_state_dict(); });
  bytes["consolidation"] =
      passing_bytes([&] { consolidate_in_chunks(optimizer, {.to = 0, .max_bytes = kChunkBytes}); });
  bytes["consolidation-bound"] = kChunkBytes;
  return bytes;
}

Bytes bytes_of(const torch::optim::AdamW& optimizer) {
  Bytes bytes;
  for (const auto& [index, values] : state_dict_of(optimizer).state) {
    for (const auto& [name, value] : values) {
      if (value.isTensor()) bytes["state"] += static_cast<double>(value.toTensor().nbytes());
    }
  }
  return bytes;
}

void wait_for_parameters(Zero& optimizer) {
  optimizer.wait_for_parameters();
}
void wait_for_parameters(torch::optim::AdamW& /*optimizer*/) {}

using Ddp = DistributedDataParallel<std::shared_ptr<Trainable>>;

template <class Optimizer>
Contender made(const std::string& name, const Workload& workload, const World& world,
               const std::function<std::shared_ptr<Optimizer>(Ddp&)>& make_optimizer) {
  const auto ddp = std::make_shared<Ddp>(workload.module, world.group());
  const auto optimizer = make_optimizer(*ddp);
  const auto backward = [ddp, workload, optimizer] {
    optimizer->zero_grad();
    ddp->forward(workload.input).pow(2).mean().backward();
  };
  const auto step = [optimizer] { optimizer->step(); };
  const auto both = [backward, step] {
    backward();
    step();
  };
  const auto in_a_row = [both, optimizer] {
    for (int i = 0; i < kStepsInARow; ++i) both();
    wait_for_parameters(*optimizer);
  };
  std::vector<TimedWork> timed = {{"steps-in-a-row", in_a_row}};
  // Turns of others would come while its parameters are on their way.
  if (name != "lockstep-overlapped") timed.insert(timed.end(), {{"step", both}, {"optimizer-step", step, backward}});
  return {.name = name, .timed = timed, .bytes = [optimizer] { return bytes_of(*optimizer); }};
}

}  // namespace

Contender make_contender(const std::string& name, const Case& which, const World& world) {
  const auto workload = make_workload(which.model, which.width, world.device());
  if (name == "torch-adamw") {
    return made<torch::optim::AdamW>(name, workload, world,
                                     [](Ddp& ddp) { return std::make_shared<torch::optim::AdamW>(ddp.parameters()); });
  }
  ZeroOptions options;
  if (name == "lockstep") {
    options.partition = ZeroPartition::kElements;
  } else if (name == "lockstep-overlapped") {
    options.overlap_parameter_sync = true;
  } else if (name == "lockstep-gradients") {
    options.stage = ZeroStage::kGradients;
  } else {
    TORCH_CHECK(name == "lockstep-parameters", "unknown contender ", name);
  }
  return made<Zero>(name, workload, world, [&](Ddp& ddp) {
    options.ddp = ddp;
    return std::make_shared<Zero>(ddp.parameters(), optim::AdamWOptions(), options);
  });
}

}  // namespace lockstep::bench
