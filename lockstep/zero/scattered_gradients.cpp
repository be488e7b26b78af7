#include "lockstep/zero/scattered_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"

namespace lockstep::detail {

ScatteredGradients::ScatteredGradients(std::vector<Cut> cuts, std::vector<int64_t> optimizer_indices, GroupPtr group)
    : cuts_(std::move(cuts)),
      optimizer_indices_(std::move(optimizer_indices)),
      group_(std::move(group)),
      slices_(cuts_.size()) {
  has_.resize(*std::max_element(optimizer_indices_.begin(), optimizer_indices_.end()) + 1);
  for (std::size_t i = 0; i < cuts_.size(); ++i) {
    slices_[i].gradients = at::empty({cuts_[i].plan.slice}, cuts_[i].options);
  }
}

void ScatteredGradients::launch(std::size_t bucket, const at::Tensor& buffer) {
  auto& slice = slices_[bucket];
  const at::NoGradGuard no_grad;
  if (has_any_) slice.arriving = at::empty_like(slice.gradients);
  const auto& target = has_any_ ? slice.arriving : slice.gradients;
  slice.reduction = launch_reduce_scatter_tensor(target, buffer.narrow(0, 0, cuts_[bucket].plan.padded()), group_);
}

void ScatteredGradients::wait_for(std::size_t bucket) {
  auto& slice = slices_[bucket];
  slice.reduction->wait();
  slice.reduction.reset();
}

void ScatteredGradients::end_backward(const std::vector<bool>& is_used) {
  const at::NoGradGuard no_grad;
  for (auto& slice : slices_) {
    if (slice.arriving.defined()) slice.gradients.add_(slice.arriving);
    slice.arriving.reset();
  }
  for (std::size_t i = 0; i < is_used.size(); ++i) {
    if (is_used[i]) has_[optimizer_indices_[i]] = true;
  }
  has_any_ = true;
}

void ScatteredGradients::give_up() {
  for (auto& slice : slices_) {
    // What is under way may still be written. Gradients are written directly only if there were none.
    if (slice.reduction && !slice.arriving.defined()) slice.gradients = at::empty_like(slice.gradients);
    slice.reduction.reset();
    slice.arriving.reset();
  }
}

void ScatteredGradients::drop() {
  has_any_ = false;
  std::fill(has_.begin(), has_.end(), false);
}

int64_t ScatteredGradients::bytes() const {
  int64_t bytes = 0;
  for (const auto& slice : slices_) bytes += static_cast<int64_t>(slice.gradients.nbytes());
  return bytes;
}

}  // namespace lockstep::detail
