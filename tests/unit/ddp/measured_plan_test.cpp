#include "lockstep/ddp/measured_plan.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/testing/checks.h"

namespace lockstep::measured_plan_test {
namespace {

std::vector<ParameterInfo> parameters(const std::vector<std::int64_t>& counts) {
  std::vector<ParameterInfo> infos;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    infos.push_back({.name = "p" + std::to_string(i), .sizes = {counts[i]}, .strides = {1}});
  }
  return infos;
}

std::vector<std::vector<std::size_t>> buckets_of(const BucketPlan& plan) {
  std::vector<std::vector<std::size_t>> buckets;
  for (const auto& bucket : plan.buckets()) buckets.push_back(bucket.parameters);
  return buckets;
}

using Buckets = std::vector<std::vector<std::size_t>>;

}  // namespace

TEST(MeasuredPlan, WeighsCallsAgainstWaiting) {
  const auto infos = parameters({100, 100, 100, 100});
  const std::vector<double> ready = {4, 3, 2, 1};  // the last parameter's gradient comes first
  // A call costs nothing: each on its own, so that the last one is short.
  EXPECT_EQ(buckets_of(fastest_plan(infos, ready, {.ms_per_call = 0, .ms_per_byte = 0.001})),
            (Buckets{{3}, {2}, {1}, {0}}));
  // A call costs more than all the waiting: one bucket.
  EXPECT_EQ(buckets_of(fastest_plan(infos, ready, {.ms_per_call = 10, .ms_per_byte = 0.001})), (Buckets{{3, 2, 1, 0}}));
  // Nothing costs anything: no need for more than one.
  EXPECT_EQ(fastest_plan(infos, ready, {}).buckets().size(), 1);
  EXPECT_DOUBLE_EQ(predicted_end_ms(fastest_plan(infos, ready, {}), ready, {}), 4);
  testing::expect_error([&] { fastest_plan(infos, {1, 2}, {}); }, {"4 parameters", "2 times"});
}

TEST(MeasuredPlan, PredictsTheOverlap) {
  MeasuredPlan measured{.plan = BucketPlan(parameters({100, 100}), {{.parameters = {1}}, {.parameters = {0}}}),
                        .cost = {.ms_per_call = 2, .ms_per_byte = 0},
                        .ready_ms = {4, 1},
                        .backward_ms = 5};
  const auto times = predicted_times(measured.plan, measured.ready_ms, measured.cost);
  ASSERT_EQ(times.size(), 2);
  EXPECT_EQ(times[0].begin_ms, 1);
  EXPECT_EQ(times[1].begin_ms, 4);
  EXPECT_EQ(times[1].end_ms, 6);
  EXPECT_DOUBLE_EQ(measured.overlap_share(), 0.75) << "two milliseconds, and one of two";
}

TEST(MeasuredPlan, IsTheBestOfAllThatKeepTheOrder) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const std::size_t count = 1 + random() % 8;
    std::vector<std::int64_t> counts;
    std::vector<double> ready;
    for (std::size_t i = 0; i < count; ++i) {
      counts.push_back(1 + static_cast<std::int64_t>(random() % 1000));
      ready.push_back(static_cast<double>(random() % 100));
    }
    const ReductionCost cost{.ms_per_call = static_cast<double>(random() % 30),
                             .ms_per_byte = static_cast<double>(random() % 20) / 1000};
    auto infos = parameters(counts);
    if (trial % 3 == 0) infos[random() % count].dtype = at::kHalf;
    const auto plan = fastest_plan(infos, ready, cost);
    const auto got = predicted_end_ms(plan, ready, cost);
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return ready[a] < ready[b]; });
    for (unsigned cuts = 0; cuts < 1U << (count - 1); ++cuts) {
      std::vector<PlannedBucket> planned(1);
      for (std::size_t i = 0; i < count; ++i) {
        if (i > 0 && ((cuts >> (i - 1)) & 1U) != 0) planned.emplace_back();
        planned.back().parameters.push_back(order[i]);
      }
      bool has_one_kind = true;
      for (const auto& bucket : planned) {
        for (const auto index : bucket.parameters) {
          has_one_kind = has_one_kind && infos[index].dtype == infos[bucket.parameters[0]].dtype;
        }
      }
      if (!has_one_kind) continue;
      EXPECT_LE(got, predicted_end_ms(BucketPlan(infos, planned), ready, cost) + 1e-9) << trial;
    }
  }
}

}  // namespace lockstep::measured_plan_test
