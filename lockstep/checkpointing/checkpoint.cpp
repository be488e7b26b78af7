#include "lockstep/checkpointing/checkpoint.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/nn/module.h>

#include <string>

#include "lockstep/intercept/operator_scope.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::detail {
namespace {

bool is_statistic(const std::string& name) {
  const auto own = name.substr(name.rfind('.') + 1);  // all of it if there is none
  return own == "running_mean" || own == "running_var" || own == "num_batches_tracked";
}

}  // namespace

KeptStatistics::KeptStatistics(const torch::nn::Module* module) {
  if (module == nullptr || !is_recomputing()) return;
  const NotIntercepted not_intercepted;
  for (const auto& buffer : module->named_buffers()) {
    if (is_statistic(buffer.key()) && buffer.value().defined()) {
      kept_.emplace_back(buffer.value(), buffer.value().detach().clone());
    }
  }
}

KeptStatistics::~KeptStatistics() {
  const NotIntercepted not_intercepted;
  // Without a new version: what was saved of them is what they hold.
  const at::AutoDispatchBelowADInplaceOrView uncounted;
  for (const auto& [buffer, held] : kept_) buffer.copy_(held);
}

RegionRun checkpointed_region(const CheckpointOptions& options) {
  return [options](const RegionBody& body, const std::vector<at::Tensor>& inputs) {
    return checkpoint(options, body, inputs);
  };
}

void check_segments(std::int64_t segments, std::size_t layers) {
  TORCH_CHECK(segments >= 1 && static_cast<std::size_t>(segments) <= layers,
              "[lockstep/checkpointing] checkpoint_sequential: ", segments, " segments of ", layers,
              " layers. There must be at least one, and not more than there are layers.");
}

}  // namespace lockstep::detail
