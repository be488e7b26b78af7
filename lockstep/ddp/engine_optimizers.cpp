// The part of the engine that has to do with optimizers that step in backward.
#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/low_precision.h"

namespace lockstep {

void DdpEngine::set_up_optimizers_in_backward() {
  std::vector<std::vector<OptimizerPtr>> optimizers;
  bool has_any = false;
  for (const auto& parameter : managed_.tensors) {
    optimizers.push_back(detail::optimizers_in_backward_of(parameter));
    has_any = has_any || !optimizers.back().empty();
  }
  if (!has_any) return;
  step_in_backward(std::move(optimizers), "an optimizer attached by apply_optimizer_in_backward");
  for (const auto& parameter : managed_.tensors) detail::release_backward_hooks(parameter);
}

void DdpEngine::register_fused_optim(const OptimizerFactory& factory, const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(reducer_, "[lockstep/ddp] register_fused_optim needs buckets");
  TORCH_CHECK(factory, "[lockstep/ddp] register_fused_optim was given no factory");
  std::vector<std::vector<OptimizerPtr>> optimizers(managed_.tensors.size());
  for (std::size_t i = 0; i < managed_.tensors.size(); ++i) {
    const auto& parameter = managed_.tensors[i];
    const auto is_it = [&](const at::Tensor& each) { return each.is_same(parameter); };
    if (!parameters.empty() && std::none_of(parameters.begin(), parameters.end(), is_it)) continue;
    auto optimizer = factory({parameter});
    TORCH_CHECK(optimizer, "[lockstep/ddp] register_fused_optim: the factory made no optimizer for parameter '",
                managed_.infos[i].name, "'");
    optimizers[i].push_back(std::move(optimizer));
  }
  step_in_backward(std::move(optimizers), "an optimizer given to register_fused_optim");
}

void DdpEngine::step_in_backward(std::vector<std::vector<OptimizerPtr>> optimizers, const std::string& reason) {
  TORCH_CHECK(steps_in_backward_by_.empty(), "[lockstep/ddp] optimizers step in backward already, by ",
              steps_in_backward_by_);
  TORCH_CHECK(!low_, "[lockstep/ddp] ", reason, " cannot step in backward together with mixed_precision");
  TORCH_CHECK(!reducer_->has_comm_hook(), "[lockstep/ddp] ", reason,
              " cannot step in backward together with comm hook '", reducer_->comm_hook_name(), "'");
  TORCH_CHECK(reducer_->hook_slot_taken_by().empty(), "[lockstep/ddp] ", reason,
              " cannot step in backward: ", reducer_->hook_slot_taken_by());
  TORCH_CHECK(is_sync_enabled_, "[lockstep/ddp] ", reason, " cannot step in backward under no_sync");
  steps_in_backward_by_ = reason;
  reducer_->reserve_hook_slot(reason + " steps in backward");
  const auto step = [this, optimizers = std::move(optimizers)](std::size_t index, const at::Tensor& gradient) {
    if (optimizers[index].empty()) return false;
    detail::step_with_gradient(optimizers[index], managed_.tensors[index], gradient);
    return true;
  };
  // A parameter whose gradient has been computed is no longer needed by this backward.
  reducer_->set_consumer({.take = step, .is_eager = true});
}

}  // namespace lockstep
