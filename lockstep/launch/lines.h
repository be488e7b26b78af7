// Cuts a stream of bytes into lines. Holds at most one unfinished line, of bounded length.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace lockstep {

class LineSplitter {
 public:
  using Sink = std::function<void(std::string_view line)>;

  /// A line longer than `max_line_bytes` is delivered in pieces of that size.
  explicit LineSplitter(std::size_t max_line_bytes) : max_line_bytes_(max_line_bytes) {}

  /// Delivers every line that `bytes` completes, without its newline.
  void add(std::string_view bytes, const Sink& sink);

  /// Delivers the unfinished last line, if there is one.
  void finish(const Sink& sink);

 private:
  const std::size_t max_line_bytes_;
  std::string unfinished_;
};

}  // namespace lockstep
