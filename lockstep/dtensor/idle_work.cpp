#include "lockstep/dtensor/idle_work.h"

#include <utility>
#include <vector>

namespace lockstep::detail {
namespace {

// Weak: what nobody wants any more is not computed.
thread_local std::vector<std::weak_ptr<LateTensor>> left;

}  // namespace

std::shared_ptr<LateTensor> LateTensor::make(std::function<at::Tensor()> compute) {
  auto late = std::make_shared<LateTensor>(std::move(compute));
  left.push_back(late);
  return late;
}

const at::Tensor& LateTensor::get() {
  if (compute_) tensor_ = std::exchange(compute_, {})();
  return tensor_;
}

void do_idle_work() {
  for (const auto& each : std::exchange(left, {})) {
    if (const auto late = each.lock()) late->get();
  }
}

}  // namespace lockstep::detail
