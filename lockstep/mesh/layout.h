// Where the axes of a mesh lie in its list of ranks: sizes and strides, nothing else. Pure arithmetic on positions, no
// ranks and no libtorch.
//
// A position is an index into the rank list of the mesh that everything was cut from. An axis of that mesh is one
// extent; an axis made by flattening others may need several, because the positions it visits need not be evenly
// spaced.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// `size` steps that are `stride` positions apart.
struct Extent {
  int64_t size = 1;
  int64_t stride = 0;
  bool operator==(const Extent&) const = default;
};

/// One axis. Extents run from the outermost to the innermost and are as few as possible, so two axes that visit the
/// same positions in the same order compare equal. An axis of size 1 has none.
class AxisLayout {
 public:
  AxisLayout() = default;
  explicit AxisLayout(const std::vector<Extent>& extents);

  int64_t size() const;
  const std::vector<Extent>& extents() const { return extents_; }
  /// The positions the axis visits from position 0, in axis order.
  std::vector<int64_t> positions() const;
  /// Extents come with falling strides, so positions() rises.
  bool is_sorted() const;
  /// "4", "(4, 1)" or "()": the strides, as Python prints them.
  std::string stride_text() const;

  bool operator==(const AxisLayout&) const = default;

 private:
  std::vector<Extent> extents_;
};

/// The axes of a mesh, outermost first.
class MeshLayout {
 public:
  explicit MeshLayout(std::vector<AxisLayout> axes) : axes_(std::move(axes)) {}
  /// The last axis is contiguous. REQUIRES: sizes of at least 1 whose product fits.
  static MeshLayout row_major(const std::vector<int64_t>& shape);

  int64_t ndim() const { return static_cast<int64_t>(axes_.size()); }
  int64_t size() const;
  std::vector<int64_t> shape() const;
  const std::vector<AxisLayout>& axes() const { return axes_; }
  /// All axes as one, in row-major order.
  AxisLayout flattened() const;
  /// Two coordinates share a position: the axes are not independent of each other.
  bool overlaps() const;

  bool operator==(const MeshLayout&) const = default;

 private:
  std::vector<AxisLayout> axes_;
};

/// The product of the sizes, -1 if one is below 1 or the product exceeds `limit`.
int64_t bounded_product(const std::vector<int64_t>& sizes, int64_t limit);

/// Divides positions 0 to count-1 into shifted copies of `axis`, by first position: for the rows of a 2 by 3 mesh 0 1 2
/// and 3 4 5, for its columns 0 3, 1 4 and 2 5. Throws std::invalid_argument if copies cannot cover them exactly.
std::vector<std::vector<int64_t>> tile(const AxisLayout& axis, int64_t count);

/// The same, with the rank of each position in its place.
std::vector<std::vector<int>> tile(const AxisLayout& axis, const std::vector<int>& ranks);

/// Coordinates of the `index`-th element of a row-major array.
std::vector<int> unravel(int64_t index, const std::vector<int64_t>& shape);

}  // namespace lockstep
