#include "lockstep/zero/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace lockstep {

std::size_t least_loaded(const std::vector<int64_t>& loads, const std::vector<bool>& barred) {
  std::size_t best = loads.size();
  for (std::size_t i = 0; i < loads.size(); ++i) {
    if (!barred.empty() && barred[i]) continue;
    if (best == loads.size() || loads[i] < loads[best]) best = i;
  }
  TORCH_CHECK(best < loads.size(), "[lockstep/zero] all of the ", loads.size(),
              " ranks are barred from taking a shard. At least one must be left.");
  return best;
}

PositionsPerRank partition_by_size(const std::vector<std::vector<int64_t>>& sizes_per_group, int world_size) {
  PositionsPerRank result(world_size, std::vector<std::vector<std::size_t>>(sizes_per_group.size()));
  std::vector<int64_t> loads(world_size, 0);
  for (std::size_t group = 0; group < sizes_per_group.size(); ++group) {
    const auto& sizes = sizes_per_group[group];
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return sizes[a] > sizes[b]; });
    for (const auto position : order) {
      const auto rank = least_loaded(loads);
      result[rank][group].push_back(position);
      loads[rank] += sizes[position];
    }
  }
  return result;
}

}  // namespace lockstep
