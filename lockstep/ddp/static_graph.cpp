#include "lockstep/ddp/static_graph.h"

#include <algorithm>

namespace lockstep::detail {

bool StaticGraph::has_counted_any() const {
  return std::any_of(firings_.begin(), firings_.end(), [](int count) { return count > 0; });
}

std::vector<std::size_t> StaticGraph::unused() const {
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < firings_.size(); ++i) {
    if (firings_[i] == 0) unused.push_back(i);
  }
  return unused;
}

void StaticGraph::begin_backward() {
  left_ = firings_;
  shares_marks_now_ = false;
}

StaticGraph::Arrival StaticGraph::arrive(std::size_t parameter) {
  if (left_[parameter] == 0) return Arrival::kTooMany;
  return --left_[parameter] > 0 ? Arrival::kPartial : Arrival::kComplete;
}

void StaticGraph::give_up() {
  if (has_counted_) return;
  std::fill(firings_.begin(), firings_.end(), 0);
  // What was shared in an earlier backward, by ranks that counted then, is not shared again.
  if (std::exchange(shares_marks_now_, false)) has_shared_marks_ = false;
}

void StaticGraph::reset() {
  has_counted_ = false;
  has_shared_marks_ = false;
  shares_marks_now_ = false;
  std::fill(firings_.begin(), firings_.end(), 0);
}

}  // namespace lockstep::detail
