#include "lockstep/testing/delay.h"

#include <thread>

namespace lockstep::testing {

void device_sleep(std::chrono::milliseconds duration, c10::Device device) {
  if (duration.count() == 0) return;
  if (device.is_cuda()) {
    detail::cuda_sleep(duration, device);
  } else {
    std::this_thread::sleep_for(duration);
  }
}

}  // namespace lockstep::testing
