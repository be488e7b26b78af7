// Bucket plans: how parameters are put into buckets, what is refused, and what survives saving.
#include "lockstep/ddp/bucket_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/testing/checks.h"

namespace lockstep {
namespace {

using testing::expect_error;
using Indices = std::vector<std::vector<std::size_t>>;

ParameterInfo info(const std::string& name, int64_t elements, at::ScalarType dtype = at::kFloat, bool sparse = false) {
  return {.name = name, .sizes = {elements}, .strides = {1}, .dtype = dtype, .expects_sparse_gradient = sparse};
}

std::vector<ParameterInfo> floats(const std::vector<int64_t>& sizes) {
  std::vector<ParameterInfo> infos;
  for (std::size_t i = 0; i < sizes.size(); ++i) infos.push_back(info("p" + std::to_string(i), sizes[i]));
  return infos;
}

Indices indices_of(const std::vector<PlannedBucket>& buckets) {
  Indices indices;
  for (const auto& bucket : buckets) indices.push_back(bucket.parameters);
  return indices;
}

/// Weights and biases of `layers` square Linear layers.
std::vector<ParameterInfo> linears(int layers, int64_t width) {
  std::vector<ParameterInfo> infos;
  for (int i = 0; i < layers; ++i) {
    infos.push_back({.name = "fc" + std::to_string(i) + ".weight", .sizes = {width, width}, .strides = {width, 1}});
    infos.push_back(info("fc" + std::to_string(i) + ".bias", width));
  }
  return infos;
}

std::vector<std::size_t> bytes_of(const BucketPlan& plan) {
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < plan.buckets().size(); ++i) bytes.push_back(plan.bytes(i));
  return bytes;
}

// DDP-24
TEST(BucketPlan, ClosesABucketWhenItHoldsItsCap) {
  const auto parameters = floats({100, 100, 100, 100, 100});
  EXPECT_EQ(indices_of(assign_buckets(parameters, {400})), (Indices{{0}, {1}, {2}, {3}, {4}}));
  EXPECT_EQ(indices_of(assign_buckets(parameters, {401})), (Indices{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(indices_of(assign_buckets(parameters, {400, 1200})), (Indices{{0}, {1, 2, 3}, {4}}));
  EXPECT_EQ(indices_of(assign_buckets(parameters, {0})), (Indices{{0}, {1}, {2}, {3}, {4}}));
  EXPECT_EQ(indices_of(assign_buckets(parameters, {kNoCap})), (Indices{{0, 1, 2, 3, 4}}));
  const auto buckets = assign_buckets(parameters, {400, 1200});
  EXPECT_EQ(buckets[0].cap_bytes, 400U);
  EXPECT_EQ(buckets[1].cap_bytes, 1200U);
  EXPECT_EQ(buckets[2].cap_bytes, 1200U);
}

// DDP-24: every dtype walks the caps by itself; a sparse one is alone and has no cap.
TEST(BucketPlan, KeepsDtypesApartAndSparseParametersAlone) {
  const std::vector<ParameterInfo> parameters = {info("a", 100),
                                                 info("b", 100, at::kHalf),
                                                 info("c", 100),
                                                 info("d", 100, at::kHalf),
                                                 info("e", 100, at::kFloat, true),
                                                 info("f", 100),
                                                 info("g", 100, at::kHalf)};
  EXPECT_EQ(indices_of(assign_buckets(parameters, {400, 800})), (Indices{{0}, {1, 3}, {2, 5}, {4}, {6}}));
  EXPECT_EQ(assign_buckets(parameters, {400, 800})[3].cap_bytes, kNoCap);
}

// DDP-25
TEST(BucketPlan, SortsBySmallestIndexUnlessAnOrderIsGiven) {
  const std::vector<ParameterInfo> parameters = {info("a", 10), info("b", 10, at::kDouble), info("c", 10),
                                                 info("d", 10, at::kDouble)};
  EXPECT_EQ(indices_of(assign_buckets(parameters, {80})), (Indices{{0, 2}, {1}, {3}}));
  EXPECT_EQ(indices_of(assign_buckets(parameters, {80}, {3, 2, 1, 0})), (Indices{{3}, {1}, {2, 0}}));
  // What is left over comes in the order of its first member, in every run.
  for (int run = 0; run < 20; ++run) {
    EXPECT_EQ(indices_of(assign_buckets(parameters, {kNoCap}, {3, 2, 1, 0})), (Indices{{3, 1}, {2, 0}}));
  }
}

// DDP-24
TEST(BucketPlan, RefusesWhatCannotBeAssigned) {
  expect_error([] { assign_buckets({}, {1}); }, {"no parameters"});
  expect_error([] { assign_buckets(floats({1}), {}); }, {"no bucket size limit"});
  expect_error([] { assign_buckets(floats({1, 1}), {1}, {0}); }, {"lists 1 of 2"});
  expect_error([] { compute_bucket_assignment_by_size({at::ones({1})}, {1}, {false, true}); },
               {"2 flags", "1 tensors"});
  expect_error([] { compute_bucket_assignment_by_size({at::ones({1, 1}).to_sparse()}, {1}); }, {"tensor 0", "sparse"});
  const std::vector<at::Tensor> two = {at::ones({1}), at::ones({1})};
  expect_error([&] { compute_bucket_assignment_by_size(two, {1}, {}, {0}); }, {"1 indices", "2 tensors"});
  expect_error([&] { compute_bucket_assignment_by_size(two, {1}, {}, {1, 1}); }, {"tensor 1", "each once"});
  expect_error([&] { compute_bucket_assignment_by_size(two, {1}, {}, {0, 2}); }, {"index 2", "0 to 1"});
}

// DDP-24: tensors are given in the order they are filled in, with the indices they have.
TEST(BucketPlan, AssignsTensorsInTheirOrderUnderTheirIndices) {
  const std::vector<at::Tensor> tensors = {at::ones({2}), at::ones({1}), at::ones({1}), at::ones({1})};
  const auto buckets = compute_bucket_assignment_by_size(tensors, {8}, {false, true, false, false}, {3, 0, 1, 2});
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets[0].parameters, std::vector<std::size_t>({3}));
  EXPECT_EQ(buckets[1].parameters, std::vector<std::size_t>({1}));
  EXPECT_EQ(buckets[1].cap_bytes, kNoCap);
  EXPECT_EQ(buckets[2].parameters, (std::vector<std::size_t>{0, 2}));
}

// DDP-26
TEST(BucketPlan, BeginsWithOneBucketOrWithCapsAndReversesThem) {
  const auto parameters = linears(4, 600);
  EXPECT_EQ(bytes_of(first_plan(parameters, {}, true)), std::vector<std::size_t>({5769600}));
  // The first cap of 1 MiB is filled by one weight; the rest goes under the second.
  const BucketCaps caps{.first_bytes = 1 << 20, .bytes = std::size_t{25} << 20};
  EXPECT_EQ(bytes_of(first_plan(parameters, caps, false)), (std::vector<std::size_t>{4329600, 1440000}));
  EXPECT_EQ(first_plan(parameters, caps, false).buckets()[1].parameters, std::vector<std::size_t>({0}));
}

// DDP-29
TEST(BucketPlan, IsRebuiltInTheOrderGradientsCame) {
  const auto parameters = linears(4, 600);
  const std::vector<std::size_t> order = {7, 6, 5, 4, 3, 2, 1, 0};
  const auto plan = rebuilt_plan(parameters, {}, order);
  EXPECT_EQ(bytes_of(plan), (std::vector<std::size_t>{1442400, 4327200}));
  EXPECT_EQ(plan.buckets()[0].parameters, (std::vector<std::size_t>{7, 6}));
  // DDP-28: the small one may come last.
  const auto small_last = rebuilt_plan(parameters, {}, order, true);
  EXPECT_EQ(bytes_of(small_last), (std::vector<std::size_t>{4329600, 1440000}));
  EXPECT_EQ(small_last.buckets()[1].parameters, std::vector<std::size_t>({0}));
}

// DDP-13
TEST(BucketPlan, TakesACapPerBucket) {
  const BucketCaps caps{.list = {40, 80}};
  EXPECT_EQ(indices_of(first_plan(floats({10, 10, 10, 10, 10}), caps, true).buckets()), (Indices{{3, 4}, {1, 2}, {0}}));
}

// DDP-27
TEST(BucketPlan, RefusesABrokenLayoutWithBucketAndName) {
  const auto parameters = floats({1, 1, 1});
  expect_error([&] { BucketPlan(parameters, {{.parameters = {0, 1, 2}}, {}}); }, {"bucket 1", "empty"});
  expect_error([&] { BucketPlan(parameters, {{.parameters = {0, 1}}, {.parameters = {1, 2}}}); },
               {"'p1'", "bucket 0", "bucket 1"});
  expect_error([&] { BucketPlan(parameters, {{.parameters = {0, 3}}}); }, {"bucket 0", "parameter 3"});
  expect_error([&] { BucketPlan(parameters, {{.parameters = {0, 2}}}); }, {"'p1'", "in no bucket"});
  const std::vector<ParameterInfo> mixed = {info("a", 1), info("b", 1, at::kHalf)};
  expect_error([&] { BucketPlan(mixed, {{.parameters = {0, 1}}}); }, {"bucket 0", "'a'", "'b'"});
  const std::vector<ParameterInfo> sparse = {info("a", 1), info("b", 1, at::kFloat, true)};
  expect_error([&] { BucketPlan(sparse, {{.parameters = {0, 1}}}); }, {"'b'", "sparse", "alone"});
}

// DDP-111, DDP-112
TEST(BucketPlan, SurvivesSavingAndRefusesAnotherModel) {
  auto parameters = linears(3, 20);
  const auto plan = rebuilt_plan(parameters, {.list = {100, 2000}}, {5, 3, 4, 1, 2, 0});
  EXPECT_EQ(BucketPlan::load(plan.save(), parameters), plan);
  // Names count, not positions.
  auto moved = parameters;
  std::swap(moved[0], moved[5]);
  const auto loaded = BucketPlan::load(plan.save(), moved);
  EXPECT_EQ(loaded.parameters()[loaded.buckets()[0].parameters[0]].name, "fc2.bias");
  auto fewer = parameters;
  fewer.pop_back();
  expect_error([&] { BucketPlan::load(plan.save(), fewer); }, {"'fc2.bias'", "has not"});
  auto more = parameters;
  more.push_back(info("extra", 3));
  expect_error([&] { BucketPlan::load(plan.save(), more); }, {"'extra'", "in no bucket"});
  auto resized = parameters;
  resized[1].sizes = {21};
  expect_error([&] { BucketPlan::load(plan.save(), resized); }, {"'fc0.bias'", "Float[20]", "Float[21]"});
  expect_error([&] { BucketPlan::load("nonsense", parameters); }, {"no saved bucket plan"});
  EXPECT_NE(plan.difference_from(first_plan(parameters, {}, true)), "");
  EXPECT_THAT(plan.to_string(), ::testing::HasSubstr("bucket 0"));
}

}  // namespace
}  // namespace lockstep
