// How one tensor is divided among ranks along a dim: by the chunk rule, each as many indices as the first one until
// they run out; or raggedly, as many as are given for each. Internal to fsdp. Pure.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::detail {

class Cut {
 public:
  /// REQUIRES: 0 <= dim < sizes.size().
  Cut(std::vector<int64_t> sizes, int64_t dim, int64_t ranks);
  /// REQUIRES: dim 0, one count for each rank, together the size of the dim.
  Cut(std::vector<int64_t> sizes, const std::vector<int64_t>& counts);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t dim() const { return dim_; }
  int64_t ranks() const { return ranks_; }
  int64_t numel() const;
  /// First index of `rank`, and how many it has.
  int64_t begin(int64_t rank) const;
  int64_t count(int64_t rank) const;
  std::vector<int64_t> sizes_of(int64_t rank) const;
  /// Elements of one index.
  int64_t row() const { return row_; }
  /// Elements of the largest part, as many as every rank sends and receives.
  int64_t padded() const { return chunk_ * row_; }
  /// The parts, one behind the other, are the whole tensor: nothing has to be put in order.
  bool is_in_order() const { return ranks_ == 1 || (before_ == 1 && !is_ragged()); }
  /// Not by the chunk rule.
  bool is_ragged() const { return !begins_.empty(); }
  /// Product of the sizes of the dims before the one that is cut.
  int64_t before() const { return before_; }

 private:
  std::vector<int64_t> sizes_;
  int64_t dim_;
  int64_t ranks_;
  int64_t chunk_;                     // indices of the rank that has most
  int64_t row_ = 0;                   // elements of one index
  int64_t before_ = 1;                // product of the sizes of the dims before
  std::vector<int64_t> begins_ = {};  // of each rank and the end, if it is ragged
};

}  // namespace lockstep::detail
