// The last few things a rank did, kept as ready-made lines so that a signal handler can write them out. Part of every
// hang report.
#pragma once

#include <array>
#include <mutex>
#include <string>

#include "lockstep/base/observer.h"

namespace lockstep::testing {

class EventTail : public Observer {
 public:
  void on_event(const Event& event) override;
  /// One line per event, oldest first; "no collective yet" if there were none.
  std::string text() const;
  /// Writes the same to `fd`. Async-signal-safe; a line that is being written may come out torn.
  void write_to(int fd) const noexcept;

 private:
  static constexpr std::size_t kLines = 12;
  static constexpr std::size_t kLineBytes = 160;
  mutable std::mutex mutex_;
  std::array<std::array<char, kLineBytes>, kLines> lines_{};
  std::size_t count_ = 0;
};

}  // namespace lockstep::testing
