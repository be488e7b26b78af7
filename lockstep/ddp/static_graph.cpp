#include "lockstep/ddp/static_graph.h"

#include <algorithm>

namespace lockstep::detail {

std::vector<std::size_t> StaticGraph::unused() const {
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < firings_.size(); ++i) {
    if (firings_[i] == 0) unused.push_back(i);
  }
  return unused;
}

void StaticGraph::begin_backward() {
  // One that did not reach its end has counted in vain.
  if (is_counting()) std::fill(firings_.begin(), firings_.end(), 0);
  left_ = firings_;
}

StaticGraph::Arrival StaticGraph::arrive(std::size_t parameter) {
  if (left_[parameter] == 0) return Arrival::kTooMany;
  return --left_[parameter] > 0 ? Arrival::kPartial : Arrival::kComplete;
}

void StaticGraph::give_up() {
  if (!has_counted_) reset();
}

void StaticGraph::reset() {
  has_counted_ = false;
  has_shared_marks_ = false;
  std::fill(firings_.begin(), firings_.end(), 0);
}

}  // namespace lockstep::detail
