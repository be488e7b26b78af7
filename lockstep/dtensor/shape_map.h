// How operators that change a tensor's shape carry placements: which the inputs must have, and which the outputs have
// if the operator runs on every rank's local tensors. Sizes are of whole tensors, dims counted from the front and
// within range, as Layout gives them; placements are those a Layout accepts. Pure. Internal to dtensor.
//
// An input keeps its placement on an axis, or must be Replicate there: if the cut could not be expressed afterwards, or
// the operator needs the dim whole. Partial stays: elements move, none is computed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/shard/placement.h"
#include "lockstep/shard/slice_plan.h"

namespace lockstep {

struct ShapeMap {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;

  bool operator==(const ShapeMap&) const = default;
};

using TensorSizes = std::vector<int64_t>;

/// What part_at() says about sizes, in time that does not depend on split factors. With a map's output placements: what
/// the local tensor is viewed as, expanded to or split into.
TensorSizes local_sizes_at(const std::vector<int>& coordinate, const std::vector<int64_t>& mesh_shape,
                           const Placements& placements, const TensorSizes& sizes);

/// `range` of a dim of `size` where a rank holds `local_size` of it, if map_ranges() keeps the cut.
ElementRange local_range(const ElementRange& range, int64_t size, int64_t local_size);

/// view, reshape, flatten, unflatten: the local tensor is reshaped, since a cut may have made it impossible to view.
/// REQUIRES: as many elements.
ShapeMap map_view(const TensorSizes& from, const TensorSizes& to, const std::vector<int64_t>& mesh_shape,
                  const Placements& placements);

/// Dim d becomes dim targets[d] of the output, size and order of its indices unchanged; one without target must be
/// whole, whatever becomes of it.
ShapeMap map_dims(const std::vector<std::optional<int64_t>>& targets, const Placements& placements);

ShapeMap map_unsqueeze(int64_t ndim, int64_t dim, const Placements& placements);
/// Those of `dims` that have another size than 1 stay, as in Python.
ShapeMap map_squeeze(const TensorSizes& sizes, const std::vector<int64_t>& dims, const Placements& placements);
/// Dim d of the output is dim order[d] of the input.
ShapeMap map_permute(const std::vector<int64_t>& order, const Placements& placements);
ShapeMap map_transpose(int64_t ndim, int64_t dim0, int64_t dim1, const Placements& placements);
ShapeMap map_expand(const TensorSizes& from, const TensorSizes& to, const Placements& placements);
/// select, and unbind with several outputs.
ShapeMap map_select(int64_t ndim, int64_t dim, const Placements& placements, std::size_t outputs = 1);
/// What needs all indices of `dims` but keeps the number of dims: flip, roll, slice with a step.
ShapeMap map_whole(int64_t ndim, const std::vector<int64_t>& dims, const Placements& placements);

/// slice with step 1, narrow, split: one output for each range of `dim`. A cut of `dim` stays where the ranges consist
/// of whole chunks of its StridedShard.
ShapeMap map_ranges(const TensorSizes& sizes, int64_t dim, const std::vector<ElementRange>& ranges,
                    const std::vector<int64_t>& mesh_shape, const Placements& placements);
/// The reverse of one range: the input becomes `range` of `dim` in zeros of `sizes`.
ShapeMap map_slice_backward(const TensorSizes& sizes, int64_t dim, const ElementRange& range,
                            const std::vector<int64_t>& mesh_shape, const Placements& placements);
/// A cut of `dim` stays if all inputs have it, so that the reverse of split() moves nothing. Of different placements in
/// other dims the first cut is taken. REQUIRES: inputs of the same number of dims.
ShapeMap map_cat(const std::vector<TensorSizes>& sizes, int64_t dim, const std::vector<int64_t>& mesh_shape,
                 const std::vector<Placements>& placements);
ShapeMap map_stack(int64_t ndim, int64_t dim, const std::vector<Placements>& placements);
/// `repeats` has at least as many dims as the tensor.
ShapeMap map_repeat(const TensorSizes& sizes, const std::vector<int64_t>& repeats,
                    const std::vector<int64_t>& mesh_shape, const Placements& placements);

}  // namespace lockstep
