// FlatShard: parameters of one dtype and device in one flat buffer, of which this rank has a slice. The buffer lies in
// memory that the group's backend reaches without a copy, if it has such. Local: collectives on it are the owner's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/shard/flat_layout.h"

namespace lockstep::detail {

enum class FlatMemory {
  kViews,     // the parameters become views of the buffer: what arrives in it is in them
  kStorages,  // as kViews, but each has a storage of its own, over the same memory
  kOwn,       // the parameters keep their memory; pack() and unpack() move values
};

/// The layout of these parameters, in their order.
FlatLayout flat_layout_of(const std::vector<at::Tensor>& parameters, int world_size,
                          const FlatAlignment& alignment = {});

/// Copies share the buffer.
class FlatShard {
 public:
  FlatShard() = default;
  /// Brings the parameters' values into a new buffer; what lies between them is zero. Strides of views are kept where
  /// memory has no gaps, else parameters become contiguous. `rank` is this one among those the layout is for; `group`
  /// says where the buffer lies.
  FlatShard(FlatLayout layout, int rank, std::vector<at::Tensor> parameters, const GroupPtr& group, FlatMemory memory);

  const FlatLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// All slices, padding included.
  const at::Tensor& buffer() const { return buffer_; }
  /// This rank's slice, padding included: a view.
  at::Tensor own_slice() const;
  /// The elements of it that exist.
  ElementRange own_range() const { return layout_.plan().slice_of(rank_); }
  /// The index-th parameter's place in the buffer, with the parameter's sizes: a view.
  at::Tensor place_of(std::size_t index) const;

  /// From the parameters' own memory to the buffer and back. Nothing to do for views.
  void pack() const;
  void unpack() const;

  /// Whether a parameter is no longer a view of the buffer, because torch::load(), to() or set_data() gave it other
  /// memory: a comparison of addresses for each. Never if they keep their own memory.
  bool has_moved() const { return !moved(/*at_most=*/1).empty(); }
  /// Which; the first ones.
  std::vector<std::size_t> moved(std::size_t at_most) const;
  /// Whether it could be taken back: it has the sizes, dtype and device it had.
  bool fits(std::size_t index) const;
  /// Makes it a view of the buffer again, laid out as it was, with the values it has now. REQUIRES: fits(index).
  void take_back(std::size_t index) const;

  int64_t bytes() const { return buffer_.defined() ? static_cast<int64_t>(buffer_.nbytes()) : 0; }

 private:
  void set_data(std::size_t index, const at::Tensor& place) const;

  struct Form {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  FlatLayout layout_;
  int rank_ = 0;
  FlatMemory memory_ = FlatMemory::kViews;
  std::vector<at::Tensor> parameters_;
  at::Tensor buffer_;
  std::vector<Form> forms_;  // of the views
};

}  // namespace lockstep::detail
