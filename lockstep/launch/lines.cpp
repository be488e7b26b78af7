#include "lockstep/launch/lines.h"

namespace lockstep {

void LineSplitter::add(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    const std::size_t newline = bytes.find('\n');
    const bool line_ends = newline != std::string_view::npos;
    const std::string_view part = bytes.substr(0, newline);
    const std::size_t room = max_line_bytes_ - unfinished_.size();
    if (part.size() > room) {
      unfinished_.append(part.substr(0, room));
      bytes.remove_prefix(room);
      finish(sink);
      continue;
    }
    bytes.remove_prefix(part.size() + (line_ends ? 1 : 0));
    if (line_ends && unfinished_.empty()) {
      sink(part);
      continue;
    }
    unfinished_.append(part);
    if (!line_ends) return;
    sink(unfinished_);
    unfinished_.clear();
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (unfinished_.empty()) return;
  sink(unfinished_);
  unfinished_.clear();
}

}  // namespace lockstep
