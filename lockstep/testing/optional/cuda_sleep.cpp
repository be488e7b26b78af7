// Compiled where CMake found CUDA headers.
#include <ATen/cuda/Sleep.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>

#include "lockstep/testing/delay.h"

namespace lockstep::testing::detail {
namespace {

constexpr int64_t kProbeCycles = 1'000'000;

double measure_cycles_per_ms(c10::Device device) {
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  std::array<double, 10> runs{};
  for (auto& run : runs) {
    c10::Event start(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    start.record(stream);
    at::cuda::sleep(kProbeCycles);
    end.record(stream);
    end.synchronize();
    run = start.elapsedTime(end);
  }
  std::sort(runs.begin(), runs.end());
  const double mean = std::accumulate(runs.begin() + 2, runs.end() - 2, 0.0) / (runs.size() - 4);
  return kProbeCycles / mean;
}

double cycles_per_ms(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, double> cache;
  const std::lock_guard lock(mutex);
  auto& cached = cache[device.index()];
  if (cached == 0) cached = measure_cycles_per_ms(device);
  return cached;
}

}  // namespace

void cuda_sleep(std::chrono::milliseconds duration, c10::Device device) {
  const c10::DeviceGuard guard(device);
  at::cuda::sleep(static_cast<int64_t>(cycles_per_ms(device) * static_cast<double>(duration.count())));
}

}  // namespace lockstep::testing::detail
