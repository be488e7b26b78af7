#include "benchmarks/kit/training_rank.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <utility>

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

constexpr int kWarmUpSteps = 3;
constexpr int64_t kFewestSteps = 5;  // for a median
constexpr int64_t kMostSteps = 100;

void wait_for_device(const World& world) {
  if (world.device().is_cuda()) at::zeros({1}, world.device()).cpu();  // runs behind everything queued
}

double milliseconds_of(const TimedWork& work, const World& world) {
  if (work.prepare) work.prepare();
  wait_for_device(world);
  if (world.world_size() > 1) barrier(world.group());
  const auto start = Clock::now();
  work.run();
  wait_for_device(world);
  if (work.figure) return work.figure();
  return Milliseconds(Clock::now() - start).count();
}

/// A line of `file` in /proc/self, in bytes; 0 where there is none.
double proc_bytes(const std::string& file, const std::string& field) {
  std::string line;
  for (std::ifstream lines("/proc/self/" + file); std::getline(lines, line);) {
    if (line.starts_with(field + ":")) return std::stod(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

/// Pages of shared memory are resident in every rank that touched them; they count once, in equal parts for those who
/// have them, as of now.
double counted_by_others() {
  return proc_bytes("status", "RssShmem") - proc_bytes("smaps_rollup", "Pss_Shmem");
}

/// Resident memory at its highest.
double peak_bytes() {
  return proc_bytes("status", "VmHWM") - counted_by_others();
}

/// Lets VmHWM start anew. Where the kernel does not allow it, what libraries needed to load counts as well.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

/// Columns as `contenders` and their works, row by row.
at::Tensor take_turns(const std::vector<Contender>& contenders, double seconds, const World& world) {
  std::vector<double> times;
  const auto turn = [&] {
    for (const auto& contender : contenders) {
      for (const auto& work : contender.timed) times.push_back(milliseconds_of(work, world));
    }
  };
  for (int i = 0; i < kWarmUpSteps; ++i) turn();
  const auto columns = static_cast<int64_t>(times.size()) / kWarmUpSteps;
  times.clear();
  const auto start = Clock::now();
  turn();
  const auto took = Milliseconds(Clock::now() - start).count();
  const auto fewest = seconds > 0 ? kFewestSteps : 1;
  auto count = at::full({1}, std::clamp(static_cast<int64_t>(1000 * seconds / took), fewest, kMostSteps), at::kLong);
  broadcast(count, 0, world.group());
  times.clear();
  for (auto turns = count.item<int64_t>(); turns > 0; --turns) turn();
  auto slowest = at::tensor(times, at::kDouble);
  all_reduce(slowest, world.group(), ReduceOp::MAX);
  return slowest.view({-1, columns});
}

void print(const std::string& what, const std::string& contender, double value) {
  std::printf("%s %s %.6f\n", what.c_str(), contender.c_str(), value);
}

}  // namespace

double peak_growth_of(const std::function<void()>& work) {
  const auto before = proc_bytes("status", "VmRSS") - counted_by_others();
  forget_peak();
  work();
  return peak_bytes() - before;
}

void run_rank(const RankPlan& plan, const MakeContender& make) {
  const auto world = init();
  const auto before = proc_bytes("status", "VmRSS");
  forget_peak();
  std::vector<Contender> contenders;
  for (const auto& name : plan.contenders) contenders.push_back(make(name, plan.which, world));
  const auto times = take_turns(contenders, plan.seconds, world);
  std::map<std::string, double> bytes;
  if (contenders.size() == 1) {
    const auto peak = peak_bytes() - before;
    if (contenders[0].bytes) bytes = contenders[0].bytes();
    bytes["peak"] = peak;
  }
  for (auto& [what, value] : bytes) {
    auto highest = at::full({1}, value, at::kDouble);
    all_reduce(highest, world.group(), ReduceOp::MAX);
    value = highest.item<double>();
  }
  if (world.rank() == 0) {
    for (int64_t turn = 0; turn < times.size(0); ++turn) {
      int64_t column = 0;
      for (const auto& contender : contenders) {
        for (const auto& work : contender.timed) {
          print(work.what, contender.name, times[turn][column++].item<double>());
        }
      }
    }
    for (const auto& [what, value] : bytes) print(what, contenders[0].name, value);
    std::fflush(stdout);
  }
  if (world.world_size() > 1) barrier(world.group());
}

}  // namespace lockstep::bench
