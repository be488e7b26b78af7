#include "lockstep/zero/scattered_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {

ScatteredGradients::ScatteredGradients(std::vector<Cut> cuts, std::vector<int64_t> optimizer_indices,
                                       std::optional<at::ScalarType> reduce_dtype, GroupPtr group, std::string who,
                                       std::function<void()> check_can_be_summed)
    : cuts_(std::move(cuts)),
      optimizer_indices_(std::move(optimizer_indices)),
      reduce_dtype_(reduce_dtype),
      group_(std::move(group)),
      who_(std::move(who)),
      check_can_be_summed_(std::move(check_can_be_summed)),
      slices_(cuts_.size()) {
  held_.resize(*std::max_element(optimizer_indices_.begin(), optimizer_indices_.end()) + 1);
  const auto rank = group_->getRank();
  for (std::size_t i = 0; i < cuts_.size(); ++i) {
    const auto& [layout, members, kept_dtype] = cuts_[i];
    const auto slice = layout.plan().slice;
    slices_[i].gradients =
        at::empty({slice}, members.front().parameter.options().dtype(kept_dtype).requires_grad(false));
    for (const auto& member : members) {
      auto& held = held_[member.index];
      held.parameter = member.parameter;
      held.name = member.name;
      held.bucket = i;
      held.memory_order = memory_order_of(member.parameter);
    }
    for (const auto& piece : layout.pieces_of(rank)) {
      auto& held = held_[members[piece.index].index];
      held.in_slice = {piece.elements.begin - slice * rank, piece.elements.end - slice * rank};
      held.in_parameter = piece.in_parameter;
    }
  }
}

// ---- what is in .grad ----

void ScatteredGradients::make_stand_in(Held& held, int64_t index) {
  auto link = std::make_shared<SliceStandIn::Link>();
  link->keeper = weak_from_this();
  link->index = index;
  held.stand_in = at::detail::make_tensor<SliceStandIn>(*held.parameter.unsafeGetTensorImpl(), std::move(link));
}

bool ScatteredGradients::is_in_place(const Held& held) const {
  const auto& gradient = held.parameter.grad();
  if (!gradient.defined() || !held.stand_in.defined()) return false;
  if (gradient.is_same(held.stand_in)) return true;
  // A shallow copy of it is as good.
  const auto* stand_in = SliceStandIn::of(gradient);
  return stand_in != nullptr && stand_in->link() == SliceStandIn::of(held.stand_in)->link();
}

at::Tensor ScatteredGradients::part_of_slice(const Held& held) const {
  return part_of(slices_[held.bucket].gradients, held.in_slice);
}

at::Tensor ScatteredGradients::part_of_whole(const Held& held, const at::Tensor& whole) {
  return part_of(flattened_like(whole, held.memory_order), held.in_parameter);
}

std::string ScatteredGradients::description_of(int64_t index) const {
  return str(who_, ": the gradient of parameter '", held_[index].name, "'");
}

at::Tensor ScatteredGradients::same_part_of(int64_t index, const at::Tensor& whole) const {
  return part_of_whole(held_[index], whole);
}

at::Tensor ScatteredGradients::part_of_gradient(int64_t index) {
  auto& held = held_[index];
  TORCH_CHECK(is_in_place(held), description_of(index), " is no longer this one: it was set to none, or a backward is ",
              "under way. Take it from .grad() when you need it.");
  settle_added(held);
  return part_of_slice(held);
}

void ScatteredGradients::add_whole(int64_t index, const at::Tensor& gradient) {
  auto& held = held_[index];
  TORCH_CHECK(is_in_place(held), description_of(index), " was kept from an earlier backward, and another one adds to ",
              "it. Take it from .grad() when you need it.");
  const at::NoGradGuard no_grad;
  if (held.added.defined()) {
    held.added.add_(gradient);
  } else {
    held.added = at::empty_like(held.parameter.detach()).copy_(gradient);
  }
}

void ScatteredGradients::forget_additions(int64_t index) {
  held_[index].added.reset();
  held_[index].has_settled_own = false;
}

// ---- read between backwards ----

void ScatteredGradients::settle_added(Held& held) {
  if (!held.added.defined()) return;
  const at::NoGradGuard no_grad;
  part_of_slice(held).add_(part_of_whole(held, held.added));
  held.added.reset();
  held.has_settled_own = true;
}

void ScatteredGradients::settle(Held& held) {
  auto& gradient = held.parameter.mutable_grad();
  if (!gradient.defined()) return forget(held);
  held.has = true;
  if (is_in_place(held)) {
    if (!held.has_settled_own) has_averaged_ = true;
    return settle_added(held);
  }
  const auto* other = SliceStandIn::of(gradient);
  if (other != nullptr) static_cast<void>(other->keeper());
  TORCH_CHECK(other == nullptr && gradient.layout() == at::kStrided && gradient.sizes() == held.parameter.sizes(), who_,
              ": what was put in place of the gradient of parameter '", held.name, "' is no dense tensor of its sizes");
  const at::NoGradGuard no_grad;
  part_of_slice(held).copy_(part_of_whole(held, gradient));
  held.added.reset();
  held.has_settled_own = true;
  has_taken_whole_ = true;
  gradient = held.stand_in;
}

void ScatteredGradients::settle() {
  for (std::size_t i = 0; i < held_.size(); ++i) {
    auto& held = held_[i];
    if (!held.parameter.defined()) continue;
    if (!held.stand_in.defined()) make_stand_in(held, static_cast<int64_t>(i));
    settle(held);
  }
}

void ScatteredGradients::forget(Held& held) {
  held.added.reset();
  held.has = false;
  held.has_settled_own = false;
}

void ScatteredGradients::drop() {
  for (auto& held : held_) {
    if (!held.parameter.defined()) continue;
    if (is_in_place(held)) held.parameter.mutable_grad().reset();
    forget(held);
  }
  has_averaged_ = false;
  has_taken_whole_ = false;
}

int64_t ScatteredGradients::bytes() const {
  int64_t bytes = 0;
  for (const auto& slice : slices_) bytes += static_cast<int64_t>(slice.gradients.nbytes());
  for (const auto& held : held_) bytes += held.added.defined() ? static_cast<int64_t>(held.added.nbytes()) : 0;
  return bytes;
}

// ---- in a backward ----

void ScatteredGradients::begin_bucket(std::size_t bucket) {
  slices_[bucket].is_begun = true;
  for (const auto& member : cuts_[bucket].members) {
    auto& held = held_[member.index];
    held.is_kept = false;
    if (is_in_place(held)) {
      TORCH_CHECK(
          !held.has_settled_own, who_, ": a backward adds to the gradient of parameter '", held.name,
          "', which was not averaged (no_sync(), a second backward, or set by hand) and then clipped, unscaled ",
          "or changed: this rank has kept its part of it only. Do that after the last backward.");
      // The reducer takes what is in .grad.
      held.parameter.mutable_grad() = std::exchange(held.added, at::Tensor());
      held.is_kept = true;
      continue;
    }
    forget(held);
    // A stand-in that a program has kept is not that of the gradient to come.
    const auto* stand_in = SliceStandIn::of(held.stand_in);
    if (stand_in == nullptr || held.stand_in.use_count() > 1 || stand_in->link().use_count() > 1) {
      if (stand_in != nullptr) stand_in->link()->keeper.reset();
      make_stand_in(held, member.index);
    }
  }
}

void ScatteredGradients::launch(std::size_t bucket, const at::Tensor& buffer) {
  auto& slice = slices_[bucket];
  const auto& [layout, members, kept_dtype] = cuts_[bucket];
  const at::NoGradGuard no_grad;
  slice.adds =
      std::any_of(members.begin(), members.end(), [&](const Member& member) { return held_[member.index].is_kept; });
  const bool is_in_place = !slice.adds && buffer.scalar_type() == kept_dtype;
  if (!is_in_place) slice.arriving = at::empty_like(slice.gradients, buffer.scalar_type());
  const auto& target = is_in_place ? slice.gradients : slice.arriving;
  slice.reduction = launch_reduce_scatter_tensor(target, buffer.narrow(0, 0, layout.plan().padded()), group_);
}

void ScatteredGradients::wait_for(std::size_t bucket) {
  auto& slice = slices_[bucket];
  slice.reduction->wait();
  slice.reduction.reset();
  if (slice.adds || !slice.arriving.defined()) return;
  const at::NoGradGuard no_grad;
  // Only the dtype is another; there was nothing that a backward which fails would have to leave.
  slice.gradients.copy_(slice.arriving);
  slice.arriving.reset();
}

void ScatteredGradients::end_backward(const std::vector<bool>& is_used) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    auto& slice = slices_[i];
    slice.is_begun = false;
    if (!slice.arriving.defined()) continue;
    for (const auto& member : cuts_[i].members) {
      if (const auto& held = held_[member.index]; !held.is_kept) part_of_slice(held).zero_();
    }
    slice.gradients.add_(slice.arriving);
    slice.arriving.reset();
  }
  for (std::size_t i = 0; i < is_used.size(); ++i) {
    auto& held = held_[optimizer_indices_[i]];
    if (is_used[i] || held.is_kept) held.parameter.mutable_grad() = held.stand_in;
    held.is_kept = false;
  }
}

void ScatteredGradients::give_up() {
  for (std::size_t i = 0; i < slices_.size(); ++i) {
    auto& slice = slices_[i];
    // What is under way may still be written. Gradients are written directly only if there were none.
    if (slice.reduction && !slice.arriving.defined()) slice.gradients = at::empty_like(slice.gradients);
    slice.reduction.reset();
    slice.arriving.reset();
    if (!std::exchange(slice.is_begun, false)) continue;
    for (const auto& member : cuts_[i].members) {
      auto& held = held_[member.index];
      if (!std::exchange(held.is_kept, false)) continue;
      // What earlier backwards left is there as before; what this one has computed stays, as it does in any .grad.
      held.added = std::exchange(held.parameter.mutable_grad(), held.stand_in);
    }
  }
}

}  // namespace lockstep::detail
