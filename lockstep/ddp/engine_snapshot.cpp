// The part of the engine that saves a wrapper's settings.
#include "lockstep/ddp/engine.h"

namespace lockstep {

void DdpEngine::restore(const DdpSnapshot& snapshot) {
  set_sync_enabled(snapshot.require_backward_grad_sync);
  buffers_->set_required(snapshot.require_forward_param_sync);
}

DdpSnapshot DdpEngine::snapshot() const {
  auto options = options_;
  options.process_group.reset();
  options.device_mesh.reset();
  options.delay_all_reduce_named_params.clear();
  options.param_to_hook_all_reduce.reset();
  // Delayed parameters are ignored by the buckets only; without the delay they are ordinary ones.
  options.params_and_buffers_to_ignore = ignored_;
  for (const auto& [name, tensor] : options_.delay_all_reduce_named_params) {
    options.params_and_buffers_to_ignore.erase(name);
  }
  options.static_graph = reducer_ && reducer_->is_static_graph();
  // Before the rebuild there is nothing to keep, and a plan that is given is never rebuilt.
  const bool has_plan = reducer_ && reducer_->has_rebuilt_buckets() && !delayed_;
  options.bucket_plan = has_plan ? reducer_->plan().save() : "";
  return {.options = std::move(options),
          .require_backward_grad_sync = is_sync_enabled_,
          .require_forward_param_sync = buffers_->is_required()};
}

}  // namespace lockstep
