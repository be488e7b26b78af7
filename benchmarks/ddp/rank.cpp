#include "benchmarks/ddp/rank.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::bench {
namespace {

constexpr int kWarmUpSteps = 3;
constexpr int64_t kFewestSteps = 5;
constexpr int64_t kMostSteps = 100;

void wait_for_device(const World& world) {
  if (world.device().is_cuda()) at::zeros({1}, world.device()).cpu();  // runs behind everything queued
}

double milliseconds_of(const Contender& contender, const World& world) {
  wait_for_device(world);
  if (world.world_size() > 1) barrier(world.group());
  const auto start = std::chrono::steady_clock::now();
  contender.step();
  wait_for_device(world);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Resident memory at its highest, in bytes.
double peak_bytes() {
  std::string line;
  for (std::ifstream status("/proc/self/status"); std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) * 1024;
  }
  return 0;
}

}  // namespace

void run_rank(const RankPlan& plan) {
  const auto world = init();
  std::vector<Contender> contenders;
  for (const auto& name : plan.contenders) contenders.push_back(make_contender(name, plan.which, world));
  double turn = 0;
  for (const auto& contender : contenders) {
    for (int i = 0; i < kWarmUpSteps; ++i) contender.step();
    turn += milliseconds_of(contender, world) / 1000;
  }
  auto steps =
      at::full({1}, std::clamp(static_cast<int64_t>(plan.seconds / turn), kFewestSteps, kMostSteps), at::kLong);
  broadcast(steps, 0, world.group());
  const auto count = steps.item<int64_t>();
  const auto times = at::empty({count, static_cast<int64_t>(contenders.size())}, at::kDouble);
  for (int64_t step = 0; step < count; ++step) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      times[step][static_cast<int64_t>(i)] = milliseconds_of(contenders[i], world);
    }
  }
  all_reduce(times, world.group(), ReduceOp::MAX);
  if (world.rank() == 0) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      for (int64_t step = 0; step < count; ++step) {
        std::printf("sample %s %.6f\n", contenders[i].name.c_str(),
                    times[step][static_cast<int64_t>(i)].item<double>());
      }
    }
    if (contenders.size() == 1) std::printf("peak %s %.0f\n", contenders[0].name.c_str(), peak_bytes());
    std::fflush(stdout);
  }
  if (world.world_size() > 1) barrier(world.group());
}

}  // namespace lockstep::bench
