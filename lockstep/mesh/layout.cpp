#include "lockstep/mesh/layout.h"

#include <algorithm>
#include <stdexcept>

#include "lockstep/base/str.h"

namespace lockstep {

AxisLayout::AxisLayout(const std::vector<Extent>& extents) {
  for (const auto& extent : extents) {
    if (extent.size == 1) continue;
    if (!extents_.empty() && extents_.back().stride == extent.size * extent.stride) {
      extents_.back() = {extents_.back().size * extent.size, extent.stride};
    } else {
      extents_.push_back(extent);
    }
  }
}

int64_t AxisLayout::size() const {
  int64_t product = 1;
  for (const auto& extent : extents_) product *= extent.size;
  return product;
}

std::vector<int64_t> AxisLayout::positions() const {
  std::vector<int64_t> positions = {0};
  for (const auto& extent : extents_) {
    std::vector<int64_t> finer;
    finer.reserve(positions.size() * extent.size);
    for (const auto start : positions) {
      for (int64_t step = 0; step < extent.size; ++step) finer.push_back(start + step * extent.stride);
    }
    positions = std::move(finer);
  }
  return positions;
}

bool AxisLayout::is_sorted() const {
  return std::is_sorted(extents_.begin(), extents_.end(),
                        [](const Extent& a, const Extent& b) { return a.stride > b.stride; });
}

std::string AxisLayout::stride_text() const {
  std::vector<int64_t> strides;
  for (const auto& extent : extents_) strides.push_back(extent.stride);
  return strides.size() == 1 ? str(strides[0]) : str("(", join(strides, ", "), ")");
}

MeshLayout MeshLayout::row_major(const std::vector<int64_t>& shape) {
  std::vector<AxisLayout> axes(shape.size());
  int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    axes[i] = AxisLayout({{shape[i], stride}});
    stride *= shape[i];
  }
  return MeshLayout(std::move(axes));
}

int64_t MeshLayout::size() const {
  int64_t product = 1;
  for (const auto& axis : axes_) product *= axis.size();
  return product;
}

std::vector<int64_t> MeshLayout::shape() const {
  std::vector<int64_t> shape;
  for (const auto& axis : axes_) shape.push_back(axis.size());
  return shape;
}

AxisLayout MeshLayout::flattened() const {
  std::vector<Extent> extents;
  for (const auto& axis : axes_) extents.insert(extents.end(), axis.extents().begin(), axis.extents().end());
  return AxisLayout(extents);
}

bool MeshLayout::overlaps() const {
  auto positions = flattened().positions();
  std::sort(positions.begin(), positions.end());
  return std::adjacent_find(positions.begin(), positions.end()) != positions.end();
}

int64_t bounded_product(const std::vector<int64_t>& sizes, int64_t limit) {
  int64_t product = 1;
  for (const auto size : sizes) {
    if (size < 1 || product > limit / size) return -1;
    product *= size;
  }
  return product;
}

std::vector<std::vector<int64_t>> tile(const AxisLayout& axis, int64_t count) {
  const auto shape = axis.positions();
  std::vector<bool> is_taken(count, false);
  std::vector<std::vector<int64_t>> tiles;
  for (int64_t start = 0; start < count; ++start) {
    if (is_taken[start]) continue;
    auto& copy = tiles.emplace_back();
    for (const auto position : shape) {
      const auto at = start + position;
      if (at >= count || is_taken[at]) {
        throw std::invalid_argument(str("an axis with stride ", axis.stride_text(), " and size ", axis.size(),
                                        " does not divide ", count, " positions"));
      }
      is_taken[at] = true;
      copy.push_back(at);
    }
  }
  return tiles;
}

std::vector<std::vector<int>> tile(const AxisLayout& axis, const std::vector<int>& ranks) {
  std::vector<std::vector<int>> lists;
  for (const auto& positions : tile(axis, static_cast<int64_t>(ranks.size()))) {
    auto& list = lists.emplace_back();
    for (const auto position : positions) list.push_back(ranks[position]);
  }
  return lists;
}

std::vector<int> unravel(int64_t index, const std::vector<int64_t>& shape) {
  std::vector<int> coordinate(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    coordinate[i] = static_cast<int>(index % shape[i]);
    index /= shape[i];
  }
  return coordinate;
}

}  // namespace lockstep
