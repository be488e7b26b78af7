// When the parts of a training step happened, by the host's clock and, for devices that run behind it, by their events.
// Internal to ddp.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>

namespace lockstep::detail {

class StepTimes {
 public:
  enum class Mark : std::uint8_t {
    kForwardStart,
    kBackwardComputeStart,
    kBackwardComputeEnd,
    kBackwardCommStart,
    kBackwardCommEnd,
  };

  explicit StepTimes(c10::Device device) : device_(device) {}

  void record(Mark mark);
  void clear();
  /// By the host's clock, in nanoseconds; none if it was not recorded.
  std::optional<std::int64_t> stamp(Mark mark) const;
  /// In nanoseconds; none if one was not recorded, or if the device cannot say.
  std::optional<std::int64_t> between(Mark start, Mark end) const;

 private:
  struct Point {
    std::int64_t host_ns = 0;
    std::optional<c10::Event> event;
  };
  const c10::Device device_;
  std::array<std::optional<Point>, 5> points_;
};

}  // namespace lockstep::detail
