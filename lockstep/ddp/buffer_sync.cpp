#include "lockstep/ddp/buffer_sync.h"

#include <torch/nn/module.h>

#include "lockstep/comm/call_label.h"
#include "lockstep/ddp/state_sync.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep::detail {

void BufferSync::set_hook(BufferHook hook, BufferHookLocation location) {
  TORCH_CHECK(hook, "[lockstep/ddp] register_buffer_comm_hook was given no hook");
  hook_ = std::move(hook);
  location_ = location;
}

bool BufferSync::will_sync() const {
  // Looked up anew each time: users replace buffers.
  return is_enabled_ && is_required_ && !buffers_of(module_, ignored_).empty();
}

bool BufferSync::will_sync_before_forward() const {
  return will_sync() && (!hook_ || location_ == BufferHookLocation::kPreForward);
}

std::vector<FuturePtr> BufferSync::before_forward(const GroupPtr& group, int source) {
  const LabelScope label({"DDP's buffers"});
  if (!will_sync_before_forward()) return {};
  if (hook_) return run_hook();
  broadcast(group, source);
  return {};
}

std::vector<FuturePtr> BufferSync::after_forward() {
  if (!hook_ || location_ != BufferHookLocation::kPostForward || !will_sync()) return {};
  return run_hook();
}

void BufferSync::broadcast(const GroupPtr& group, int source) const {
  std::vector<at::Tensor> tensors;
  for (auto& [name, buffer] : buffers_of(module_, ignored_)) tensors.push_back(buffer);
  broadcast_coalesced(tensors, group, kBroadcastChunkBytes, source);
}

std::vector<FuturePtr> BufferSync::run_hook() {
  BufferMap buffers;
  for (auto& [name, buffer] : buffers_of(module_, ignored_)) buffers.emplace(name, buffer);
  return hook_(buffers);
}

}  // namespace lockstep::detail
