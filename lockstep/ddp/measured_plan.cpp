#include "lockstep/ddp/measured_plan.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/nn/gradient_hooks.h"
#include "lockstep/nn/module_tensors.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// The slowest rank's: a reduction waits for it.
void take_slowest(std::vector<double>& values, const GroupPtr& group) {
  if (group->getSize() == 1 || values.empty()) return;
  auto tensor = at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
  all_reduce(tensor, group, c10d::ReduceOp::MAX);
}

/// What may be in one bucket with others.
std::string kind_of(const ParameterInfo& info) {
  return info.expects_sparse_gradient ? str("sparse ", info.name)
                                      : str(static_cast<int>(info.dtype), info.device.str());
}

std::vector<std::size_t> order_of(const std::vector<double>& ready_ms) {
  std::vector<std::size_t> order(ready_ms.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ready_ms[a] < ready_ms[b]; });
  return order;
}

}  // namespace

ReductionCost measure_reductions(const GroupPtr& group, c10::Device device) {
  TORCH_CHECK(group, "[lockstep/ddp] measure_reductions: the group is null.");
  if (group->getSize() == 1) return {};
  constexpr int kRounds = 7;
  std::vector<double> bytes;
  std::vector<double> times;
  for (const std::int64_t count : {std::int64_t{1} << 10, std::int64_t{1} << 16, std::int64_t{1} << 20}) {
    const auto tensor = at::zeros({count}, at::TensorOptions(at::kFloat).device(device));
    std::vector<double> rounds;
    for (int i = 0; i <= kRounds; ++i) {
      barrier(group);
      const auto begin = Clock::now();
      all_reduce(tensor, group);
      if (i > 0) rounds.push_back(ms_since(begin));
    }
    bytes.push_back(static_cast<double>(count) * 4);
    times.push_back(median(rounds));
  }
  take_slowest(times, group);
  const auto slope = std::max(0.0, (times.back() - times.front()) / (bytes.back() - bytes.front()));
  return {.ms_per_call = std::max(0.0, times.front() - slope * bytes.front()), .ms_per_byte = slope};
}

double predicted_end_ms(const BucketPlan& plan, const std::vector<double>& ready_ms, const ReductionCost& cost) {
  double end = 0;
  double ready = 0;
  for (std::size_t i = 0; i < plan.buckets().size(); ++i) {
    // Launched in order, so never before those in front.
    for (const auto parameter : plan.buckets()[i].parameters) ready = std::max(ready, ready_ms.at(parameter));
    end = std::max(end, ready) + cost.ms_per_call + cost.ms_per_byte * static_cast<double>(plan.bytes(i));
  }
  return end;
}

BucketPlan fastest_plan(std::vector<ParameterInfo> parameters, const std::vector<double>& ready_ms,
                        const ReductionCost& cost) {
  TORCH_CHECK(parameters.size() == ready_ms.size(), "[lockstep/ddp] fastest_plan: there are ", parameters.size(),
              " parameters and ", ready_ms.size(), " times.");
  const auto order = order_of(ready_ms);
  const auto count = order.size();
  // ends[i]: when the first i gradients are reduced at the earliest; begins[i]: where the last bucket then begins. Of
  // equals the fewer buckets.
  std::vector<double> ends(count + 1, 0);
  std::vector<int> buckets(count + 1, 0);
  std::vector<std::size_t> begins(count + 1, 0);
  for (std::size_t i = 1; i <= count; ++i) {
    double bytes = 0;
    std::map<std::string, int> kinds;
    bool is_first = true;
    for (auto j = i; j-- > 0;) {
      const auto& info = parameters[order[j]];
      bytes += static_cast<double>(info.bytes());
      ++kinds[kind_of(info)];
      const auto end = std::max(ends[j], ready_ms[order[i - 1]]) +
                       cost.ms_per_call * static_cast<double>(kinds.size()) + cost.ms_per_byte * bytes;
      const auto number = buckets[j] + 1;
      if (is_first || end < ends[i] || (end == ends[i] && number < buckets[i])) {
        ends[i] = end;
        begins[i] = j;
        buckets[i] = number;
      }
      is_first = false;
    }
  }
  std::vector<std::vector<std::size_t>> runs;
  for (auto i = count; i > 0; i = begins[i]) {
    runs.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(begins[i]),
                      order.begin() + static_cast<std::ptrdiff_t>(i));
  }
  std::reverse(runs.begin(), runs.end());
  std::vector<PlannedBucket> planned;
  for (const auto& run : runs) {
    std::map<std::string, std::size_t> open;
    for (const auto parameter : run) {
      const auto [found, is_new] = open.try_emplace(kind_of(parameters[parameter]), planned.size());
      if (is_new) planned.emplace_back();
      planned[found->second].parameters.push_back(parameter);
    }
  }
  return {std::move(parameters), std::move(planned)};
}

MeasuredPlan measure_plan(torch::nn::Module& module, const GroupPtr& group, const std::function<void()>& step,
                          const MeasureOptions& options) {
  TORCH_CHECK(group, "[lockstep/ddp] measure_plan: the group is null.");
  TORCH_CHECK(step, "[lockstep/ddp] measure_plan: there is no step.");
  TORCH_CHECK(options.steps > 0, "[lockstep/ddp] measure_plan: steps is ", options.steps, ".");
  const auto managed = detail::managed_parameters(module, detail::ignored_names(module));
  TORCH_CHECK(!managed.tensors.empty(),
              "[lockstep/ddp] measure_plan: the module has no parameter that needs gradients.");
  constexpr int kWarmUp = 2;
  const auto count = managed.tensors.size();
  std::vector<at::Tensor> before;
  for (const auto& parameter : managed.tensors) before.push_back(parameter.grad());
  // From the first gradient of a step: when its backward began the program alone knows.
  Clock::time_point begin;
  bool has_begun = false;
  std::vector<double> now(count, 0);
  std::vector<std::vector<double>> times(count);
  std::vector<double> ends;
  detail::GradientHooks hooks;
  hooks.add(managed.tensors, [&](std::size_t index) {
    if (!has_begun) {
      begin = Clock::now();
      has_begun = true;
    }
    now[index] = ms_since(begin);
  });
  for (int i = 0; i < kWarmUp + options.steps; ++i) {
    for (const auto& parameter : managed.tensors) parameter.mutable_grad() = at::Tensor();
    std::fill(now.begin(), now.end(), -1);
    has_begun = false;
    barrier(group);
    step();
    const auto end = has_begun ? ms_since(begin) : 0;
    if (i < kWarmUp) continue;
    // Unused ones are there when all is over.
    for (std::size_t p = 0; p < count; ++p) times[p].push_back(now[p] < 0 ? end : now[p]);
    ends.push_back(end);
  }
  hooks.remove();
  for (std::size_t p = 0; p < count; ++p) managed.tensors[p].mutable_grad() = before[p];

  MeasuredPlan measured;
  for (auto& each : times) measured.ready_ms.push_back(median(each));
  measured.ready_ms.push_back(median(ends));
  take_slowest(measured.ready_ms, group);
  measured.backward_ms = measured.ready_ms.back();
  measured.ready_ms.pop_back();
  measured.cost = measure_reductions(group, managed.infos.front().device);
  measured.plan = fastest_plan(managed.infos, measured.ready_ms, measured.cost);
  measured.end_ms = predicted_end_ms(measured.plan, measured.ready_ms, measured.cost);
  measured.default_end_ms = predicted_end_ms(rebuilt_plan(managed.infos, options.caps, order_of(measured.ready_ms)),
                                             measured.ready_ms, measured.cost);
  return measured;
}

std::string MeasuredPlan::to_string() const {
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "backward %.3f ms; reductions %.4f ms per call, %.3f ms per MiB; the last one ends at %.3f ms, %.3f with the "
      "default caps\n",
      backward_ms, cost.ms_per_call, cost.ms_per_byte * (1 << 20), end_ms, default_end_ms);
  return text + plan.to_string();
}

}  // namespace lockstep
