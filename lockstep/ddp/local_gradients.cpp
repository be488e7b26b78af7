#include "lockstep/ddp/local_gradients.h"

#include <algorithm>
#include <utility>

namespace lockstep::detail {

void LocalGradients::enter(const GradientAccess& access, UsedMap* marks) {
  if (now_.place.is_of(access)) return;
  std::erase_if(aside_, [](const OfPlace& other) { return other.place.is_gone(); });
  if (now_.are_there) {
    if (marks != nullptr) now_.marks = marks->marks();
    aside_.push_back(std::move(now_));
  }
  if (marks != nullptr) marks->clear();
  now_ = OfPlace{.place = GradientPlace(access)};
  const auto known =
      std::find_if(aside_.begin(), aside_.end(), [&](const OfPlace& other) { return other.place.is_of(access); });
  if (known == aside_.end()) return;
  now_ = std::move(*known);
  aside_.erase(known);
  if (marks != nullptr) marks->set_marks(std::exchange(now_.marks, at::Tensor()));
}

void LocalGradients::note_end(const std::vector<at::Tensor>& parameters) {
  if (now_.are_there && !now_.place.is_in_context()) now_.witness.note(parameters);
}

bool LocalGradients::are_waiting(const std::vector<at::Tensor>& parameters) const {
  if (!now_.are_there) return false;
  return now_.place.is_in_context() ? !now_.place.is_gone() : now_.witness.has_gradients(parameters);
}

}  // namespace lockstep::detail
