#include "lockstep/testing/interpose.h"

#include <exception>
#include <memory>

#include "lockstep/comm/barrier.h"
#include "lockstep/testing/delay.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::testing {

InterposerScope replace_calls(CallKind kind, std::function<Pending(const Call& call, const NextCall& next)> instead) {
  return InterposerScope([kind, instead = std::move(instead)](const Call& call, const GroupPtr&, const NextCall& next) {
    return call.kind == kind ? instead(call, next) : next(call);
  });
}

InterposerScope delay_calls(CallKind kind, std::chrono::milliseconds duration) {
  return replace_calls(kind, [duration](const Call& call, const NextCall& next) {
    device_sleep(duration, call.inputs.empty() ? at::Device(at::kCPU) : call.inputs[0].device());
    return next(call);
  });
}

InterposerScope fail_call(CallKind kind, std::size_t n, const std::string& message) {
  return replace_calls(kind,
                       [seen = std::make_shared<std::size_t>(0), n, message](const Call& call, const NextCall& next) {
                         if ((*seen)++ == n) throw c10::DistBackendError(message);
                         return next(call);
                       });
}

InterposerScope drop_calls(CallKind kind) {
  return replace_calls(kind, [](const Call&, const NextCall&) { return Pending(); });
}

InterposerScope forget_waits(CallKind kind) {
  return replace_calls(kind, [](const Call& call, const NextCall& next) {
    static_cast<void>(next(call));
    return Pending();
  });
}

StepScope replace_steps(const std::string& name, StepInterposer instead) {
  return StepScope([name, instead = std::move(instead)](const Event& step, const std::function<void()>& next) {
    is_named(step, name) ? instead(step, next) : next();
  });
}

StepScope delay_steps(const std::string& name, std::chrono::milliseconds duration, c10::Device device) {
  return replace_steps(name, [duration, device](const Event& /*step*/, const std::function<void()>& next) {
    device_sleep(duration, device);
    next();
  });
}

StepScope fail_step(const std::string& name, std::size_t n, const std::string& message) {
  return replace_steps(name, [seen = std::make_shared<std::size_t>(0), n, message](const Event& /*step*/,
                                                                                   const std::function<void()>& next) {
    TORCH_CHECK((*seen)++ != n, message);
    next();
  });
}

StepScope drop_steps(const std::string& name) {
  return replace_steps(name, [](const Event& /*step*/, const std::function<void()>& /*next*/) {});
}

InterposerScope reduce_scatter_with_assert(std::function<void(const at::Tensor& output)> check) {
  return InterposerScope([check = std::move(check)](const Call& call, const GroupPtr&, const NextCall& next) {
    if (call.kind == CallKind::kReduceScatter || call.kind == CallKind::kReduceScatterSingle) {
      TORCH_CHECK(!call.outputs.empty(), "[lockstep/testing] ", call.describe(), " has no output to check");
      for (const auto& output : call.outputs) check(output);
    }
    return next(call);
  });
}

SharedScope::SharedScope(GroupPtr group) : group_(std::move(group)), exceptions_at_start_(std::uncaught_exceptions()) {
  barrier(group_);
}

SharedScope::~SharedScope() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_at_start_) barrier(group_);
}

}  // namespace lockstep::testing
