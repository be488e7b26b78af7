// Buckets that the program lays out itself.
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;

/// A bucket for each layer of a model of linear ones, the last layer first.
BucketPlan plan_by_layer(const BucketPlan& any) {
  std::vector<PlannedBucket> buckets;
  for (std::size_t i = any.parameters().size(); i > 0; i -= 2) buckets.push_back({.parameters = {i - 1, i - 2}});
  return {any.parameters(), std::move(buckets)};
}

// DDP-27
LOCKSTEP_THREAD_TEST(DdpUsePlan, FixesBucketsBeforeTheFirstStep, 2) {
  const auto batch = random_batch(8, 4, 2);
  auto reference = mlp({4, 3, 3, 2});
  reference->forward(batch).pow(2).mean().backward();
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(mlp({4, 3, 3, 2}), world.group(), {.gradient_as_bucket_view = as_view});
    EXPECT_EQ(ddp.bucket_plan().buckets().size(), 1U);
    const auto plan = plan_by_layer(ddp.bucket_plan());
    ddp.use_plan(plan);
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      ddp(my_rows(batch, world)).pow(2).mean().backward();
      expect_close(gradients_of(*ddp.module()), gradients_of(*reference));
      EXPECT_EQ(ddp.engine().reducer()->last_step().buckets_reduced, 3);
      EXPECT_EQ(ddp.bucket_plan(), plan) << "no rebuild";
    }
    EXPECT_EQ(ddp.snapshot().options.bucket_plan, plan.save());
    expect_error([&] { ddp.use_plan(plan); }, {"before the first step", "3 are over"});
  }
}

LOCKSTEP_THREAD_TEST(DdpUsePlan, GoesWithAStaticGraph, 2) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
  const auto plan = plan_by_layer(ddp.bucket_plan());
  ddp.use_plan(plan);
  ddp.set_static_graph();
  for (int step = 0; step < 3; ++step) ddp(random_batch(2, 4, step)).sum().backward();
  EXPECT_EQ(ddp.bucket_plan(), plan);
}

LOCKSTEP_THREAD_TEST(DdpUsePlan, IsRefusedOnAllRanksIfOneIsWrong, 3) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
  const auto before = ddp.bucket_plan();
  const auto right = plan_by_layer(before);
  // Rank 1 has a plan of another model.
  const auto other = DistributedDataParallel(mlp({4, 5, 2}), world.group()).bucket_plan();
  expect_error([&] { ddp.use_plan(world.rank() == 1 ? plan_by_layer(other) : right); }, {"rank 1", "'layer1.weight'"});
  // Rank 2 has other buckets.
  expect_error([&] { ddp.use_plan(world.rank() == 2 ? before : right); }, {"bucket plan"});
  EXPECT_EQ(ddp.bucket_plan(), before) << "nothing was changed";
  ddp.use_plan(right);
  ddp(random_batch(2, 4, 1)).sum().backward();
  EXPECT_EQ(ddp.bucket_plan(), right);
  // What no plan can be is refused where it is made.
  expect_error([&] { BucketPlan(before.parameters(), {{.parameters = {0, 1}}}); }, {"'layer1.weight'"});
  DistributedDataParallel alone(mlp({4, 2}), {.process_group = world.group(), .per_parameter = true});
  expect_error([&] { alone.use_plan(right); }, {"use_plan", "per_parameter"});
}

}  // namespace
}  // namespace lockstep
