// Keeps a module's buffers (running statistics, counters) the same on all ranks: by copying rank 0's before each
// forward, or by what the user puts in its place. Internal to ddp.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/buffer_hook.h"
#include "lockstep/nn/module_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace detail {

class BufferSync {
 public:
  BufferSync(const torch::nn::Module& module, std::set<std::string> ignored, bool is_enabled)
      : module_(module), ignored_(std::move(ignored)), is_enabled_(is_enabled) {}

  bool is_enabled() const { return is_enabled_; }
  void set_hook(BufferHook hook, BufferHookLocation location);
  /// The next forward is to sync, or not because this one was local.
  void set_required(bool is_required) { is_required_ = is_required; }
  bool is_required() const { return is_required_; }

  bool has_hook() const { return hook_ != nullptr; }

  /// The buffers that the next forward has to sync before it runs; none if it has not to. Walks the module.
  NamedTensors due_before_forward() const;
  /// With these, of which there are some. Collective; returns the hook's futures. Without a hook they become those of
  /// `source`.
  std::vector<FuturePtr> before_forward(const NamedTensors& due, const GroupPtr& group, int source = 0);
  /// Collective if a hook runs then, whose futures are returned.
  std::vector<FuturePtr> after_forward();

 private:
  bool is_hook_due(BufferHookLocation location) const { return hook_ && location_ == location; }
  NamedTensors due() const;
  std::vector<FuturePtr> run_hook(const NamedTensors& due);

  const torch::nn::Module& module_;
  const std::set<std::string> ignored_;
  const bool is_enabled_;
  bool is_required_ = true;
  BufferHook hook_;
  BufferHookLocation location_ = BufferHookLocation::kPostForward;
};

}  // namespace detail
}  // namespace lockstep
