// What a unit does, step by step, as events for tests and traces: docs/testing.md lists them. Internal to fsdp. A step
// nobody looks at costs one relaxed load.
#pragma once

#include <utility>

#include "lockstep/base/observer.h"

namespace lockstep::detail {

/// Where a training step is.
enum class Pass { kNone, kForward, kBackward };

inline const char* name_of(Pass pass) {
  return pass == Pass::kForward ? "forward" : pass == Pass::kBackward ? "backward" : "idle";
}

/// Takes a step of `subject`, a Unit or a ParameterGroup, whose describe() is an Event without kind and state.
template <class Subject, class Action>
void take_step(const Subject& subject, Pass pass, const char* kind, const Action& action) {
  if (!is_observed()) return action();
  auto event = subject.describe();
  event.kind = kind;
  event.state = name_of(pass);
  run_step(std::move(event), action);
}

}  // namespace lockstep::detail
