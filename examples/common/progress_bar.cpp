#include "examples/common/progress_bar.h"

#include <unistd.h>

#include <array>
#include <cstdio>

namespace lockstep::examples {
namespace {

constexpr int64_t kLines = 20;
constexpr int64_t kWidth = 20;

}  // namespace

std::string describe(const Progress& progress) {
  const auto full = static_cast<std::size_t>(kWidth * progress.step / progress.steps);
  const auto bar = std::string(full, '#') + std::string(kWidth - full, '.');
  std::array<char, 200> text{};
  auto size = std::snprintf(text.data(), text.size(), "step %4lld/%lld [%s] loss %.3f  %.0f tokens/s",
                            static_cast<long long>(progress.step), static_cast<long long>(progress.steps), bar.c_str(),
                            progress.loss, progress.tokens_per_second);
  std::string line(text.data(), static_cast<std::size_t>(size));
  if (!progress.hidden) return line;
  size = std::snprintf(text.data(), text.size(), "  %.0f%% hidden", 100 * *progress.hidden);
  return line.append(text.data(), static_cast<std::size_t>(size));
}

ProgressBar::ProgressBar(const std::string& style) : style_(style) {
  if (style_ == "auto") style_ = ::isatty(STDOUT_FILENO) == 1 ? "bar" : "lines";
}

void ProgressBar::show(const Progress& progress) {
  if (style_ == "none") return;
  if (style_ == "lines") {
    const auto way = kLines * progress.step / progress.steps;
    if (way < next_line_) return;
    next_line_ = way + 1;
  }
  // Whole lines only, for launchers pass on nothing less: going up one line draws over the last one.
  const char* over_the_last = style_ == "bar" && has_drawn_ ? "\033[1A\r\033[2K" : "";
  std::printf("%s%s\n", over_the_last, describe(progress).c_str());
  std::fflush(stdout);
  has_drawn_ = true;
}

}  // namespace lockstep::examples
