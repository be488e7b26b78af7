#include "lockstep/ddp/backward_sync.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "lockstep/nn/output_marks.h"

namespace lockstep::detail {

class BackwardSync::Mark final : public OutputMark {
 public:
  Mark(std::weak_ptr<BackwardSync> sync, bool is_synced) : sync_(std::move(sync)), is_synced_(is_synced) {}
  void reached() override {
    if (const auto sync = sync_.lock()) sync->reach(is_synced_);
  }

 private:
  const std::weak_ptr<BackwardSync> sync_;
  const bool is_synced_;
};

void BackwardSync::mark(const std::vector<at::Tensor*>& outputs, bool is_synced) {
  mark_outputs(outputs, std::make_shared<Mark>(weak_from_this(), is_synced));
}

void BackwardSync::reach(bool is_synced) {
  const std::lock_guard lock(mutex_);
  if (is_alive_.expired()) {
    is_synced_ = false;
    const auto alive = std::make_shared<const bool>(true);
    is_alive_ = alive;
    torch::autograd::Engine::get_default_engine().queue_callback([alive] {});
  }
  is_synced_ = is_synced_ || is_synced;
}

std::optional<bool> BackwardSync::is_synced() const {
  const std::lock_guard lock(mutex_);
  return is_alive_.expired() ? std::nullopt : std::optional(is_synced_);
}

}  // namespace lockstep::detail
