// What is in .grad while ZeRO's second stage keeps a slice of the gradient. Internal to zero.
//
// Operators that change each element by itself (mul_, clamp_, zero_, add_ of a whole tensor, …) change this rank's
// part; those that need elements of other ranks are refused with the remedy. What a backward adds is kept whole until
// it is averaged or used. See docs/zero.md.
#pragma once

#include <memory>
#include <string>

#include "lockstep/optim/sharded_gradients.h"

namespace lockstep::detail {

/// Whoever keeps the slices: asked by parameter, by the optimizer's index.
class SliceKeeper {
 public:
  virtual ~SliceKeeper() = default;

  /// "[lockstep/zero] rank 0 of 2: the gradient of parameter 'fc.weight'".
  virtual std::string description_of(int64_t index) const = 0;
  /// This rank's part with all that was added to it: a view, maybe empty. Throws if the stand-in is not in .grad.
  virtual at::Tensor part_of_gradient(int64_t index) = 0;
  /// The same elements of another tensor that has the gradient's sizes.
  virtual at::Tensor same_part_of(int64_t index, const at::Tensor& whole) const = 0;
  /// A backward adds to the gradient.
  virtual void add_whole(int64_t index, const at::Tensor& gradient) = 0;
  /// The gradient is about to be zeroed, on all ranks: nothing that was added to it counts any more.
  virtual void forget_additions(int64_t index) = 0;
  virtual const GroupPtr& group() const = 0;
  virtual void check_can_be_summed() const = 0;
};

class SliceStandIn final : public GradientStandIn {
 public:
  /// Shared with shallow copies, such as data() makes.
  struct Link {
    std::weak_ptr<SliceKeeper> keeper;
    int64_t index = 0;
  };

  /// With sizes, dtype and device of `like`: the parameter, or another stand-in.
  SliceStandIn(const c10::TensorImpl& like, std::shared_ptr<Link> link);

  TensorRule* rule() const override;
  GradientShard shard() const override;
  void check_can_be_summed() const override { keeper()->check_can_be_summed(); }

  const std::shared_ptr<Link>& link() const { return link_; }
  /// Throws if it has become another one's: slices hold the gradient of a later backward, or the optimizer is gone.
  std::shared_ptr<SliceKeeper> keeper() const;
  int64_t index() const { return link_->index; }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_tensor_metadata_change) const override;

  /// Null for any other tensor.
  static const SliceStandIn* of(const at::Tensor& gradient) {
    return dynamic_cast<const SliceStandIn*>(GradientStandIn::of(gradient));
  }

 private:
  const std::shared_ptr<Link> link_;
};

}  // namespace lockstep::detail
