// The TensorImpl of a DTensor: global sizes and strides, no storage, and what this rank holds. Autograd records
// operators on it as on any tensor; below autograd its rule (dispatch.cpp) runs them on local tensors. Internal to
// dtensor and tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/intercept/tensor_rule.h"
#include "lockstep/shard/layout.h"

namespace lockstep::detail {

using LayoutPtr = std::shared_ptr<const Layout>;

/// What a parallel style has operators do that use a parameter of its module (tp/operator_style.h).
class OperatorStyle : public TensorRule {
 public:
  /// What `tensor`, a stand-in with this style, stands for, as autograd is to see it.
  virtual at::Tensor real_tensor(const at::Tensor& tensor) const = 0;
};

class DTensorImpl final : public RuledTensorImpl {
 public:
  /// Takes `local` as it is, with its version counter. Its sizes are the layout's local ones.
  DTensorImpl(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides);

  /// What this rank holds. Waits for what is under way.
  const at::Tensor& local() const;
  const LayoutPtr& layout() const { return layout_; }
  const Placements& placements() const { return layout_->placements(); }
  const DeviceMesh& mesh() const { return layout_->mesh(); }

  /// The local tensor is still on its way: whoever needs it first calls `wait`, which gives it.
  void set_wait(std::function<at::Tensor()> wait) { wait_ = std::move(wait); }
  /// Makes it a stand-in for a parameter of a layer with a parallel style, or with `real` for that view of one:
  /// operators come to the style above autograd, which puts the real tensor into its place.
  void set_style(std::shared_ptr<OperatorStyle> style, at::Tensor real = {});
  const std::shared_ptr<OperatorStyle>& style() const { return style_; }
  const at::Tensor& real() const { return real_; }
  /// Whether the member and the registered parameter were trainable when they were last compared.
  bool was_trainable() const { return was_trainable_; }
  void set_was_trainable(bool is_trainable) { was_trainable_ = is_trainable; }
  /// The parameter it stands for may have been given another type.
  void follow_dtype() { data_type_ = local_.dtype(); }

  /// Ordinary tensors that operators get beside it, and beside what comes of it, are replicas, if they need no
  /// gradient: the masks of an attention.
  bool takes_replicas() const { return takes_replicas_; }
  void set_takes_replicas() { takes_replicas_ = true; }

  /// It should be a view of `original`, but holds a copy of its values: reading it is refused once that has been
  /// written.
  void set_copied(const DTensorImpl& original);
  bool is_copied() const { return is_copied_; }
  /// False for a copy whose original is still there. Others are copies no longer.
  bool try_write();

  TensorRule* rule() const override { return style_.get(); }
  TensorRule* kernel_rule() const override;
  const at::Tensor* memory() const override { return &local(); }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_tensor_metadata_change) const override;
  /// A weak reference, as to an input that may be asked for again, keeps no memory.
  void release_resources() override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 protected:
  /// Of one whose local tensor had no memory at first, and may have some by now.
  c10::Device device_custom() const override { return local_.defined() ? local_.device() : device_default(); }

 private:
  const char* tensorimpl_type_name() const override { return "lockstep::DTensor"; }

  mutable at::Tensor local_;
  mutable std::function<at::Tensor()> wait_;
  LayoutPtr layout_;
  std::shared_ptr<OperatorStyle> style_;
  at::Tensor real_;
  bool was_trainable_ = false;
  bool takes_replicas_ = false;
  bool is_copied_ = false;
  std::optional<uint32_t> copied_version_;
};

/// Null for another tensor.
DTensorImpl* dtensor_impl(const at::Tensor& tensor);

/// A DTensor without autograd history. Its strides have the order of the local tensor's, if all ranks hold equally
/// much: parts that differ may not tell.
at::Tensor wrap_local(at::Tensor local, LayoutPtr layout);
at::Tensor wrap_local(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides);
/// The same of a view of one that counts its writes, as all but inference tensors do.
at::Tensor wrap_view(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides, bool has_counter);

/// All ranks hold equally much, and so lies what they hold: where it does not, nobody can know by what he has whether
/// others could view theirs.
bool is_even(const Layout& layout);

/// Dense strides for a tensor of `sizes` whose dims lie in memory in the order of those of `local`.
std::vector<int64_t> strides_like(const at::Tensor& local, at::IntArrayRef sizes);

/// Has autograd, which is about to record a view, remember how it came about: by itself it would rely on as_strided(),
/// which means nothing for DTensors. The thread keeps to it, which costs its other views little.
void replay_views();

/// Strides of a whole tensor that an operator makes element by element of `operand`. They follow from the whole one's:
/// those of local tensors say less where parts are small or empty, and ranks whose strides differ take different ways
/// through autograd's formulas.
std::vector<int64_t> elementwise_strides(const OperatorCall& call, const c10::TensorImpl& operand);

/// The rule of all DTensors below autograd.
TensorRule& dtensor_rule();

/// Replicate for Partial: what a gradient has where nothing else is said.
Placements gradient_placements(const Placements& placements);

}  // namespace lockstep::detail
