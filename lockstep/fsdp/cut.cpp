#include "lockstep/fsdp/cut.h"

#include <algorithm>
#include <utility>

namespace lockstep::detail {

Cut::Cut(std::vector<int64_t> sizes, int64_t dim, int64_t ranks) : sizes_(std::move(sizes)), dim_(dim), ranks_(ranks) {
  const auto indices = sizes_[static_cast<std::size_t>(dim)];
  chunk_ = (indices + ranks - 1) / ranks;
  if (indices > 0) row_ = numel() / indices;
  for (int64_t i = 0; i < dim; ++i) before_ *= sizes_[static_cast<std::size_t>(i)];
}

Cut::Cut(std::vector<int64_t> sizes, const std::vector<int64_t>& counts)
    : Cut(std::move(sizes), 0, static_cast<int64_t>(counts.size())) {
  std::vector<int64_t> begins{0};
  for (const auto each : counts) begins.push_back(begins.back() + each);
  bool is_by_chunks = true;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    is_by_chunks = is_by_chunks && begin(rank) == begins[static_cast<std::size_t>(rank)];
  }
  if (is_by_chunks) return;
  begins_ = std::move(begins);
  chunk_ = *std::max_element(counts.begin(), counts.end());
}

int64_t Cut::numel() const {
  int64_t elements = 1;
  for (const auto size : sizes_) elements *= size;
  return elements;
}

int64_t Cut::begin(int64_t rank) const {
  if (is_ragged()) return begins_[static_cast<std::size_t>(rank)];
  return std::min(rank * chunk_, sizes_[static_cast<std::size_t>(dim_)]);
}

int64_t Cut::count(int64_t rank) const {
  return begin(rank + 1) - begin(rank);
}

std::vector<int64_t> Cut::sizes_of(int64_t rank) const {
  auto sizes = sizes_;
  sizes[static_cast<std::size_t>(dim_)] = count(rank);
  return sizes;
}

}  // namespace lockstep::detail
