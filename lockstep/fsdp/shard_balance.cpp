#include "lockstep/fsdp/shard_balance.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace lockstep {

std::vector<int64_t> ShardBalance::divide(int64_t rows, int64_t row_bytes, int64_t ranks) {
  const auto size = static_cast<std::size_t>(ranks);
  if (bytes_.empty()) bytes_.resize(size);
  TORCH_CHECK(bytes_.size() == size, "[lockstep/fsdp] a ShardBalance that has divided among ", bytes_.size(),
              " ranks is to divide among ", ranks, ". Make one for each mesh.");
  std::vector<std::size_t> poorest(size);
  std::iota(poorest.begin(), poorest.end(), std::size_t{0});
  std::stable_sort(poorest.begin(), poorest.end(), [&](auto one, auto other) { return bytes_[one] < bytes_[other]; });
  std::vector<int64_t> counts(size, rows / ranks);
  for (int64_t i = 0; i < rows % ranks; ++i) ++counts[poorest[static_cast<std::size_t>(i)]];
  for (std::size_t i = 0; i < size; ++i) bytes_[i] += counts[i] * row_bytes;
  return counts;
}

}  // namespace lockstep
