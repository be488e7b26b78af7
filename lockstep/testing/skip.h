// Skipping, with a reason and an exit code, alike on all ranks. Call these at the top of a body, before any
// communication.
#pragma once

#include <exception>
#include <string>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

/// Exit codes of ranks that are processes. The parent knows them by these numbers.
enum class SkipCode : int {
  kBackendMissing = 72,
  kSmallWorld = 73,
  kOddWorld = 74,
  kNoAccelerator = 75,
  kFewDevices = 76,
  kFeatureMissing = 77,
};
/// Exit code of a rank that failed with an exception.
inline constexpr int kFailedExitCode = 10;

/// Thrown to skip. Not a std::exception on purpose: code that handles errors must not swallow it.
struct Skip {
  SkipCode code;
  std::string reason;
};

/// GPUs of this machine.
int device_count();

void skip_unless_backend(const std::string& name);
void skip_if_fewer_devices_than(int count);
void skip_if_world_smaller_than(const World& world, int size);
void skip_if_world_is_odd(const World& world);
void skip_unless_accelerator();
/// For what this build or machine lacks; `name` is shown.
void skip_unless_feature(bool is_present, const std::string& name);

/// True for the codes above.
bool is_skip_code(int exit_code);

}  // namespace lockstep::testing
