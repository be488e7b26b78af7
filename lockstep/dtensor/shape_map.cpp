#include "lockstep/dtensor/shape_map.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "lockstep/dtensor/dim_factors.h"

namespace lockstep {
namespace {

using MeshShape = std::vector<int64_t>;
using DimTargets = std::vector<std::optional<int64_t>>;

std::size_t dim_index(int64_t dim) {
  return static_cast<std::size_t>(dim);
}

Placement moved_cut(const Placement& placement, int64_t dim) {
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return StridedShard(dim, strided->split_factor);
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return RaggedShard(dim, ragged->counts);
  return Shard(dim);
}

/// Moves the cuts of `dim`.
void move_cuts(const Placements& input, int64_t dim, int64_t target, Placements& output) {
  for (std::size_t axis = 0; axis < input.size(); ++axis) {
    if (sharded_dim(input[axis]) == dim) output[axis] = moved_cut(input[axis], target);
  }
}

/// Takes over one cut after another, from left to right, as long as the operator can carry it beside those before it.
/// `carry(dim, input, outputs)` sets the placements of outputs for the cuts of `dim`, or says false.
template <typename Carry>
ShapeMap carried(const Placements& placements, std::size_t outputs, const Carry& carry) {
  auto uncut = placements;
  for (auto& placement : uncut) {
    if (sharded_dim(placement)) placement = Replicate();
  }
  ShapeMap map = {{uncut}, std::vector<Placements>(outputs, uncut)};
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto dim = sharded_dim(placements[axis]);
    if (!dim) continue;
    auto trial = map;
    trial.inputs[0][axis] = placements[axis];
    if (carry(*dim, trial.inputs[0], trial.outputs)) map = std::move(trial);
  }
  return map;
}

/// Dims of a view's input and output that hold the same elements: [begin, end) of each.
struct ViewGroup {
  std::size_t from_begin;
  std::size_t from_end;
  std::size_t to_begin;
  std::size_t to_end;

  bool is_same_dim() const { return from_end - from_begin == 1 && to_end - to_begin == 1; }
};

int64_t elements_in(const TensorSizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// The smallest groups that have a dim of the input. A dim of size 1 without partner is one by itself.
std::vector<ViewGroup> view_groups(const TensorSizes& from, const TensorSizes& to) {
  std::vector<ViewGroup> groups;
  std::size_t i = 0;
  std::size_t j = 0;
  const bool is_empty = elements_in(from) == 0;
  while (i < from.size() && j < to.size() && (!is_empty || from[i] == to[j])) {
    if (from[i] != 1 && to[j] == 1) {
      ++j;
      continue;
    }
    ViewGroup group = {i, i + 1, j, from[i] == 1 && to[j] != 1 ? j : j + 1};
    auto in = from[i];
    auto out = group.to_end == j ? 1 : to[j];
    while (in != out) {
      if (in < out) {
        in *= from[group.from_end++];
      } else {
        out *= to[group.to_end++];
      }
    }
    groups.push_back(group);
    i = group.from_end;
    j = group.to_end;
  }
  // Dims of size 1, or those of an empty tensor, that have become nothing.
  if (i < from.size()) groups.push_back({i, from.size(), to.size(), to.size()});
  return groups;
}

bool carry_view(const ViewGroup& group, const TensorSizes& from, const TensorSizes& to, const MeshShape& mesh_shape,
                const Placements& input, Placements& output) {
  if (group.is_same_dim()) {
    move_cuts(input, static_cast<int64_t>(group.from_begin), static_cast<int64_t>(group.to_begin), output);
    return true;
  }
  Factors factors;
  for (auto dim = group.from_begin; dim < group.from_end; ++dim) {
    const auto more = factors_of(from[dim], static_cast<int64_t>(dim), input, mesh_shape);
    if (!more) return false;
    append_factors(factors, *more);
  }
  const TensorSizes sizes(to.begin() + static_cast<std::ptrdiff_t>(group.to_begin),
                          to.begin() + static_cast<std::ptrdiff_t>(group.to_end));
  const auto by_dim = regrouped(std::move(factors), sizes);
  if (!by_dim) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!place((*by_dim)[i], static_cast<int64_t>(group.to_begin + i), mesh_shape, output)) return false;
  }
  return true;
}

/// A dim as a number of chunks that are divided alike.
struct Chunks {
  int64_t size;
  Factors inside;

  bool operator==(const Chunks&) const = default;
};

std::optional<Chunks> chunks_of(int64_t size, int64_t dim, const MeshShape& mesh_shape, const Placements& placements) {
  auto factors = factors_of(size, dim, placements, mesh_shape);
  if (!factors) return std::nullopt;
  if (factors->empty() || !factors->front().is_free()) return Chunks{size, std::move(*factors)};
  const auto count = factors->front().size;
  factors->erase(factors->begin());
  return Chunks{size / count, std::move(*factors)};
}

/// A dim of `size`, as so many of the chunks.
bool place_chunks(const Chunks& chunks, int64_t size, int64_t dim, const MeshShape& mesh_shape,
                  Placements& placements) {
  if (size == 0 || size % chunks.size != 0) return false;
  Factors factors;
  append_factors(factors, {{size / chunks.size}});
  append_factors(factors, chunks.inside);
  return place(factors, dim, mesh_shape, placements);
}

/// The placement all inputs are given on `axis`, unless it cuts `dim`: the first cut, or what they agree on.
Placement common_placement(const std::vector<Placements>& placements, std::size_t axis, std::optional<int64_t> dim) {
  const auto& first = placements.front();
  const bool are_same =
      std::all_of(placements.begin(), placements.end(), [&](const auto& one) { return one == first; });
  for (const auto& input : placements) {
    const auto cut = sharded_dim(input[axis]);
    // A ragged dim is cut by one axis only, which nobody promises for placements of different inputs.
    const bool may_mix = are_same || !std::holds_alternative<RaggedShard>(input[axis]);
    if (cut && cut != dim && may_mix) return input[axis];
  }
  const bool agree =
      std::all_of(placements.begin(), placements.end(), [&](const auto& input) { return input[axis] == first[axis]; });
  return agree && !sharded_dim(first[axis]) ? first[axis] : Placement(Replicate());
}

/// Keeps the cuts of `dim` on `axis`, if all inputs are cut into chunks alike.
bool carry_cat(const std::vector<TensorSizes>& sizes, int64_t dim, const MeshShape& mesh_shape,
               const std::vector<Placements>& inputs, Placements& output) {
  int64_t total = 0;
  std::optional<Chunks> chunks;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto own = chunks_of(sizes[i][dim_index(dim)], dim, mesh_shape, inputs[i]);
    if (!own || (chunks && own != chunks)) return false;
    chunks = std::move(own);
    total += sizes[i][dim_index(dim)];
  }
  return place_chunks(*chunks, total, dim, mesh_shape, output);
}

/// How much of a dim the index-th of `count` ranks holds that cut it first into `split_factor` chunks.
int64_t held_of(int64_t size, int64_t rank, int64_t count, int64_t split_factor) {
  const auto chunk = (size + split_factor - 1) / split_factor;
  if (chunk == 0) return 0;
  const auto held = [&](int64_t of) {
    const auto length = (of + count - 1) / count;
    return std::clamp(of - rank * length, int64_t{0}, length);
  };
  return size / chunk * held(chunk) + held(size % chunk);
}

DimTargets same_dims(int64_t ndim) {
  DimTargets targets;
  for (int64_t dim = 0; dim < ndim; ++dim) targets.emplace_back(dim);
  return targets;
}

}  // namespace

TensorSizes local_sizes_at(const std::vector<int>& coordinate, const MeshShape& mesh_shape,
                           const Placements& placements, const TensorSizes& sizes) {
  auto local = sizes;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto dim = sharded_dim(placements[axis]);
    if (!dim) continue;
    auto& size = local[dim_index(*dim)];
    if (const auto* ragged = std::get_if<RaggedShard>(&placements[axis])) {
      size = ragged->counts[static_cast<std::size_t>(coordinate[axis])];
      continue;
    }
    const auto* strided = std::get_if<StridedShard>(&placements[axis]);
    size = held_of(size, coordinate[axis], mesh_shape[axis], strided == nullptr ? 1 : strided->split_factor);
  }
  return local;
}

ElementRange local_range(const ElementRange& range, int64_t size, int64_t local_size) {
  if (size == 0) return {};
  return {range.begin * local_size / size, range.end * local_size / size};
}

ShapeMap map_view(const TensorSizes& from, const TensorSizes& to, const MeshShape& mesh_shape,
                  const Placements& placements) {
  TORCH_INTERNAL_ASSERT(elements_in(from) == elements_in(to));
  const auto groups = view_groups(from, to);
  return carried(placements, 1, [&](int64_t dim, const Placements& input, std::vector<Placements>& outputs) {
    const auto group =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return dim_index(dim) < g.from_end; });
    return carry_view(*group, from, to, mesh_shape, input, outputs[0]);
  });
}

ShapeMap map_dims(const DimTargets& targets, const Placements& placements) {
  return carried(placements, 1, [&](int64_t dim, const Placements& input, std::vector<Placements>& outputs) {
    const auto target = targets[dim_index(dim)];
    if (target) move_cuts(input, dim, *target, outputs[0]);
    return target.has_value();
  });
}

ShapeMap map_unsqueeze(int64_t ndim, int64_t dim, const Placements& placements) {
  auto targets = same_dims(ndim);
  for (auto& target : targets) *target += *target >= dim ? 1 : 0;
  return map_dims(targets, placements);
}

ShapeMap map_squeeze(const TensorSizes& sizes, const std::vector<int64_t>& dims, const Placements& placements) {
  DimTargets targets;
  int64_t next = 0;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const bool goes = sizes[dim] == 1 && std::find(dims.begin(), dims.end(), static_cast<int64_t>(dim)) != dims.end();
    targets.push_back(goes ? std::nullopt : std::optional(next++));
  }
  return map_dims(targets, placements);
}

ShapeMap map_permute(const std::vector<int64_t>& order, const Placements& placements) {
  DimTargets targets(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) targets[dim_index(order[i])] = static_cast<int64_t>(i);
  return map_dims(targets, placements);
}

ShapeMap map_transpose(int64_t ndim, int64_t dim0, int64_t dim1, const Placements& placements) {
  auto targets = same_dims(ndim);
  if (ndim > 0) std::swap(targets[dim_index(dim0)], targets[dim_index(dim1)]);
  return map_dims(targets, placements);
}

ShapeMap map_expand(const TensorSizes& from, const TensorSizes& to, const Placements& placements) {
  const auto added = to.size() - from.size();
  DimTargets targets(from.size());
  for (std::size_t dim = 0; dim < from.size(); ++dim) {
    if (from[dim] == to[dim + added]) targets[dim] = static_cast<int64_t>(dim + added);
  }
  return map_dims(targets, placements);
}

ShapeMap map_select(int64_t ndim, int64_t dim, const Placements& placements, std::size_t outputs) {
  auto targets = same_dims(ndim);
  targets[dim_index(dim)].reset();
  for (auto after = dim_index(dim) + 1; after < targets.size(); ++after) --*targets[after];
  auto map = map_dims(targets, placements);
  map.outputs.resize(outputs, Placements(map.outputs[0]));
  return map;
}

ShapeMap map_whole(int64_t ndim, const std::vector<int64_t>& dims, const Placements& placements) {
  auto targets = same_dims(ndim);
  for (const auto dim : dims) targets[dim_index(dim)].reset();
  return map_dims(targets, placements);
}

ShapeMap map_ranges(const TensorSizes& sizes, int64_t dim, const std::vector<ElementRange>& ranges,
                    const MeshShape& mesh_shape, const Placements& placements) {
  const auto size = sizes[dim_index(dim)];
  const auto carry = [&](int64_t cut, const Placements& input, std::vector<Placements>& outputs) {
    std::optional<Chunks> chunks;
    if (cut == dim) chunks = chunks_of(size, dim, mesh_shape, input);
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const auto& range = ranges[i];
      if (cut != dim || range == ElementRange{0, size}) {
        move_cuts(input, cut, cut, outputs[i]);
      } else if (!chunks || range.begin % chunks->size != 0 ||
                 !place_chunks(*chunks, range.size(), dim, mesh_shape, outputs[i])) {
        return false;
      }
    }
    return true;
  };
  return carried(placements, ranges.size(), carry);
}

ShapeMap map_slice_backward(const TensorSizes& sizes, int64_t dim, const ElementRange& range,
                            const MeshShape& mesh_shape, const Placements& placements) {
  const auto size = sizes[dim_index(dim)];
  return carried(placements, 1, [&](int64_t cut, const Placements& input, std::vector<Placements>& outputs) {
    if (cut != dim || range == ElementRange{0, size}) {
      move_cuts(input, cut, cut, outputs[0]);
      return true;
    }
    const auto chunks = chunks_of(range.size(), dim, mesh_shape, input);
    return chunks && range.begin % chunks->size == 0 && place_chunks(*chunks, size, dim, mesh_shape, outputs[0]);
  });
}

ShapeMap map_cat(const std::vector<TensorSizes>& sizes, int64_t dim, const MeshShape& mesh_shape,
                 const std::vector<Placements>& placements) {
  const auto axes = placements.front().size();
  ShapeMap map = {std::vector<Placements>(placements.size(), Placements(axes)), {Placements(axes)}};
  for (std::size_t axis = 0; axis < axes; ++axis) {
    auto trial = map;
    const auto is_cut = [&](const Placements& input) { return sharded_dim(input[axis]) == dim; };
    if (std::all_of(placements.begin(), placements.end(), is_cut)) {
      for (std::size_t i = 0; i < placements.size(); ++i) trial.inputs[i][axis] = placements[i][axis];
      if (carry_cat(sizes, dim, mesh_shape, trial.inputs, trial.outputs[0])) map = std::move(trial);
      continue;
    }
    const auto common = common_placement(placements, axis, dim);
    for (auto& input : map.inputs) input[axis] = common;
    map.outputs[0][axis] = common;
  }
  return map;
}

ShapeMap map_stack(int64_t ndim, int64_t dim, const std::vector<Placements>& placements) {
  Placements common;
  for (std::size_t axis = 0; axis < placements.front().size(); ++axis) {
    common.push_back(common_placement(placements, axis, std::nullopt));
  }
  auto map = map_unsqueeze(ndim, dim, common);
  map.inputs.resize(placements.size(), common);
  return map;
}

ShapeMap map_repeat(const TensorSizes& sizes, const std::vector<int64_t>& repeats, const MeshShape& mesh_shape,
                    const Placements& placements) {
  const auto added = repeats.size() - sizes.size();
  return carried(placements, 1, [&](int64_t dim, const Placements& input, std::vector<Placements>& outputs) {
    const auto times = repeats[dim_index(dim) + added];
    const auto target = dim + static_cast<int64_t>(added);
    if (times == 1) {
      move_cuts(input, dim, target, outputs[0]);
      return true;
    }
    const auto own = factors_of(sizes[dim_index(dim)], dim, input, mesh_shape);
    if (!own || times == 0) return false;
    Factors factors;
    append_factors(factors, {{times}});
    append_factors(factors, *own);
    return place(factors, target, mesh_shape, outputs[0]);
  });
}

}  // namespace lockstep
