#include "lockstep/checkpoint/progress.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace lockstep::detail {
namespace {

constexpr auto kBetween = std::chrono::milliseconds(100);
constexpr int kBarWidth = 24;
constexpr double kMega = 1e6;
constexpr double kGiga = 1e9;

}  // namespace

std::string progress_line(const ByteProgress& progress) {
  const double share =
      progress.total > 0 ? static_cast<double>(progress.bytes) / static_cast<double>(progress.total) : 1;
  const auto filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * kBarWidth);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, ' ');
  std::array<char, 128> text = {};
  std::snprintf(text.data(), text.size(), "  [%s]  %.0f of %.0f MB, %.2f GB/s", bar.c_str(),
                static_cast<double>(progress.bytes) / kMega, static_cast<double>(progress.total) / kMega,
                progress.bytes_per_second / kGiga);
  return progress.what + text.data();
}

ProgressTeller::ProgressTeller(std::string what, int64_t total, ProgressFunction function)
    : progress_{.what = std::move(what), .total = total}, function_(std::move(function)) {}

ProgressTeller::~ProgressTeller() {
  if (is_drawn_) std::fprintf(stderr, "\r\033[K");
}

void ProgressTeller::add(int64_t bytes) {
  progress_.bytes += bytes;
  const auto now = Clock::now();
  if (now - last_ < kBetween) return;
  last_ = now;
  tell();
}

void ProgressTeller::finish() {
  if (function_ || is_drawn_) tell();
}

void ProgressTeller::tell() {
  const std::chrono::duration<double> took = Clock::now() - start_;
  progress_.bytes_per_second = static_cast<double>(progress_.bytes) / std::max(took.count(), 1e-9);
  if (function_) return function_(progress_);
  static const bool is_terminal = ::isatty(STDERR_FILENO) == 1;
  if (!is_terminal) return;
  std::fprintf(stderr, "\r\033[K%s", progress_line(progress_).c_str());
  is_drawn_ = true;
}

}  // namespace lockstep::detail
