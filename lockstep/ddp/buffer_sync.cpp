#include "lockstep/ddp/buffer_sync.h"

#include <torch/nn/module.h>

#include "lockstep/comm/call_label.h"
#include "lockstep/ddp/state_sync.h"

namespace lockstep::detail {

void BufferSync::set_hook(BufferHook hook, BufferHookLocation location) {
  TORCH_CHECK(hook, "[lockstep/ddp] register_buffer_comm_hook was given no hook");
  hook_ = std::move(hook);
  location_ = location;
}

NamedTensors BufferSync::due() const {
  // Looked up anew each time: users replace buffers.
  return is_enabled_ && is_required_ ? buffers_of(module_, ignored_) : NamedTensors();
}

NamedTensors BufferSync::due_before_forward() const {
  return !hook_ || is_hook_due(BufferHookLocation::kPreForward) ? due() : NamedTensors();
}

std::vector<FuturePtr> BufferSync::before_forward(const NamedTensors& due, const GroupPtr& group, int source) {
  const LabelScope label({"DDP's buffers"});
  if (hook_) return run_hook(due);
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : due) tensors.push_back(buffer);
  broadcast_coalesced(tensors, group, kBroadcastChunkBytes, source);
  return {};
}

std::vector<FuturePtr> BufferSync::after_forward() {
  if (!is_hook_due(BufferHookLocation::kPostForward)) return {};
  const auto all = due();
  return all.empty() ? std::vector<FuturePtr>() : run_hook(all);
}

std::vector<FuturePtr> BufferSync::run_hook(const NamedTensors& due) {
  BufferMap buffers;
  for (const auto& [name, buffer] : due) buffers.emplace(name, buffer);
  return hook_(buffers);
}

}  // namespace lockstep::detail
