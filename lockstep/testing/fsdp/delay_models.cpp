#include "lockstep/testing/fsdp/delay_models.h"

#include "lockstep/testing/delay.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::testing {

ModuleWithDelay::ModuleWithDelay(std::shared_ptr<FsdpTestModel> inner, ModelDelays delays)
    : module(register_module("module", std::move(inner))), delays_(delays) {}

at::Tensor ModuleWithDelay::get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) {
  auto loss = module->get_loss(input, output);
  device_sleep(delays_.after_loss, loss.device());
  return loss;
}

at::Tensor ModuleWithDelay::forward(const std::vector<at::Tensor>& input) {
  const auto late = delay_steps("reshard", delays_.before_reshard, compute_device());
  return module->forward(input);
}

void ModuleWithDelay::run_backward(const at::Tensor& loss) {
  const auto late_reduction = delay_calls(CallKind::kReduceScatterSingle, delays_.before_reduction);
  const auto late_reshard = delay_steps("reshard", delays_.before_reshard, compute_device());
  module->run_backward(loss);
  device_sleep(delays_.before_step, compute_device());
}

}  // namespace lockstep::testing
