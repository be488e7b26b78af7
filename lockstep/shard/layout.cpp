#include "lockstep/shard/layout.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <ostream>

#include "lockstep/base/str.h"

namespace lockstep {
namespace {

using Ranges = std::vector<ElementRange>;

int64_t size_of(const Ranges& ranges) {
  int64_t total = 0;
  for (const auto& range : ranges) total += range.size();
  return total;
}

/// The index-th of `count` chunks of `whole`, by Python's rule: all but the last ones ceil(size / count) long.
ElementRange chunk_of(const ElementRange& whole, int64_t index, int64_t count) {
  const auto length = (whole.size() + count - 1) / count;
  return {std::min(whole.end, whole.begin + index * length), std::min(whole.end, whole.begin + (index + 1) * length)};
}

void append(Ranges& ranges, const ElementRange& range) {
  if (range.is_empty()) return;
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

/// Appends positions [wanted.begin, wanted.end) of `ranges`, counted through them, to `taken`.
void take(Ranges& taken, const Ranges& ranges, const ElementRange& wanted) {
  int64_t begin = 0;
  for (const auto& range : ranges) {
    const auto here = intersection(wanted, {begin, begin + range.size()});
    append(taken, {here.begin - begin + range.begin, here.end - begin + range.begin});
    begin += range.size();
  }
}

/// What is left of a dim to the index-th of `count` ranks that cut it first into `split_factor` chunks.
Ranges sharded(const Ranges& ranges, int64_t index, int64_t count, int64_t split_factor) {
  const ElementRange all = {0, size_of(ranges)};
  Ranges taken;
  for (int64_t i = 0; i < split_factor; ++i)
    take(taken, ranges, chunk_of(chunk_of(all, i, split_factor), index, count));
  return taken;
}

/// What is left of a dim to the index-th of the ranks that have so many indices of it.
Ranges ragged(const Ranges& ranges, std::size_t index, const std::vector<int64_t>& counts) {
  int64_t begin = 0;
  for (std::size_t i = 0; i < index; ++i) begin += counts[i];
  Ranges taken;
  take(taken, ranges, {begin, begin + counts[index]});
  return taken;
}

std::string list_text(const std::vector<int64_t>& sizes) {
  return str("[", join(sizes, ", "), "]");
}

/// "mesh dim 1 ('tp', size 2)".
std::string axis_text(const DeviceMesh& mesh, std::size_t axis) {
  const auto& names = mesh.mesh_dim_names();
  const auto name = names.empty() ? std::string() : str("'", names[axis], "', ");
  return str("mesh dim ", axis, " (", name, "size ", mesh.size(static_cast<int64_t>(axis)), ")");
}

/// The placement of an axis with its dim counted from the front.
Placement checked(const DeviceMesh& mesh, std::size_t axis, const Placement& placement,
                  const std::vector<int64_t>& sizes) {
  const auto where = [&] {
    return str("[lockstep/shard] rank ", mesh.get_rank(), ", ", mesh, ": ", placement, " on ", axis_text(mesh, axis));
  };
  if (const auto* partial = std::get_if<Partial>(&placement)) {
    TORCH_CHECK(std::find(kPartialOps.begin(), kPartialOps.end(), partial->op) != kPartialOps.end(), where(),
                ": this reduction cannot be left pending. Use sum, avg, product, min, max, band, bor or bxor.");
  }
  const auto dim = sharded_dim(placement);
  if (!dim) return placement;
  const auto ndim = static_cast<int64_t>(sizes.size());
  TORCH_CHECK(ndim > 0, where(), " needs a dim ", *dim, ", and the tensor has 0 dims. Use Replicate.");
  TORCH_CHECK(*dim >= -ndim && *dim < ndim, where(), " needs a dim ", *dim, ", and the tensor has ", ndim,
              " dims, sizes ", list_text(sizes), ". Give a dim from ", -ndim, " to ", ndim - 1, ".");
  const auto from_front = *dim < 0 ? *dim + ndim : *dim;
  if (const auto* uneven = std::get_if<RaggedShard>(&placement)) {
    const auto& counts = uneven->counts;
    const auto size = sizes[static_cast<std::size_t>(from_front)];
    const bool fits = static_cast<int64_t>(counts.size()) == mesh.size(static_cast<int64_t>(axis)) &&
                      std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count >= 0; }) &&
                      std::accumulate(counts.begin(), counts.end(), int64_t{0}) == size;
    TORCH_CHECK(fits, where(), " of a tensor of sizes ", list_text(sizes), ": give one count for each rank, together ",
                size, ".");
    return RaggedShard(from_front, counts);
  }
  const auto* strided = std::get_if<StridedShard>(&placement);
  if (strided == nullptr) return Shard(from_front);
  TORCH_CHECK(strided->split_factor >= 1, where(), " of a tensor of sizes ", list_text(sizes),
              ": cannot cut a dim into ", strided->split_factor, " chunks. Give a split_factor of at least 1.");
  return StridedShard(from_front, strided->split_factor);
}

/// Counts are of the whole dim.
void check_ragged(const DeviceMesh& mesh, const Placements& placements) {
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!std::holds_alternative<RaggedShard>(placements[i])) continue;
    for (std::size_t j = 0; j < placements.size(); ++j) {
      TORCH_CHECK(i == j || sharded_dim(placements[i]) != sharded_dim(placements[j]), "[lockstep/shard] rank ",
                  mesh.get_rank(), ", ", mesh, ": ", placements[i], " on ", axis_text(mesh, i), " and ", placements[j],
                  " on ", axis_text(mesh, j), ": a dim that is cut raggedly is cut by one axis only.");
    }
  }
}

void check_partials(const DeviceMesh& mesh, const Placements& placements) {
  const Partial* first = nullptr;
  std::size_t first_axis = 0;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const auto* partial = std::get_if<Partial>(&placements[i]);
    if (partial == nullptr) continue;
    if (first == nullptr) {
      first = partial;
      first_axis = i;
      continue;
    }
    const auto is_linear = [](ReduceOp op) { return op == ReduceOp::SUM || op == ReduceOp::AVG; };
    TORCH_CHECK(partial->op == first->op || (is_linear(partial->op) && is_linear(first->op)), "[lockstep/shard] rank ",
                mesh.get_rank(), ", ", mesh, ": ", Placement(*first), " on ", axis_text(mesh, first_axis), " and ",
                Placement(*partial), " on ", axis_text(mesh, i),
                ": the result would depend on which is reduced first. Use one reduction; only sum and avg mix.");
  }
}

}  // namespace

TensorPart::TensorPart(std::vector<std::vector<ElementRange>> by_dim, const std::vector<int64_t>& global_sizes)
    : by_dim_(std::move(by_dim)) {
  for (std::size_t dim = 0; dim < by_dim_.size(); ++dim) {
    const auto& ranges = by_dim_[dim];
    sizes_.push_back(size_of(ranges));
    offsets_.push_back(ranges.empty() ? global_sizes[dim] : ranges.front().begin);
  }
}

int64_t TensorPart::numel() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

std::vector<TensorBox> TensorPart::boxes() const {
  std::vector<TensorBox> boxes = {{}};
  for (const auto& ranges : by_dim_) {
    std::vector<TensorBox> finer;
    for (const auto& box : boxes) {
      int64_t local = 0;
      for (const auto& range : ranges) {
        auto& made = finer.emplace_back(box);
        made.offsets.push_back(range.begin);
        made.sizes.push_back(range.size());
        made.local_offsets.push_back(local);
        local += range.size();
      }
    }
    boxes = std::move(finer);
  }
  return boxes;
}

TensorPart part_at(const std::vector<int>& coordinate, const std::vector<int64_t>& mesh_shape,
                   const Placements& placements, const std::vector<int64_t>& sizes) {
  std::vector<Ranges> by_dim(sizes.size());
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) append(by_dim[dim], {0, sizes[dim]});
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const auto dim = sharded_dim(placements[axis]);
    if (!dim) continue;
    if (const auto* uneven = std::get_if<RaggedShard>(&placements[axis])) {
      by_dim[*dim] = ragged(by_dim[*dim], static_cast<std::size_t>(coordinate[axis]), uneven->counts);
      continue;
    }
    const auto* strided = std::get_if<StridedShard>(&placements[axis]);
    by_dim[*dim] =
        sharded(by_dim[*dim], coordinate[axis], mesh_shape[axis], strided == nullptr ? 1 : strided->split_factor);
  }
  return {std::move(by_dim), sizes};
}

Layout::Layout(DeviceMesh mesh, const Placements& placements, std::vector<int64_t> sizes)
    : mesh_(std::move(mesh)), sizes_(std::move(sizes)) {
  TORCH_CHECK(static_cast<int64_t>(placements.size()) == mesh_.ndim(), "[lockstep/shard] rank ", mesh_.get_rank(), ", ",
              mesh_, ": got ", placements.size(), " placements, ", lockstep::to_string(placements), ", for ",
              mesh_.ndim(), " mesh dims. Give one for each.");
  TORCH_CHECK(std::all_of(sizes_.begin(), sizes_.end(), [](int64_t size) { return size >= 0; }),
              "[lockstep/shard] rank ", mesh_.get_rank(), ": there is no tensor of sizes ", list_text(sizes_));
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    placements_.push_back(checked(mesh_, axis, placements[axis], sizes_));
  }
  check_ragged(mesh_, placements_);
  check_partials(mesh_, placements_);
}

int64_t Layout::numel() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

TensorPart Layout::part() const {
  return part_of(mesh_.get_rank());
}

TensorPart Layout::part_of(int rank) const {
  const auto& ranks = mesh_.ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  TORCH_CHECK(found != ranks.end(), "[lockstep/shard] rank ", mesh_.get_rank(), ", ", mesh_, ": rank ", rank,
              " is outside of this mesh and holds no part. Its ranks are ", join(ranks, ", "), ".");
  const auto shape = mesh_.shape();
  return part_at(unravel(found - ranks.begin(), shape), shape, placements_, sizes_);
}

std::vector<int64_t> Layout::local_sizes() const {
  if (!mesh_.is_member()) return {0};
  // The common placements leave one range of each dim, whose length is known without it.
  auto sizes = sizes_;
  for (std::size_t axis = 0; axis < placements_.size(); ++axis) {
    if (const auto* shard = std::get_if<Shard>(&placements_[axis])) {
      auto& size = sizes[static_cast<std::size_t>(shard->dim)];
      size = chunk_of({0, size}, (*mesh_.get_coordinate())[axis], mesh_.size(static_cast<int64_t>(axis))).size();
    } else if (sharded_dim(placements_[axis])) {
      return part().sizes();
    }
  }
  return sizes;
}

std::vector<int64_t> Layout::offsets() const {
  return mesh_.is_member() ? part().offsets() : std::vector<int64_t>{};
}

at::Tensor Layout::cut(const at::Tensor& whole) const {
  if (!mesh_.is_member()) return whole.reshape({-1}).narrow(0, 0, 0);
  return cut(whole, mesh_.get_rank());
}

at::Tensor Layout::cut(const at::Tensor& whole, int rank) const {
  TORCH_CHECK(whole.sizes() == at::IntArrayRef(sizes_), "[lockstep/shard] rank ", mesh_.get_rank(),
              ": a tensor of sizes ", whole.sizes(), " was given to a layout of sizes ", list_text(sizes_));
  auto part = whole;
  const auto of_rank = part_of(rank);
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    const auto& ranges = of_rank.ranges()[i];
    const auto dim = static_cast<int64_t>(i);
    std::vector<at::Tensor> runs;
    for (const auto& range : ranges) runs.push_back(part.narrow(dim, range.begin, range.size()));
    part = runs.empty() ? part.narrow(dim, 0, 0) : runs.size() == 1 ? runs.front() : at::cat(runs, dim);
  }
  return part;
}

bool Layout::is_same_on(const std::vector<int>& ranks) const {
  const auto part_on = [&](int rank) -> std::optional<TensorPart> {
    const auto coordinate = mesh_.coordinate_of(rank);
    if (!coordinate) return std::nullopt;
    return part_at(*coordinate, mesh_.shape(), placements_, sizes_);
  };
  const auto mine = part_on(mesh_.get_rank());
  return !has_partial() && std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    const auto theirs = part_on(rank);
    return mine && theirs && mine->ranges() == theirs->ranges();
  });
}

std::vector<int64_t> Layout::dividing_axes() const {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh_.ndim(); ++axis) {
    if (sharded_dim(placements_[static_cast<std::size_t>(axis)]) && mesh_.size(axis) > 1) axes.push_back(axis);
  }
  return axes;
}

bool Layout::is_replicated() const {
  return std::all_of(placements_.begin(), placements_.end(),
                     [](const Placement& each) { return std::holds_alternative<Replicate>(each); });
}

bool Layout::has_partial() const {
  return std::any_of(placements_.begin(), placements_.end(),
                     [](const Placement& each) { return std::holds_alternative<Partial>(each); });
}

std::string Layout::to_string() const {
  return str("Layout(", list_text(sizes_), ", ", lockstep::to_string(placements_), ", ", mesh_, ")");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.to_string();
}

}  // namespace lockstep
