// Whether this thread records a forward instead of running it: what no recording can hold asks, and refuses by name.
#pragma once

#include <c10/util/Exception.h>

namespace lockstep {

namespace detail {
inline thread_local int captures_under_way = 0;
}

/// True on a thread whose forward is being captured: its tensors have sizes and no elements.
inline bool is_capturing() {
  return detail::captures_under_way > 0;
}

/// A capture, until the end of the scope.
class CaptureMark {
 public:
  CaptureMark() { ++detail::captures_under_way; }
  ~CaptureMark() { --detail::captures_under_way; }
  CaptureMark(const CaptureMark&) = delete;
  CaptureMark& operator=(const CaptureMark&) = delete;
};

inline void check_not_capturing(const char* what) {
  TORCH_CHECK(
      !is_capturing(), "[lockstep/graph] capture: the forward uses ", what,
      ", which a captured graph does not hold. Put it around the compiled module, or compile what is inside of ",
      "it.");
}

}  // namespace lockstep
