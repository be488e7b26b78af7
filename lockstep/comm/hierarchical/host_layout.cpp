#include "lockstep/comm/hierarchical/host_layout.h"

#include <algorithm>

namespace lockstep::detail {

HostLayout::HostLayout(const std::vector<std::string>& names) {
  std::vector<std::string> known;
  for (int rank = 0; rank < static_cast<int>(names.size()); ++rank) {
    const auto& name = names[static_cast<std::size_t>(rank)];
    const auto host = static_cast<std::size_t>(std::find(known.begin(), known.end(), name) - known.begin());
    if (host == known.size()) {
      known.push_back(name);
      ranks_on_.emplace_back();
    }
    host_of_.push_back(static_cast<int>(host));
    place_of_.push_back(static_cast<int>(ranks_on_[host].size()));
    ranks_on_[host].push_back(rank);
  }
}

int HostLayout::largest() const {
  std::size_t most = 0;
  for (const auto& ranks : ranks_on_) most = std::max(most, ranks.size());
  return static_cast<int>(most);
}

std::vector<int64_t> HostLayout::host_order() const {
  std::vector<int64_t> order;
  for (const auto& ranks : ranks_on_) order.insert(order.end(), ranks.begin(), ranks.end());
  return order;
}

}  // namespace lockstep::detail
