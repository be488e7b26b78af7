// The tree's part of Join: it notes what a step does, and does it again with zeros for a rank that ran out.
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/fsdp/unit_tree.h"

namespace lockstep::detail {

void UnitTree::set_step_listener(StepListener* listener) {
  const std::lock_guard lock(mutex_);
  listener_ = listener;
  step_.clear();
}

void UnitTree::note(const StepEvent& event) {
  if (listener_ != nullptr && !mirrored_) step_.push_back(event);
}

void UnitTree::check_zeroed() const {
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups_) {
      for (const auto& member : group->members()) {
        const auto& grad = member.shard.grad();
        TORCH_CHECK(!grad.defined() || !grad.any().item<bool>(), unit->who(), ": parameter '", member.name,
                    "' has a gradient of an earlier backward, inside of a Join scope, where ranks that ran out of ",
                    "inputs could not tell. Zero gradients before every backward there.");
      }
    }
  }
}

bool UnitTree::mirror_step() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  if (last_step_.empty()) return false;
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups_) {
      for (const auto& member : group->members()) member.shard.mutable_grad().reset();
    }
  }
  mirrored_ = std::make_shared<int>();
  is_backward_mirrored_ = false;
  try {
    for (const auto& event : last_step_) mirror(event);
  } catch (...) {
    mirrored_.reset();
    throw;
  }
  mirrored_.reset();
  return true;
}

void UnitTree::mirror(const StepEvent& event) {
  const auto unit = unit_at(event.unit);
  switch (event.kind) {
    case StepEvent::Kind::kTouch:
      is_backward_mirrored_ = event.is_backward;
      if (unit) touch(*unit, event.is_recorded);
      break;
    case StepEvent::Kind::kEndOperator:
      if (unit) end_operator(*unit);
      break;
    case StepEvent::Kind::kWeights:
      for (const auto& each : units()) {  // a root may have no parameters
        if (each->groups_.empty()) continue;
        if (const auto root = units_.back().lock()) add_weights(*root, 0, each->groups_.front()->device());
        break;
      }
      break;
    case StepEvent::Kind::kGradient:
      is_backward_mirrored_ = true;
      if (!unit) break;
      for_each_handle(*unit, [&](const WholeHandle& handle, std::size_t number) {
        const auto tensor = handle.tensor();
        if (number == event.handle && tensor.defined())
          tensor.mutable_grad() = at::zeros(tensor.sizes(), tensor.options());
      });
      gradient_arrived(*unit);
      break;
    case StepEvent::Kind::kEndBackward:
      end_backward();
      break;
  }
}

}  // namespace lockstep::detail
