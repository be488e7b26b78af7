// What a style does at the operators that use its layer's parameters. A layer's members are DTensors whose rule above
// autograd this is: it brings the operator's input to the layout the style wants, and its result to the one it
// promises. Internal to tp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/tp/piece_sizes.h"

namespace lockstep::detail {

/// The last input that was brought to another layout: q, k and v ask for the same one. Shared by the layers of a
/// parallelize_module().
class InputMemo {
 public:
  PieceSizes& piece_sizes() { return piece_sizes_; }

  /// Undefined if the last one was another, is gone, or `layer` has had it before.
  at::Tensor find(const at::Tensor& input, const void* layer, const Placement& layout, const Placement& desired);
  /// A plain output of a layer is no memory that programs fill again: what is made of it can be shared as well.
  void remember_output(const at::Tensor& output);
  /// Whether it is the last one, or the last input was one and this is it.
  bool is_output(const at::Tensor& tensor);
  void remember(const at::Tensor& input, const void* layer, const Placement& layout, const Placement& desired,
                const at::Tensor& result);

 private:
  PieceSizes piece_sizes_;

  std::mutex mutex_;
  // Guarded by mutex_.
  c10::weak_intrusive_ptr<c10::TensorImpl> input_{c10::intrusive_ptr<c10::TensorImpl>()};
  int64_t version_ = 0;
  bool is_recorded_ = false;
  Placement layout_ = Replicate();
  Placement desired_ = Replicate();
  std::vector<const void*> layers_;  // that have asked
  c10::weak_intrusive_ptr<c10::TensorImpl> result_{c10::intrusive_ptr<c10::TensorImpl>()};
  at::Tensor kept_;  // without gradients nobody else keeps it
  c10::weak_intrusive_ptr<c10::TensorImpl> output_{c10::intrusive_ptr<c10::TensorImpl>()};
  bool input_is_output_ = false;
};

/// Layouts of a layer on a mesh of one axis.
struct LayerLayouts {
  std::string path;
  Placement input = Replicate();                  // of plain inputs
  Placement desired = Replicate();                // what the operator is to get
  std::optional<Placement> output = Replicate();  // what leaves; none: whatever the operator gives
  bool use_local_output = true;
  bool input_reshard = false;    // what backward needs of the input is kept cut
  bool compares_pieces = false;  // no collective of the layer would notice pieces of different sizes
  bool takes_masks = false;      // an attention's: plain tensors beside what comes of it are replicas
};

class LayerStyle final : public OperatorStyle {
 public:
  LayerStyle(DeviceMesh mesh, LayerLayouts layouts, std::shared_ptr<InputMemo> memo);
  void run(OperatorCall& call) override;
  at::Tensor real_tensor(const at::Tensor& tensor) const override;

 private:
  void run_layer(OperatorCall& call, std::size_t input) const;
  void run_bias(OperatorCall& call) const;
  /// In the places of stand-ins, as autograd is to see them.
  void put_real_tensors(OperatorCall& call) const;
  at::Tensor product_of(const OperatorCall& call, const at::Tensor& input, const at::Tensor& weight) const;
  DTensor piece_of_input(const at::Tensor& piece, std::optional<int64_t> features) const;
  at::Tensor prepared(const at::Tensor& input, std::optional<int64_t> features) const;
  at::Tensor finished(const at::Tensor& result) const;
  /// As a DTensor, or as what this rank has of it.
  at::Tensor given_out(const DTensor& output) const;

  const DeviceMesh mesh_;
  const LayerLayouts layouts_;
  const std::shared_ptr<InputMemo> memo_;
};

/// The member for a layer's parameter `leaf`, whose layout it carries.
at::Tensor make_member(const at::Tensor& leaf, std::shared_ptr<OperatorStyle> style, const std::string& name);

}  // namespace lockstep::detail
