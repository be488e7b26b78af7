#include "benchmarks/collectives/rank.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>

#include "benchmarks/collectives/contender.h"
#include "benchmarks/collectives/memory_stream.h"
#include "benchmarks/collectives/samples_line.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/launch/launch_environment.h"

namespace lockstep::bench {
namespace {

// mpi_collectives.c has the same.
constexpr double kSampleSeconds = 0.002;
constexpr int64_t kMostCalls = 20000;
constexpr int64_t kFewestSamples = 2;
constexpr int64_t kMostSamples = 15;
constexpr int64_t kUncachedBytes = 128 << 20;

/// Seconds that `calls` calls take on this rank. Unless the tensors exceed any cache, a call before them is not timed:
/// it warms the caches and lets the ranks start together.
double time_calls(const Contender& contender, int64_t calls, const GroupPtr& group) {
  group->getBackend(at::kCPU)->barrier()->wait();
  if (contender.bytes < kUncachedBytes) contender.call();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) contender.call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct SampleSize {
  int64_t calls = 1;
  double seconds = 0;
};

/// How many calls one sample needs to be long enough. Rank 0 decides for all.
SampleSize choose_sample_size(const Contender& contender, const GroupPtr& group) {
  SampleSize size;
  while (true) {
    const auto seconds = at::full({1}, time_calls(contender, size.calls, group), at::kDouble);
    broadcast(seconds, 0, group);
    size.seconds = seconds.item<double>();
    if (size.seconds >= kSampleSeconds || size.calls == kMostCalls) return size;
    const double growth = std::clamp(1.2 * kSampleSeconds / size.seconds, 2.0, 20.0);
    size.calls = std::min(static_cast<int64_t>(static_cast<double>(size.calls) * growth), kMostCalls);
  }
}

/// The contenders take turns, sample by sample. A sample is the slowest rank's time, divided by its calls.
void measure(const std::vector<Contender>& contenders, Operation operation, int64_t bytes, double seconds,
             const World& world) {
  std::vector<int64_t> calls;
  double turn_seconds = 0;
  for (const auto& contender : contenders) {
    const auto size = choose_sample_size(contender, world.group());
    calls.push_back(size.calls);
    turn_seconds += size.seconds * (1 + 1.0 / static_cast<double>(size.calls));
  }
  const auto count = std::clamp(static_cast<int64_t>(seconds / turn_seconds), kFewestSamples, kMostSamples);
  const auto times = at::empty({static_cast<int64_t>(contenders.size()), count}, at::kDouble);
  for (int64_t sample = 0; sample < count; ++sample) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      const double taken = time_calls(contenders[i], calls[i], world.group());
      times[static_cast<int64_t>(i)][sample] = taken / static_cast<double>(calls[i]);
    }
  }
  all_reduce(times, world.group(), ReduceOp::MAX);
  if (world.rank() != 0) return;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    const double* first = times.const_data_ptr<double>() + static_cast<int64_t>(i) * count;
    print_samples(operation, bytes, contenders[i].name, Samples(first, first + count));
  }
}

Contender memory_contender(const char* name, int64_t bytes, Pages pages) {
  const auto memory = std::make_shared<MemoryStream>(pages);
  return {name, bytes, [memory] { memory->pass(); }};
}

}  // namespace

void run_rank(const Plan& plan) {
  const auto world = init({.backend = "gloo", .timeout = std::chrono::minutes(5)});
  std::vector<int> all_ranks(world.world_size());
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  const auto our_group = new_group(world.group(), all_ranks, {.backend = plan.backend});
  const auto ours = our_group->getBackend(at::kCPU);
  const auto gloo = world.group()->getBackend(at::kCPU);

  for (const auto operation : plan.operations) {
    for (const auto bytes : plan.sizes) {
      std::vector<Contender> contenders;
      contenders.push_back(make_contender(kOrdinary, ours, operation, bytes, Tensors::kOrdinary));
      contenders.push_back(make_contender(kGloo, gloo, operation, bytes, Tensors::kOrdinary));
      if (ours->supportsTensorAlloc(0)) {
        contenders.push_back(make_contender(kZeroCopy, ours, operation, bytes, Tensors::kFromBackend));
      }
      if (operation == Operation::kAllReduce && bytes >= kMemoryBoundBytes && world.world_size() <= available_cores()) {
        contenders.push_back(memory_contender(kMemory, bytes, Pages::kDefault));
        contenders.push_back(memory_contender(kMemoryHuge, bytes, Pages::kHuge));
      }
      measure(contenders, operation, bytes, plan.seconds_per_case, world);
    }
  }
  barrier(world.group());
}

}  // namespace lockstep::bench
