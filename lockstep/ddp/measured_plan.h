// Buckets chosen from what was measured: when gradients are there, and what a reduction costs, per call and per byte.
//
//   auto measured = measure_plan(*net, group, [&] { loss_of(net(batch)).backward(); });
//   DistributedDataParallel ddp(net, {.process_group = group, .bucket_plan = measured.plan.save()});
//
// Few large buckets wait for their last gradient, many small ones pay per call: the plan whose last reduction ends
// first lies in between, and where depends on model and link.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/bucket_plan.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// What an all-reduce takes: so much per call, and per byte.
struct ReductionCost {
  double ms_per_call = 0;
  double ms_per_byte = 0;
};

/// Times all-reduces of several sizes and draws a line through them. The same on all ranks. Collective.
ReductionCost measure_reductions(const GroupPtr& group, c10::Device device = c10::kCPU);

/// A bucket in backward: when its last gradient is there, and its reduction.
struct BucketTimes {
  double ready_ms = 0;
  double begin_ms = 0;
  double end_ms = 0;
};
/// By bucket: reductions one after another, in the plan's order, each begun when it may. `ready_ms` goes by parameter.
std::vector<BucketTimes> predicted_times(const BucketPlan& plan, const std::vector<double>& ready_ms,
                                         const ReductionCost& cost);
/// When the last of them ends.
double predicted_end_ms(const BucketPlan& plan, const std::vector<double>& ready_ms, const ReductionCost& cost);

/// The plan with the earliest such end, among those that keep the order in which gradients come.
BucketPlan fastest_plan(std::vector<ParameterInfo> parameters, const std::vector<double>& ready_ms,
                        const ReductionCost& cost);

struct MeasuredPlan {
  BucketPlan plan;
  ReductionCost cost;
  std::vector<double> ready_ms;  // by parameter, of the slowest rank
  double backward_ms = 0;
  double end_ms = 0;          // as predicted for the fastest plan
  double default_end_ms = 0;  // and for the caps that DDP has by itself
  /// Of steps that were really reduced by the one and by the other; the plan above is whichever took less. None if not
  /// every gradient comes in a step, or for one rank: then it is the predicted one.
  std::optional<double> tried_ms = std::nullopt;
  std::optional<double> default_tried_ms = std::nullopt;

  /// The share of the reductions' time in which backward still computes, as predicted.
  double overlap_share() const;
  /// The gain in words, buckets with their times, and the overlap; beside what a wrapper measured, if that is given:
  /// DistributedDataParallel::overlap_share().
  std::string to_string(std::optional<double> measured_overlap = std::nullopt) const;
};

struct MeasureOptions {
  int steps = 5;  // after two that warm up; the median counts
  /// What the default plan is made with.
  BucketCaps caps = {};
  /// As of DdpOptions.
  std::set<std::string> params_and_buffers_to_ignore = {};
};

/// Measures on the bare module, before it is wrapped: `step` runs a forward and a backward. Then tries the plan that
/// this speaks for, and the default one: reductions may take from backward what the prediction does not know, such as
/// cores. Gradients are those of before afterwards. Collective; the same on all ranks.
MeasuredPlan measure_plan(torch::nn::Module& module, const GroupPtr& group, const std::function<void()>& step,
                          const MeasureOptions& options = {});

}  // namespace lockstep
