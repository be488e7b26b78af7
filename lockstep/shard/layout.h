// Layout: how a tensor of some global sizes lies on a mesh. What any rank holds of it follows from mesh, placements and
// sizes alone, so no rank has to ask another.
//
// Placements are read from left to right: each cuts what the ones before it have left to the rank. So two axes that
// shard the same dim divide it among all their ranks, the left axis first; a StridedShard makes up for the other order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/shard/placement.h"
#include "lockstep/shard/slice_plan.h"

namespace lockstep {

/// A run of neighbouring indices in every dim: elements that a rank holds, and where they lie in its local tensor.
struct TensorBox {
  std::vector<int64_t> offsets = {};
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> local_offsets = {};

  bool operator==(const TensorBox&) const = default;
};

/// What one rank holds of a tensor: in every dim some indices, in rising order. A part that is empty in a dim it was
/// sharded in begins where that dim ends, as in Python.
class TensorPart {
 public:
  /// `by_dim` holds the index ranges of every dim, none of them empty; `global_sizes` those of the whole tensor.
  TensorPart(std::vector<std::vector<ElementRange>> by_dim, const std::vector<int64_t>& global_sizes);

  const std::vector<std::vector<ElementRange>>& ranges() const { return by_dim_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  /// Of the first element.
  const std::vector<int64_t>& offsets() const { return offsets_; }
  int64_t numel() const;
  /// The part as boxes in row-major order of their places: one, or several with a StridedShard; none if it is empty.
  std::vector<TensorBox> boxes() const;

 private:
  std::vector<std::vector<ElementRange>> by_dim_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> offsets_;
};

/// What the rank at `coordinate` of a mesh of `mesh_shape` holds of a tensor of `sizes`. Pure. REQUIRES: one placement
/// per axis, with dims that exist, counted from the front.
TensorPart part_at(const std::vector<int>& coordinate, const std::vector<int64_t>& mesh_shape,
                   const Placements& placements, const std::vector<int64_t>& sizes);

class Layout {
 public:
  /// Local. Refuses another number of placements than the mesh has axes, a dim the tensor does not have, a
  /// split_factor below 1, counts that do not add up, and reductions that cannot stand beside each other: all Partials
  /// have one op, or sum and avg.
  Layout(DeviceMesh mesh, const Placements& placements, std::vector<int64_t> sizes);

  const DeviceMesh& mesh() const { return mesh_; }
  /// As given, with dims counted from the front.
  const Placements& placements() const { return placements_; }
  /// Of the whole tensor.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t numel() const;

  /// What `rank` of the world holds, by default this one; refused if it is outside of the mesh.
  TensorPart part() const;
  TensorPart part_of(int rank) const;
  /// Sizes of this rank's tensor: {0} on ranks outside of the mesh, which hold an empty one.
  std::vector<int64_t> local_sizes() const;
  /// Where this rank's tensor begins in the whole one; empty on ranks outside of the mesh.
  std::vector<int64_t> offsets() const;

  /// The part of `whole`, which has this layout's sizes, that `rank` holds, by default this one: a view if the part is
  /// one box, else a copy. Differentiable.
  at::Tensor cut(const at::Tensor& whole) const;
  at::Tensor cut(const at::Tensor& whole, int rank) const;

  /// Whether these ranks of the world all hold what this one does, each in the slice of the root mesh that it is in.
  bool is_same_on(const std::vector<int>& ranks) const;
  /// Axes of the mesh that divide the tensor among several ranks.
  std::vector<int64_t> dividing_axes() const;
  /// No axis shards, all hold the whole tensor.
  bool is_replicated() const;
  bool has_partial() const;

  /// "Layout([8, 4], (Shard(dim=0), Replicate()), DeviceMesh(…))".
  std::string to_string() const;
  /// Same mesh, placements and sizes.
  bool operator==(const Layout& other) const = default;

 private:
  DeviceMesh mesh_;
  Placements placements_;
  std::vector<int64_t> sizes_;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout);

}  // namespace lockstep
