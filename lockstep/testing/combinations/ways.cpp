// The axes "way" (what updates parameters) and "wrapper" (options of DistributedDataParallel, or what is in its place).
#include <torch/optim/sgd.h>

#include "lockstep/ddp/default_hooks.h"
#include "lockstep/testing/combinations/program.h"
#include "lockstep/zero/overlap_hooks.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"

namespace lockstep::testing::combinations {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Momentum and decay, so that it matters whether a parameter is stepped with a zero or not at all. libtorch's SGD has
/// neither for sparse gradients.
SGDOptions sgd_for(const ModelKind& kind) {
  return kind.is_sparse ? SGDOptions(0.1) : SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
}

AnyOptimizer plain(const std::vector<at::Tensor>& parameters, const ModelKind& kind, const AnyDdp& /*ddp*/) {
  return {.optimizer = std::make_shared<SGD>(parameters, sgd_for(kind))};
}

/// A ZeroRedundancyOptimizer by these options, with the wrapper's group.
Way zero_way(const std::string& name, const std::string& text, const ZeroOptions& options) {
  const auto make = [options](const std::vector<at::Tensor>& parameters, const ModelKind& kind, const AnyDdp& ddp) {
    auto own = options;
    own.process_group = ddp.group;
    if (ddp.base != nullptr) own.ddp = *ddp.base;
    const auto zero = std::make_shared<ZeroRedundancyOptimizer<SGD>>(parameters, sgd_for(kind), own);
    return AnyOptimizer{.optimizer = zero, .zero = zero.get()};
  };
  return {.name = name,
          .text = "ZeroRedundancyOptimizer<SGD> optimizer(ddp.parameters(), sgd, {" + text + ".ddp = ddp});",
          .make = make,
          // Elsewhere parameters have moved, and kernels round by where a tensor begins and ends.
          .equals_plain = text.empty() || options.stage == ZeroStage::kReplicated};
}

Way overlap_way(const std::string& name, const std::string& hook_name, decltype(&hook_with_zero_step) hook) {
  auto way = zero_way(name, ".overlap_with_ddp = true, ", {.overlap_with_ddp = true});
  way.overlap = [hook](const AnyDdp& ddp, const AnyOptimizer& optimizer) {
    ddp.base->register_comm_hook(hook(allreduce_hook(ddp.base->process_group()), *ddp.base, *optimizer.zero, false));
  };
  way.make = [make = way.make, overlap = way.overlap](const std::vector<at::Tensor>& parameters, const ModelKind& kind,
                                                      const AnyDdp& ddp) {
    auto optimizer = make(parameters, kind, ddp);
    optimizer.steps_in_backward = true;
    overlap(ddp, optimizer);
    return optimizer;
  };
  way.text += "\nddp.register_comm_hook(" + hook_name + "(allreduce_hook(group), ddp, optimizer));";
  return way;
}

Wrapper option(const std::string& name, bool DdpOptions::*flag) {
  return {.name = name, .options = "." + name + " = true", .set = [flag](DdpOptions& options, const Net&) {
            options.*flag = true;
          }};
}

void set_per_parameter(DdpOptions& options, const Net& /*net*/) {
  options.per_parameter = true;
  options.bucket_cap_mb.reset();
}

void set_low_precision(DdpOptions& options, const Net& /*net*/) {
  options.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};
}

void set_delayed(DdpOptions& options, const Net& net) {
  options.delay_all_reduce_named_params = net.last_layer();
  options.param_to_hook_all_reduce = net.parameters().front();
}

}  // namespace

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {"plain", "SGD optimizer(ddp.parameters(), sgd);", plain},
      zero_way("replicated", ".stage = ZeroStage::kReplicated, ", {.stage = ZeroStage::kReplicated}),
      zero_way("parameters", "", {}),
      zero_way("bucket views", ".parameters_as_bucket_view = true, ", {.parameters_as_bucket_view = true}),
      zero_way("elements", ".partition = ZeroPartition::kElements, ", {.partition = ZeroPartition::kElements}),
      zero_way("gradients", ".stage = ZeroStage::kGradients, ", {.stage = ZeroStage::kGradients}),
      overlap_way("overlap", "hook_with_zero_step", hook_with_zero_step),
      overlap_way("interleaved", "hook_with_zero_step_interleaved", hook_with_zero_step_interleaved),
  };
  return all;
}

const std::vector<Wrapper>& wrappers() {
  static const std::vector<Wrapper> all = {
      {.name = "default", .options = ""},
      option("find_unused_parameters", &DdpOptions::find_unused_parameters),
      option("static_graph", &DdpOptions::static_graph),
      option("gradient_as_bucket_view", &DdpOptions::gradient_as_bucket_view),
      {.name = "per_parameter", .options = ".per_parameter = true", .set = set_per_parameter},
      {.name = "mixed_precision",
       .options = ".mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}",
       .set = set_low_precision,
       .tolerance = 2.5e-2},
      {.name = "allreduce_hook",
       .options = "",
       .text = "ddp.register_comm_hook(allreduce_hook(group));",
       .after = [](const AnyDdp& ddp) { ddp.base->register_comm_hook(allreduce_hook(ddp.base->process_group())); }},
      {.name = "bf16_compress_hook",
       .options = "",
       .text = "ddp.register_comm_hook(bf16_compress_hook(group));",
       .after = [](const AnyDdp& ddp) { ddp.base->register_comm_hook(bf16_compress_hook(ddp.base->process_group())); },
       .tolerance = 1e-2},
      {.name = "delayed",
       .options = ".delay_all_reduce_named_params = net->last_layer(), .param_to_hook_all_reduce = net->first->weight",
       .set = set_delayed},
      {.name = "compiled",
       .options = "",
       .text = "compile(ddp, {.keeps_regions = true});",
       .after = [](const AnyDdp& ddp) { ddp.compile(); }},
      {.name = "fully_shard", .options = "", .is_sharded = true},
      {.name = "fully_shard kept",
       .options = ".reshard_after_forward = false",
       .is_sharded = true,
       .reshards_after_forward = false},
      {.name = "fully_shard compiled",
       .options = "",
       .text = "// the forward of the net is compiled",
       .is_sharded = true,
       .is_compiled = true},
      {.name = "tp", .options = "", .is_bare = true, .tp_size = 2},
      {.name = "ddp+tp", .options = "", .tp_size = 2},
      {.name = "fsdp+tp", .options = "", .is_sharded = true, .tp_size = 2},
  };
  return all;
}

}  // namespace lockstep::testing::combinations
