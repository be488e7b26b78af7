// What must not leak from one test into the next: compile caches, counters, settings. Features register how to reset
// theirs; the harnesses call it before and after every test, and run_subtests() before every subtest.
#pragma once

#include <functional>

namespace lockstep::testing {

/// Registers `reset` while the object lives. Process-wide; called on every rank's thread, so it must be thread-safe.
class ResetHook {
 public:
  explicit ResetHook(std::function<void()> reset);
  ~ResetHook();
  ResetHook(const ResetHook&) = delete;
  ResetHook& operator=(const ResetHook&) = delete;

 private:
  const int id_;
};

/// Calls every registered hook, oldest first.
void reset_all();

}  // namespace lockstep::testing
