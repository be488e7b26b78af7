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

  /// Both collective if they act. They return the hook's futures. Without a hook the buffers are those of `source`.
  std::vector<FuturePtr> before_forward(const GroupPtr& group, int source = 0);
  std::vector<FuturePtr> after_forward();
  bool will_sync_before_forward() const;
  /// From `source`; what before_forward() does without a hook.
  void broadcast(const GroupPtr& group, int source = 0) const;

 private:
  bool will_sync() const;
  std::vector<FuturePtr> run_hook();

  const torch::nn::Module& module_;
  const std::set<std::string> ignored_;
  const bool is_enabled_;
  bool is_required_ = true;
  BufferHook hook_;
  BufferHookLocation location_ = BufferHookLocation::kPostForward;
};

}  // namespace detail
}  // namespace lockstep
