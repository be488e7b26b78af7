#include "lockstep/testing/skip.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/backend_registry.h"

namespace lockstep::testing {

int device_count() {
  return gpu_count();
}

void skip_unless_backend(const std::string& name) {
  if (!is_backend_registered(name)) throw Skip{SkipCode::kBackendMissing, str("backend '", name, "' is not built in")};
}

void skip_if_fewer_devices_than(int count) {
  const int found = device_count();
  if (found < count) throw Skip{SkipCode::kFewDevices, str("needs ", count, " GPUs, found ", found)};
}

void skip_if_world_smaller_than(const World& world, int size) {
  if (world.world_size() < size) {
    throw Skip{SkipCode::kSmallWorld, str("needs ", size, " ranks, the world has ", world.world_size())};
  }
}

void skip_if_world_is_odd(const World& world) {
  if (world.world_size() % 2 != 0) {
    throw Skip{SkipCode::kOddWorld, str("needs an even number of ranks, the world has ", world.world_size())};
  }
}

void skip_unless_accelerator() {
  if (device_count() == 0) throw Skip{SkipCode::kNoAccelerator, "needs a GPU"};
}

void skip_unless_feature(bool is_present, const std::string& name) {
  if (!is_present) throw Skip{SkipCode::kFeatureMissing, str("needs ", name)};
}

bool is_skip_code(int exit_code) {
  return exit_code >= static_cast<int>(SkipCode::kBackendMissing) &&
         exit_code <= static_cast<int>(SkipCode::kFeatureMissing);
}

}  // namespace lockstep::testing
