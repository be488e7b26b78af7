// Compiled where CMake found no CUDA headers.
#include <c10/util/Exception.h>

#include "lockstep/testing/delay.h"

namespace lockstep::testing::detail {

void cuda_sleep(std::chrono::milliseconds, c10::Device device) {
  TORCH_CHECK(false, "[lockstep/testing] cannot sleep on ", device.str(), ": this build has no CUDA headers");
}

}  // namespace lockstep::testing::detail
