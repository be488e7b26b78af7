// Which ranks of a group share a host. Pure: a function of what each rank calls its host. Internal to comm.
//
// Hosts are numbered by their first rank; the ranks of a host keep the group's order, need not follow each other, and
// the first of them is the host's *leader*. *Host order* is all ranks host after host.
#pragma once

#include <string>
#include <vector>

namespace lockstep::detail {

class HostLayout {
 public:
  /// `names[r]`: what rank r calls its host.
  explicit HostLayout(const std::vector<std::string>& names);

  int ranks() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_on_.size()); }
  const std::vector<int>& ranks_on(int host) const { return ranks_on_.at(static_cast<std::size_t>(host)); }
  int host_of(int rank) const { return host_of_.at(static_cast<std::size_t>(rank)); }
  /// The rank's number among those of its host: 0 for the leader.
  int place_of(int rank) const { return place_of_.at(static_cast<std::size_t>(rank)); }
  /// Ranks of the host that has most.
  int largest() const;

  /// The ranks in host order.
  std::vector<int64_t> host_order() const;

 private:
  std::vector<std::vector<int>> ranks_on_;
  std::vector<int> host_of_;
  std::vector<int> place_of_;
};

}  // namespace lockstep::detail
