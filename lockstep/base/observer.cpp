#include "lockstep/base/observer.h"

#include <algorithm>
#include <mutex>

#include "lockstep/base/rank_local.h"

namespace lockstep {

namespace detail {

std::atomic<int> observer_count = 0;

struct RankObservers {
  // Recursive: an observer may itself do something that is announced. Held while observers run, so that a scope that
  // ends on one thread never frees an observer another thread of the rank is calling.
  std::recursive_mutex mutex;
  std::vector<Observer*> observers;
  std::vector<std::shared_ptr<const StepInterposer>> interposers;
  std::uint64_t next_order = 0;
};

}  // namespace detail

ObserverScope::ObserverScope(Observer& observer) : rank_(rank_local<detail::RankObservers>()), observer_(&observer) {
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

StepScope::StepScope(StepInterposer interposer)
    : rank_(rank_local<detail::RankObservers>()),
      interposer_(std::make_shared<const StepInterposer>(std::move(interposer))) {
  const std::lock_guard lock(rank_.mutex);
  rank_.interposers.push_back(interposer_);
  detail::observer_count.fetch_add(1);
}

StepScope::~StepScope() {
  const std::lock_guard lock(rank_.mutex);
  std::erase(rank_.interposers, interposer_);
  detail::observer_count.fetch_sub(1);
}

namespace {

void publish(detail::RankObservers& rank, Event& event) {
  event.order = rank.next_order++;
  event.when = std::chrono::steady_clock::now();
  const auto observers = rank.observers;
  for (Observer* observer : observers) observer->on_event(event);
}

/// Innermost first: each gets a `next` that runs the remaining ones.
void run_through(const std::vector<std::shared_ptr<const StepInterposer>>& interposers, std::size_t left,
                 const Event& event, const std::function<void()>& step) {
  if (left == 0) return step();
  (*interposers[left - 1])(event, [&] { run_through(interposers, left - 1, event, step); });
}

}  // namespace

void announce(Event event) {
  auto& rank = rank_local<detail::RankObservers>();
  const std::lock_guard lock(rank.mutex);
  if (!rank.observers.empty()) publish(rank, event);
}

void run_step(Event event, const std::function<void()>& step) {
  auto& rank = rank_local<detail::RankObservers>();
  std::vector<std::shared_ptr<const StepInterposer>> interposers;
  {
    const std::lock_guard lock(rank.mutex);
    publish(rank, event);
    interposers = rank.interposers;
  }
  // Without the lock: a step may wait for what another thread of the rank announces.
  run_through(interposers, interposers.size(), event, step);
}

}  // namespace lockstep
