// Ready-made interposers: delay, fail, drop, change or check the collectives of the current rank, and the steps that
// units of fully_shard() take. Each lives as a scope:
//
//   const auto late = delay_calls(CallKind::kReduceScatterSingle, 50ms);
//   const auto broken = fail_step("reshard", 2, "out of memory");
//
// SharedScope is for what all ranks must have in place at the same time.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <string>

#include "lockstep/base/observer.h"
#include "lockstep/comm/interposer.h"

namespace lockstep::testing {

/// Sleeps before every call of `kind`: on the tensors' device for CUDA, in the caller otherwise.
[[nodiscard]] InterposerScope delay_calls(CallKind kind, std::chrono::milliseconds duration);

/// The n-th call of `kind` in this scope (0 is the first) throws c10::DistBackendError(message) instead of running.
[[nodiscard]] InterposerScope fail_call(CallKind kind, std::size_t n, const std::string& message);

/// Calls of `kind` do nothing and look finished, as if the library had forgotten them.
[[nodiscard]] InterposerScope drop_calls(CallKind kind);

/// Runs `instead` for calls of `kind`; it may call next(call) with a changed call.
[[nodiscard]] InterposerScope replace_calls(CallKind kind,
                                            std::function<Pending(const Call& call, const NextCall& next)> instead);

/// Calls of `kind` run, but look finished at once: nobody waits for them, as if the library had forgotten to.
[[nodiscard]] InterposerScope forget_waits(CallKind kind);

/// The same for steps, by what their events are called: "unshard", or "unshard(block0)" for those of one unit
/// (docs/testing.md lists them). Delays are on the device's stream for CUDA, in the caller otherwise.
[[nodiscard]] StepScope delay_steps(const std::string& name, std::chrono::milliseconds duration,
                                    c10::Device device = c10::kCPU);
/// Throws c10::Error(message) instead.
[[nodiscard]] StepScope fail_step(const std::string& name, std::size_t n, const std::string& message);
[[nodiscard]] StepScope drop_steps(const std::string& name);
[[nodiscard]] StepScope replace_steps(const std::string& name, StepInterposer instead);

/// Shows `check` the output of every reduce-scatter before it runs: dtype, size and device can be asserted. A call
/// without an output is an error.
[[nodiscard]] InterposerScope reduce_scatter_with_assert(std::function<void(const at::Tensor& output)> check);

/// Takes a barrier over `group` in its constructor and in its destructor: declared after the interposer that all ranks
/// share, it keeps any rank from running with it while another runs without. Collective. While an exception unwinds
/// there is no barrier: the other ranks may never come to theirs.
class SharedScope {
 public:
  explicit SharedScope(GroupPtr group);
  ~SharedScope() noexcept(false);
  SharedScope(const SharedScope&) = delete;
  SharedScope& operator=(const SharedScope&) = delete;

 private:
  const GroupPtr group_;
  const int exceptions_at_start_;
};

}  // namespace lockstep::testing
