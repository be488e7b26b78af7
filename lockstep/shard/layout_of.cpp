#include "lockstep/shard/layout_of.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/comm/call.h"

namespace lockstep {
namespace {

namespace impl = torch::autograd::impl;

/// [Note: where a layout is kept] What a tensor object owns, and keeps while its memory is exchanged, is what autograd
/// knows about it. Of that only the list of gradient hooks takes values of ours: so the layout is held by a hook that
/// leaves the gradient alone. A table by address would keep meshes, and with them groups, after their tensors.
struct LayoutHook {
  std::shared_ptr<const Layout> layout;
  bool is_gathered = false;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> wholes = {};

  at::TensorBase operator()(const at::TensorBase& /*gradient*/) const { return {}; }
};

LayoutHook* find_hook(const at::Tensor& tensor) {
  const auto* meta = impl::get_autograd_meta(tensor);
  if (meta == nullptr || !meta->cpp_hooks_list_) return nullptr;
  for (auto& hook : *meta->cpp_hooks_list_) {
    if (auto* found = hook.target<LayoutHook>()) return found;
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<const Layout> layout_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const auto* hook = find_hook(tensor);
  return hook == nullptr ? nullptr : hook->layout;
}

void set_gathered_layout(const at::Tensor& tensor, Layout layout, const std::vector<at::Tensor>& wholes) {
  set_layout(tensor, std::move(layout));
  auto& hook = *find_hook(tensor);
  hook.is_gathered = true;
  for (const auto& whole : wholes) hook.wholes.emplace_back(whole.getIntrusivePtr());
}

std::vector<at::Tensor> gathered_wholes(const at::Tensor& tensor) {
  std::vector<at::Tensor> wholes;
  if (!has_gathered_layout(tensor)) return wholes;
  for (const auto& each : find_hook(tensor)->wholes) {
    if (auto whole = each.lock()) wholes.emplace_back(std::move(whole));
  }
  return wholes;
}

bool has_gathered_layout(const at::Tensor& tensor) {
  const auto* hook = tensor.defined() ? find_hook(tensor) : nullptr;
  return hook != nullptr && hook->layout && hook->is_gathered;
}

void set_layout(const at::Tensor& tensor, Layout layout) {
  TORCH_CHECK(tensor.defined(), "[lockstep/shard] an undefined tensor cannot carry ", layout);
  TORCH_CHECK(tensor.is_leaf(), "[lockstep/shard] a tensor that was computed (", describe(tensor),
              ") cannot carry a layout: give it to a parameter, or detach() first.");
  const auto wanted = layout.local_sizes();
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef(wanted), "[lockstep/shard] rank ", layout.mesh().get_rank(),
              ": a tensor of sizes ", tensor.sizes(), " is not this rank's part of ", layout, ", which has sizes ",
              at::IntArrayRef(wanted));
  auto shared = std::make_shared<const Layout>(std::move(layout));
  if (auto* hook = find_hook(tensor)) {
    *hook = {.layout = std::move(shared)};
    return;
  }
  auto* meta = impl::materialize_autograd_meta(tensor);
  if (!meta->cpp_hooks_list_) impl::create_cpp_hook(tensor);
  meta->cpp_hooks_list_->emplace_back(LayoutHook{std::move(shared)});
}

bool has_gradient_hooks(const at::Tensor& tensor) {
  const auto* meta = impl::get_autograd_meta(tensor);
  if (meta == nullptr) return false;
  if (!meta->cpp_hooks_list_) return !meta->hooks_.empty();
  const auto is_others = [](auto& hook) { return hook && hook.template target<LayoutHook>() == nullptr; };
  return meta->hooks_.size() > 1 ||
         std::any_of(meta->cpp_hooks_list_->begin(), meta->cpp_hooks_list_->end(), is_others);
}

void clear_layout(const at::Tensor& tensor) {
  // The hook stays: positions in the list are what remove_hook() is called with.
  if (auto* hook = tensor.defined() ? find_hook(tensor) : nullptr) hook->layout.reset();
}

}  // namespace lockstep
