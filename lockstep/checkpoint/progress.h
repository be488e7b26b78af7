// How far a save or a load has come.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace lockstep {

/// Bytes of this rank.
struct ByteProgress {
  std::string what = "";  // "saving run/step-100"
  int64_t bytes = 0;
  int64_t total = 0;
  double bytes_per_second = 0;
};
using ProgressFunction = std::function<void(const ByteProgress&)>;

namespace detail {

/// Tells a function how many bytes are done, some ten times a second and at the end; without one, draws a line where
/// stderr is a terminal.
class ProgressTeller {
 public:
  ProgressTeller(std::string what, int64_t total, ProgressFunction function);
  ~ProgressTeller();
  ProgressTeller(const ProgressTeller&) = delete;
  ProgressTeller& operator=(const ProgressTeller&) = delete;

  void add(int64_t bytes);
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void tell();

  ByteProgress progress_;
  const ProgressFunction function_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  bool is_drawn_ = false;
};

/// "saving run/step-100  [####      ]  312 of 500 MB, 1.20 GB/s".
std::string progress_line(const ByteProgress& progress);

}  // namespace detail
}  // namespace lockstep
