#include "lockstep/ddp/measured_plan.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/comm/barrier.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/ddp/forward_pass.h"
#include "lockstep/ddp/reducer.h"
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

/// Puts gradients back as they were, whatever happens meanwhile.
class KeptGradients {
 public:
  explicit KeptGradients(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    for (const auto& parameter : parameters) gradients_.push_back(parameter.grad());
  }
  ~KeptGradients() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = gradients_[i];
  }
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;

 private:
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
};

/// Milliseconds that steps take whose gradients are reduced by `plan`, here.
std::vector<double> times_with(const BucketPlan& plan, const detail::ManagedParameters& managed, const GroupPtr& group,
                               const std::function<void()>& step, int steps) {
  const auto reducer = std::make_shared<Reducer>(managed.tensors, managed.infos, group,
                                                 ReducerOptions{.plan = plan, .label = "measured plan"});
  std::vector<double> times;
  for (int i = 0; i <= steps; ++i) {
    for (const auto& parameter : managed.tensors) parameter.mutable_grad() = at::Tensor();
    barrier(group);
    const auto begin = Clock::now();
    reducer->refresh_hooks();
    reducer->prepare_for_forward();
    reducer->prepare_for_backward({}, std::make_shared<detail::ForwardPass>(detail::ForwardPass{.is_synced = true}));
    step();
    if (i > 0) times.push_back(ms_since(begin));  // the first one warms up
  }
  return times;
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

std::vector<BucketTimes> predicted_times(const BucketPlan& plan, const std::vector<double>& ready_ms,
                                         const ReductionCost& cost) {
  std::vector<BucketTimes> times;
  BucketTimes last;
  for (std::size_t i = 0; i < plan.buckets().size(); ++i) {
    // Launched in order, so never before those in front.
    for (const auto parameter : plan.buckets()[i].parameters)
      last.ready_ms = std::max(last.ready_ms, ready_ms.at(parameter));
    last.begin_ms = std::max(last.end_ms, last.ready_ms);
    last.end_ms = last.begin_ms + cost.ms_per_call + cost.ms_per_byte * static_cast<double>(plan.bytes(i));
    times.push_back(last);
  }
  return times;
}

double predicted_end_ms(const BucketPlan& plan, const std::vector<double>& ready_ms, const ReductionCost& cost) {
  const auto times = predicted_times(plan, ready_ms, cost);
  return times.empty() ? 0 : times.back().end_ms;
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
  auto planned = buckets_of_runs(parameters, runs);
  return {std::move(parameters), std::move(planned)};
}

MeasuredPlan measure_plan(torch::nn::Module& module, const GroupPtr& group, const std::function<void()>& step,
                          const MeasureOptions& options) {
  TORCH_CHECK(group, "[lockstep/ddp] measure_plan: the group is null.");
  TORCH_CHECK(step, "[lockstep/ddp] measure_plan: there is no step.");
  TORCH_CHECK(options.steps > 0, "[lockstep/ddp] measure_plan: steps is ", options.steps, ".");
  auto ignored = detail::ignored_names(module);
  ignored.insert(options.params_and_buffers_to_ignore.begin(), options.params_and_buffers_to_ignore.end());
  const auto managed = detail::managed_parameters(module, ignored);
  TORCH_CHECK(!managed.tensors.empty(),
              "[lockstep/ddp] measure_plan: the module has no parameter that needs gradients.");
  constexpr int kWarmUp = 2;
  const auto count = managed.tensors.size();
  const KeptGradients before(managed.tensors);
  // From the first gradient of a step: when its backward began the program alone knows.
  Clock::time_point begin;
  bool has_begun = false;
  std::vector<double> now(count, 0);
  std::vector<std::vector<double>> times(count);
  std::vector<double> ends;
  std::vector<double> has_unused = {0};
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
    for (std::size_t p = 0; p < count; ++p) {
      times[p].push_back(now[p] < 0 ? end : now[p]);
      has_unused[0] = std::max(has_unused[0], now[p] < 0 ? 1.0 : 0.0);
    }
    ends.push_back(end);
  }
  hooks.remove();
  MeasuredPlan measured;
  for (auto& each : times) measured.ready_ms.push_back(median(each));
  measured.ready_ms.push_back(median(ends));
  take_slowest(measured.ready_ms, group);
  measured.backward_ms = measured.ready_ms.back();
  measured.ready_ms.pop_back();
  measured.cost = measure_reductions(group, managed.infos.front().device);
  measured.plan = fastest_plan(managed.infos, measured.ready_ms, measured.cost);
  measured.end_ms = predicted_end_ms(measured.plan, measured.ready_ms, measured.cost);
  auto usual = rebuilt_plan(managed.infos, options.caps, order_of(measured.ready_ms));
  measured.default_end_ms = predicted_end_ms(usual, measured.ready_ms, measured.cost);
  take_slowest(has_unused, group);
  if (group->getSize() > 1 && has_unused[0] == 0) {
    constexpr int kRounds = 2;  // in turns: a machine is not the same all the time
    std::vector<double> tried;
    std::vector<double> usual_tried;
    for (int round = 0; round < kRounds; ++round) {
      for (const auto time : times_with(measured.plan, managed, group, step, options.steps)) tried.push_back(time);
      for (const auto time : times_with(usual, managed, group, step, options.steps)) usual_tried.push_back(time);
    }
    std::vector<double> medians = {median(tried), median(usual_tried)};
    take_slowest(medians, group);
    measured.tried_ms = medians[0];
    measured.default_tried_ms = medians[1];
    if (medians[1] <= medians[0]) measured.plan = std::move(usual);
  } else if (measured.default_end_ms <= measured.end_ms) {
    measured.plan = std::move(usual);
  }
  return measured;
}

double MeasuredPlan::overlap_share() const {
  double all = 0;
  double hidden = 0;
  for (const auto& [ready, begin, end] : predicted_times(plan, ready_ms, cost)) {
    all += end - begin;
    hidden += std::max(0.0, std::min(end, backward_ms) - begin);
  }
  return all > 0 ? hidden / all : 0;
}

std::string MeasuredPlan::to_string(std::optional<double> measured_overlap) const {
  const auto percent = [](double share) { return std::lround(share * 100); };
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "backward %.3f ms; reductions %.4f ms per call, %.3f ms per MiB; the last one ends at %.3f ms, %.3f with the "
      "default caps\n",
      backward_ms, cost.ms_per_call, cost.ms_per_byte * (1 << 20), end_ms, default_end_ms);
  std::string all = text;
  if (tried_ms) {
    std::snprintf(text, sizeof(text), "steps tried: %.3f ms, %.3f with the default caps, which %s\n", *tried_ms,
                  *default_tried_ms, *default_tried_ms <= *tried_ms ? "stay" : "are given up");
    all += text;
  }
  all += str("overlap with backward: ", percent(overlap_share()), " % predicted",
             measured_overlap ? str(", ", percent(*measured_overlap), " % measured") : "", "\n");
  const auto times = predicted_times(plan, ready_ms, cost);
  all += "bucket      bytes  ready ms  begins ms  ends ms\n";
  for (std::size_t i = 0; i < times.size(); ++i) {
    std::snprintf(text, sizeof(text), "%6zu %10zu %9.3f %10.3f %8.3f\n", i, plan.bytes(i), times[i].ready_ms,
                  times[i].begin_ms, times[i].end_ms);
    all += text;
  }
  return all + plan.to_string();
}

}  // namespace lockstep
