#include "lockstep/testing/event_tail.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "lockstep/base/str.h"

namespace lockstep::testing {
namespace {
constexpr char kNothing[] = "  no collective yet\n";
}

void EventTail::on_event(const Event& event) {
  const auto text =
      str("  event ", event.order, ": ", event.state, " ", event.kind, event.unit.empty() ? "" : " of ", event.unit,
          ", ", event.bytes, " bytes ", event.dtype, ", group '", event.group, "' of ", event.group_size);
  const std::lock_guard lock(mutex_);
  auto& line = lines_[count_ % kLines];
  std::snprintf(line.data(), line.size() - 1, "%s", text.c_str());
  std::strcat(line.data(), "\n");
  ++count_;
}

std::string EventTail::text() const {
  const std::lock_guard lock(mutex_);
  if (count_ == 0) return kNothing;
  std::string all;
  for (std::size_t i = count_ - std::min(count_, kLines); i < count_; ++i) all += lines_[i % kLines].data();
  return all;
}

void EventTail::write_to(int fd) const noexcept {
  const auto put = [fd](const char* text) {
    [[maybe_unused]] const auto written = ::write(fd, text, std::strlen(text));
  };
  if (count_ == 0) put(kNothing);
  for (std::size_t i = count_ - std::min(count_, kLines); i < count_; ++i) put(lines_[i % kLines].data());
}

}  // namespace lockstep::testing
