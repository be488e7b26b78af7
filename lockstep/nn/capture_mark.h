// Whether this thread records a forward instead of running it: what no recording can hold asks, and refuses by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// A region of a forward that is more than its operators, such as a checkpoint: its body, from what it takes from
/// outside to what it gives back, and how that is run.
using RegionBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
using RegionRun = std::function<std::vector<at::Tensor>(const RegionBody& body, const std::vector<at::Tensor>& inputs)>;

/// Who records this thread's forward.
class RegionRecorder {
 public:
  virtual ~RegionRecorder() = default;
  /// Throws if a region of this kind is not recorded. Where it begins, for end_region().
  virtual std::size_t begin_region(const std::string& what) = 0;
  /// What was recorded since becomes one node, which gives `outputs` back.
  virtual void end_region(std::size_t begin, const std::string& what, const std::vector<at::Tensor>& outputs,
                          RegionRun run) = 0;
};

namespace detail {
inline thread_local int captures_under_way = 0;
inline thread_local RegionRecorder* region_recorder = nullptr;
}  // namespace detail

/// True on a thread whose forward is being captured: its tensors have sizes and no elements.
inline bool is_capturing() {
  return detail::captures_under_way > 0;
}

/// Null unless the thread's forward is being captured.
inline RegionRecorder* region_recorder() {
  return detail::region_recorder;
}

/// A capture, until the end of the scope.
class CaptureMark {
 public:
  explicit CaptureMark(RegionRecorder& recorder) : outer_(detail::region_recorder) {
    ++detail::captures_under_way;
    detail::region_recorder = &recorder;
  }
  ~CaptureMark() {
    --detail::captures_under_way;
    detail::region_recorder = outer_;
  }
  CaptureMark(const CaptureMark&) = delete;
  CaptureMark& operator=(const CaptureMark&) = delete;

 private:
  RegionRecorder* const outer_;
};

inline void check_not_capturing(const char* what) {
  TORCH_CHECK(
      !is_capturing(), "[lockstep/graph] capture: the forward uses ", what,
      ", which a captured graph does not hold. Put it around the compiled module, or compile what is inside of ",
      "it.");
}

}  // namespace lockstep
