// Keeps libtorch's CPU kernels from starting threads. Internal to optim.
#pragma once

namespace lockstep::optim::detail {

/// While it lives, kernels that this thread calls use this thread only, if `is_wanted`. The fused optimizer kernels
/// start threads for each tensor of a list, however small, which takes ten times as long as the work on a small one.
/// Has no effect where libtorch does not use OpenMP.
class OneThread {
 public:
  explicit OneThread(bool is_wanted);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_before_ = 1;
};

}  // namespace lockstep::optim::detail
