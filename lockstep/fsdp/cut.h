// How one tensor is divided among ranks along a dim: by the chunk rule, each as many indices as the first one until
// they run out. Internal to fsdp. Pure.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::detail {

class Cut {
 public:
  /// REQUIRES: 0 <= dim < sizes.size().
  Cut(std::vector<int64_t> sizes, int64_t dim, int64_t ranks);

  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t dim() const { return dim_; }
  int64_t ranks() const { return ranks_; }
  int64_t numel() const;
  /// First index of `rank`, and how many it has.
  int64_t begin(int64_t rank) const;
  int64_t count(int64_t rank) const;
  std::vector<int64_t> sizes_of(int64_t rank) const;
  /// Elements of the first rank's part, as many as every rank sends and receives.
  int64_t padded() const { return chunk_ * row_; }
  /// The parts, one behind the other, are the whole tensor: nothing has to be put in order.
  bool is_in_order() const { return ranks_ == 1 || before_ == 1; }
  /// Product of the sizes of the dims before the one that is cut.
  int64_t before() const { return before_; }

 private:
  std::vector<int64_t> sizes_;
  int64_t dim_;
  int64_t ranks_;
  int64_t chunk_;       // indices of the first rank
  int64_t row_ = 0;     // elements of one index
  int64_t before_ = 1;  // product of the sizes of the dims before
};

}  // namespace lockstep::detail
