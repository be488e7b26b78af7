// Runs redistribute plans on local tensors. Autograd takes no notice of it, in either direction. Internal to dtensor
// and tp.
//
// `local` is this rank's part under `from`, in any strides; it is only read. The result is this rank's part under `to`:
// `local` itself where nothing has to be done, else contiguous memory of its own. Ranks outside of the mesh get an
// empty tensor and contact nobody.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "lockstep/comm/pending.h"
#include "lockstep/dtensor/redistribute_plan.h"

namespace lockstep::detail {

/// Blocking, and collective over the axes of the mesh that have to communicate. Refuses, before anything is sent and
/// alike on all ranks, what plan_redistribute() refuses and what is above a RedistributeLimit.
at::Tensor redistribute_local(const at::Tensor& local, const Layout& from, const Placements& to,
                              const PlanOptions& options = {});

/// A local tensor whose values are there after wait(). Dropping it neither waits nor cancels; the values may never come
/// then.
class PendingLocal {
 public:
  explicit PendingLocal(at::Tensor ready) : tensor_(std::move(ready)) {}
  PendingLocal(at::Tensor tensor, Pending pending, std::function<void()> finish)
      : tensor_(std::move(tensor)), pending_(std::move(pending)), finish_(std::move(finish)) {}

  /// Sizes, dtype and memory are final at once.
  const at::Tensor& tensor() const { return tensor_; }
  /// Blocks until the values are there, and returns tensor(). The first call takes the steps that follow the
  /// collective; a failed collective throws each time.
  const at::Tensor& wait();
  /// True if wait() would not block for the collective.
  bool is_completed() const { return pending_.is_completed(); }

 private:
  at::Tensor tensor_;
  Pending pending_;
  std::function<void()> finish_;
};

/// As redistribute_local(), but the last collective is only launched: `local` may be read until wait().
[[nodiscard]] PendingLocal launch_redistribute_local(const at::Tensor& local, const Layout& from, const Placements& to,
                                                     const PlanOptions& options = {});

}  // namespace lockstep::detail
