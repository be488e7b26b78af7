#include "lockstep/ddp/ready_order.h"

#include <algorithm>

namespace lockstep::detail {

void ReadyOrder::set_used() {
  use_ = Use::kDone;
  clear();
}

void ReadyOrder::want_again() {
  if (use_ == Use::kDone) use_ = Use::kToCome;
}

void ReadyOrder::add(std::size_t parameter) {
  if (is_in_[parameter]) return;
  is_in_[parameter] = true;
  order_.push_back(parameter);
}

void ReadyOrder::fill() {
  for (std::size_t i = 0; i < is_in_.size(); ++i) add(i);
}

std::vector<std::size_t> ReadyOrder::complete() const {
  auto all = *this;
  all.fill();
  return all.order_;
}

void ReadyOrder::clear() {
  order_.clear();
  std::fill(is_in_.begin(), is_in_.end(), false);
}

}  // namespace lockstep::detail
