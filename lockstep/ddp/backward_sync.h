// Whether the backward that runs goes through a synced forward: for ways to reduce without a Reducer, which knows it by
// itself. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace lockstep::detail {

class BackwardSync : public std::enable_shared_from_this<BackwardSync> {
 public:
  /// A forward with gradients has these outputs: its backwards are reduced, or not.
  void mark(const std::vector<at::Tensor*>& outputs, bool is_synced);
  /// Of the backward that runs, as far as it has come; nothing if it has come to no mark.
  std::optional<bool> is_synced() const;

 private:
  class Mark;
  void reach(bool is_synced);

  mutable std::mutex mutex_;  // engine threads may race
  bool is_synced_ = false;
  std::weak_ptr<const bool> is_alive_;  // autograd lets go of it when backward returns or throws
};

}  // namespace lockstep::detail
