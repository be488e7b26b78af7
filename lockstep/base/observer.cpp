#include "lockstep/base/observer.h"

#include <algorithm>
#include <mutex>

#include "lockstep/base/rank_local.h"

namespace lockstep {

namespace detail {
std::atomic<int> observer_count = 0;
}

struct ObserverScope::PerRank {
  // Recursive: an observer may itself do something that is announced. Held while observers run, so that a scope that
  // ends on one thread never frees an observer another thread of the rank is calling.
  std::recursive_mutex mutex;
  std::vector<Observer*> observers;
  std::uint64_t next_order = 0;
};

ObserverScope::ObserverScope(Observer& observer) : rank_(rank_local<PerRank>()), observer_(&observer) {
  const std::lock_guard lock(rank_.mutex);
  rank_.observers.push_back(observer_);
  detail::observer_count.fetch_add(1);
}

ObserverScope::~ObserverScope() {
  const std::lock_guard lock(rank_.mutex);
  const auto last = std::find(rank_.observers.rbegin(), rank_.observers.rend(), observer_);
  rank_.observers.erase(std::next(last).base());
  detail::observer_count.fetch_sub(1);
}

void announce(Event event) {
  auto& rank = rank_local<ObserverScope::PerRank>();
  const std::lock_guard lock(rank.mutex);
  if (rank.observers.empty()) return;
  event.order = rank.next_order++;
  event.when = std::chrono::steady_clock::now();
  const auto observers = rank.observers;
  for (Observer* observer : observers) observer->on_event(event);
}

}  // namespace lockstep
