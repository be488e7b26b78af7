#include "lockstep/testing/fsdp/delay_models.h"

#include <optional>

#include "lockstep/testing/delay.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::testing {

ModuleWithDelay::ModuleWithDelay(std::shared_ptr<FsdpTestModel> inner, ModelDelays delays)
    : module(register_module("module", std::move(inner))), delays_(delays) {}

at::Tensor ModuleWithDelay::get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) {
  auto loss = module->get_loss(input, output);
  if (delays_.after_loss.count() > 0) device_sleep(delays_.after_loss, loss.device());
  return loss;
}

void ModuleWithDelay::run_backward(const at::Tensor& loss) {
  if (delays_.before_reduction.count() == 0) return module->run_backward(loss);
  const auto late = delay_calls(CallKind::kReduceScatterSingle, delays_.before_reduction);
  module->run_backward(loss);
}

}  // namespace lockstep::testing
