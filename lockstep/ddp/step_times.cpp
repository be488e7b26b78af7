#include "lockstep/ddp/step_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace lockstep::detail {

void StepTimes::record(Mark mark) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Point point{.host_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), .event = std::nullopt};
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    point.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    point.event->record(guard.getStream(device_));
  }
  points_[static_cast<std::size_t>(mark)] = std::move(point);
}

void StepTimes::clear() {
  for (auto& point : points_) point.reset();
}

std::optional<std::int64_t> StepTimes::stamp(Mark mark) const {
  const auto& point = points_[static_cast<std::size_t>(mark)];
  return point ? std::optional(point->host_ns) : std::nullopt;
}

std::optional<std::int64_t> StepTimes::between(Mark start, Mark end) const {
  const auto& from = points_[static_cast<std::size_t>(start)];
  const auto& to = points_[static_cast<std::size_t>(end)];
  if (!from || !to) return std::nullopt;
  if (!from->event || !to->event) return to->host_ns - from->host_ns;
  to->event->synchronize();
  return static_cast<std::int64_t>(from->event->elapsedTime(*to->event) * 1e6);
}

}  // namespace lockstep::detail
