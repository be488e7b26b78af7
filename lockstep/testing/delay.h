// Sleeping where the work is: on the device's current stream for CUDA, so that the host runs ahead as it does in real
// training.
#pragma once

#include <c10/core/Device.h>

#include <chrono>

namespace lockstep::testing {

/// CUDA: enqueues a kernel that takes `duration`, cycles per millisecond being measured once per device (10 runs, the
/// two highest and two lowest dropped). CPU: blocks.
void device_sleep(std::chrono::milliseconds duration, c10::Device device);

namespace detail {
/// In a file CMake chooses: refuses where the build has no CUDA headers.
void cuda_sleep(std::chrono::milliseconds duration, c10::Device device);
}  // namespace detail

}  // namespace lockstep::testing
