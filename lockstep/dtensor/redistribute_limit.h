// A bound on what one redistribution may bring to a rank: against the full gather that nobody meant.
#pragma once

#include <cstdint>
#include <list>

namespace lockstep {

namespace detail {
struct RedistributeLimits;
}

/// While it lives, a redistribution in which some rank would receive more than `bytes` is refused on all ranks, before
/// anything is sent, by an error that prints its plan. Per rank: give all ranks the same. Scopes nest; the lowest
/// counts. Local.
class RedistributeLimit {
 public:
  explicit RedistributeLimit(int64_t bytes);
  ~RedistributeLimit();
  RedistributeLimit(const RedistributeLimit&) = delete;
  RedistributeLimit& operator=(const RedistributeLimit&) = delete;

 private:
  detail::RedistributeLimits& limits_;
  std::list<int64_t>::iterator mine_;
};

}  // namespace lockstep
