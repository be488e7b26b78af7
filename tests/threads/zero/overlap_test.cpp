// ZeRO's step inside of DDP's backward, compared with DDP followed by a plain optimizer.
#include <torch/optim/schedulers/step_lr.h>

#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep::overlap_test {
namespace {

using namespace zero_overlap_fixtures;
using torch::optim::AdamW;

struct Case {
  Form form;
  bool gradient_as_bucket_view;
  bool static_graph;
  bool shard_buckets;

  std::string text() const {
    return std::string(form == Form::kInterleaved ? "interleaved" : "after last") +
           (gradient_as_bucket_view ? ", views" : "") + (static_graph ? ", static" : "") +
           (shard_buckets ? ", shards" : "");
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
    for (const bool views : {false, true}) {
      for (const bool is_static : {false, true}) {
        for (const bool shards : {false, true}) cases.push_back({form, views, is_static, shards});
      }
    }
  }
  return cases;
}

void expect_parity(const World& world, const Case& each, const std::vector<int64_t>& sizes, const SGDOptions& options,
                   double cap_mb) {
  SCOPED_TRACE(each.text());
  const int warm_up = each.static_graph ? 3 : 2;
  DistributedDataParallel ddp(mlp(sizes), world.group(),
                              {.bucket_cap_mb = cap_mb,
                               .gradient_as_bucket_view = each.gradient_as_bucket_view,
                               .static_graph = each.static_graph});
  const auto at_first = copies_of(ddp.parameters());
  Zero zero(ddp.parameters(), options, overlapped(world.group()));
  ddp.register_comm_hook(hook_of(each.form, ddp, zero, each.shard_buckets));
  for (int step = 0; step < warm_up; ++step) train_once(ddp, world, step, sizes[0]);
  expect_same(ddp.parameters(), at_first, "warm-up");
  for (int step = warm_up; step < warm_up + 5; ++step) train_once(ddp, world, step, sizes[0]);
  EXPECT_GT(zero.overlap_info().params_per_bucket.size(), 1U);
  expect_same(ddp.parameters(), plain_result(world, warm_up, warm_up + 5, options, sizes), "result", kClose);
}

// ZERO-49, ZERO-55, ZERO-56, ZERO-57, ZERO-62
TEST(ZeroOverlap, EqualsDdpFollowedByAPlainOptimizer) {
  on_ranks(
      [](const World& world) {
        for (const auto& each : all_cases()) expect_parity(world, each, kSizes, sgd(), 0.002);
      },
      {2});
}

// ZERO-55, ZERO-56, ZERO-62
TEST(ZeroOverlap, EqualsAPlainOptimizerOnAnyNumberOfRanks) {
  on_ranks(
      [](const World& world) {
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          expect_parity(world, {form, false, false, true}, kSizes, sgd(), 0.002);
          expect_parity(world, {form, true, true, false}, kSizes, sgd(), 0.002);
        }
      },
      {1, 3, 4});
}

// ZERO-57
TEST(ZeroOverlap, EqualsAPlainOptimizerOnALargeModel) {
  on_ranks(
      [](const World& world) {
        const auto options = SGDOptions(0.01).momentum(0.9).weight_decay(0.001);
        for (const auto& each : all_cases()) expect_parity(world, each, {1000, 2000, 500}, options, 3);
      },
      {2}, {"shm", "gloo"});
}

// ZERO-45, ZERO-48, ZERO-49
TEST(ZeroOverlap, SetsItselfUpWhenBucketsAreFinal) {
  on_ranks(
      [](const World& world) {
        for (const bool is_static : {false, true}) {
          DistributedDataParallel ddp(mlp(kSizes), world.group(), {.bucket_cap_mb = 0.002, .static_graph = is_static});
          Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
          const auto& info = zero.overlap_info();
          DistributedDataParallel untrained(mlp(kSizes), world.group());
          std::vector<int> trace;
          for (int step = 0; step < 5; ++step) {
            trace.push_back(static_cast<int>(info.status));
            train_once(ddp, world, step);
            if (step < (is_static ? 3 : 2)) {
              train_once(untrained, world, step);
              expect_close(gradients_of(ddp), gradients_of(untrained));
            }
            EXPECT_TRUE(info.bucket_indices_seen.empty() && info.broadcast_handles.empty());
            EXPECT_TRUE(info.bucket_index_to_future.empty() && info.bucket_index_to_bucket.empty());
          }
          EXPECT_EQ(trace, is_static ? std::vector<int>({0, 0, 0, 1, 2}) : std::vector<int>({0, 0, 1, 2, 2}));
          EXPECT_EQ(info.params_per_bucket.size(), ddp.bucket_plan().buckets().size());
        }
      },
      {1, 2}, {"threads"});
}

// ZERO-13, ZERO-46, ZERO-50, ZERO-51
TEST(ZeroOverlap, MovesParametersIntoOneFlatTensorForEachAssignment) {
  on_ranks(
      [](const World& world) {
        for (const bool shard_buckets : {false, true}) {
          DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
          Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero, shard_buckets));
          for (int step = 0; step < 3; ++step) train_once(ddp, world, step);
          const auto& info = zero.overlap_info();
          std::size_t assignments = 0;
          std::size_t parameters = 0;
          for (int rank = 0; rank < world.world_size(); ++rank) {
            for (const auto& [bucket_index, part] : info.assignments_per_rank[rank]) {
              ++assignments;
              parameters += part.parameters.size();
              EXPECT_EQ(part.tensor.numel(), part.numel());
              for (const auto& parameter : part.parameters) EXPECT_TRUE(parameter.is_alias_of(part.tensor));
              if (shard_buckets) continue;
              EXPECT_EQ(rank, static_cast<int>(bucket_index) % world.world_size());
            }
            const auto& own = zero.partition().partition()[rank][0].params();
            ASSERT_EQ(own.size(), info.params_per_rank[rank].size());
            for (std::size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(own[i].is_same(info.params_per_rank[rank][i]));
          }
          EXPECT_EQ(assignments, info.num_bucket_assignments);
          EXPECT_EQ(parameters, ddp.parameters().size());
          EXPECT_EQ(info.total_size.has_value(), shard_buckets);
          int64_t elements = 0;
          for (const auto& parameter : ddp.parameters()) elements += parameter.numel();
          EXPECT_EQ(zero.memory_report().buckets, elements * 4);
        }
      },
      {2, 3}, {"threads"});
}

// ZERO-46, ZERO-51: buckets that were noted before something went wrong are noted anew, and so is their size
TEST(ZeroOverlap, BeginsAnewIfItWasSetUpHalfway) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        const auto hook = hook_of(Form::kAfterLast, ddp, zero, /*shard_buckets=*/true);
        ddp.register_comm_hook(hook);
        train_once(ddp, world, 0);
        loss_of(ddp, world, 1);  // buckets are rebuilt in a forward
        const auto& buckets = ddp.bucket_plan().buckets();
        ASSERT_GT(buckets.size(), 1U);
        std::vector<at::Tensor> parameters;
        for (const auto index : buckets[0].parameters) parameters.push_back(ddp.parameters()[index]);
        GradBucket first({.bucket_count = buckets.size(), .buffer = at::zeros({1}), .parameters = parameters});
        hook.run(first);
        const auto& info = zero.overlap_info();
        ASSERT_EQ(info.status, OverlapStatus::kDdpHasRebuiltBuckets);
        ASSERT_EQ(info.params_per_bucket.size(), 1U);
        for (int step = 2; step < 5; ++step) train_once(ddp, world, step);
        EXPECT_EQ(info.status, OverlapStatus::kInitialized);
        EXPECT_EQ(info.params_per_bucket.size(), buckets.size());
        int64_t elements = 0;
        for (const auto& parameter : ddp.parameters()) elements += parameter.numel();
        EXPECT_EQ(info.total_size, elements);
        expect_same(ddp.parameters(), plain_result(world, 3, 5), "after it", kClose);
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-50
TEST(ZeroOverlap, GivesToNobodyWhatIsInNoBucket) {
  on_ranks(
      [](const World& world) {
        const auto model = mlp(kSizes);
        const auto frozen = model->layers[1]->weight;
        frozen.requires_grad_(false);
        const auto before = frozen.detach().clone();
        DistributedDataParallel ddp(model, world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero, true));
        for (int step = 0; step < 4; ++step) train_once(ddp, world, step);
        const auto& owners = zero.partition().param_to_rank();
        EXPECT_EQ(owners.count(frozen.unsafeGetTensorImpl()), 0U);
        EXPECT_EQ(owners.size(), ddp.parameters().size() - 1);
        EXPECT_TRUE(at::equal(frozen, before));
        EXPECT_FALSE(at::equal(ddp.parameters()[0], mlp(kSizes)->parameters()[0]));

        // Whereas the optimizer must have all that is in a bucket.
        DistributedDataParallel whole(mlp(kSizes), world.group(), small_buckets());
        Zero part({whole.parameters()[0]}, sgd(), overlapped(world.group()));
        whole.register_comm_hook(hook_of(Form::kAfterLast, whole, part));
        for (int step = 0; step < 2; ++step) train_once(whole, world, step);
        testing::expect_error([&] { train_once(whole, world, 2); }, {"is none of the optimizer's parameters"});
      },
      {2}, {"threads"});
}

// ZERO-71
TEST(ZeroOverlap, UpdatesInTheFirstBackwardIfTheBucketsAreGiven) {
  on_ranks([](const World& world) {
    std::string plan;
    {
      DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
      for (int step = 0; step < 2; ++step) train_once(ddp, world, step);
      plan = ddp.bucket_plan().save();
    }
    for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
      for (const bool is_static : {false, true}) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(), {.static_graph = is_static, .bucket_plan = plan});
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(form, ddp, zero, true));
        for (int step = 0; step < 3; ++step) {
          train_once(ddp, world, step);
          expect_same(ddp.parameters(), plain_result(world, 0, step + 1), "step " + std::to_string(step), kClose);
        }
        EXPECT_GT(zero.overlap_info().params_per_bucket.size(), 1U);
      }
    }
  });
}

// ZERO-54
TEST(ZeroOverlap, WorksInAGroupOfSomeRanks) {
  on_ranks(
      [](const World& world) {
        const auto group = new_group(world.group(), {0, 2});
        if (!group) return;
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          DistributedDataParallel ddp(mlp(kSizes), group, small_buckets());
          Zero zero(ddp.parameters(), sgd(), overlapped(group));
          ddp.register_comm_hook(hook_of(form, ddp, zero, true));
          DistributedDataParallel expected(mlp(kSizes), group);
          SGD plain(expected.parameters(), sgd());
          for (int step = 0; step < 6; ++step) {
            train_once(ddp, world, step);
            if (step < 2) continue;
            train_once(expected, world, step);
            plain.step();
          }
          EXPECT_EQ(zero.overlap_info().assignments_per_rank.size(), 2U);
          expect_same(ddp.parameters(), copies_of(expected.parameters()), "result", kClose);
        }
      },
      {4});
}

// ZERO-63
TEST(ZeroOverlap, FollowsAScheduler) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(Form::kInterleaved, ddp, zero));
        DistributedDataParallel expected(mlp(kSizes), world.group());
        SGD plain(expected.parameters(), sgd());
        torch::optim::StepLR scheduler(zero, 2, 0.3);
        torch::optim::StepLR plain_scheduler(plain, 2, 0.3);
        for (int step = 0; step < 8; ++step) {
          train_once(ddp, world, step);
          if (step >= 2) {
            train_once(expected, world, step);
            plain.step();
          }
          scheduler.step();
          plain_scheduler.step();
        }
        EXPECT_LT(static_cast<SGDOptions&>(zero.param_groups()[0].options()).lr(), 0.01);
        expect_same(ddp.parameters(), copies_of(expected.parameters()), "result", kClose);
      },
      {2});
}

/// What a rank uses of a Branchy model in a step.
struct Use {
  bool left = false;
  bool right = false;
};

template <class Ddp>
void train_branches(Ddp& ddp, const World& world, int step, Use use) {
  zero_grads(ddp);
  ddp(my_rows(random_batch(kRows, 4, 50 + step), world), use.left, use.right).pow(2).mean().backward();
}

// ZERO-64
TEST(ZeroOverlap, LeavesAloneWhatNoRankHasUsed) {
  on_ranks([](const World& world) {
    // Both, left on rank 0 only, and nobody right; then the other way round.
    const auto use = [&](int step) {
      if (step == 0) return Use{true, true};
      return step < 3 ? Use{world.rank() == 0, false} : Use{false, world.rank() + 1 == world.world_size()};
    };
    for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
      for (const bool shards : {false, true}) {
        const DdpOptions options{.bucket_cap_mb = 0.00005, .find_unused_parameters = true};
        DistributedDataParallel ddp(seeded(Branchy()), world.group(), options);
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(form, ddp, zero, shards));
        DistributedDataParallel expected(seeded(Branchy()), world.group(), options);
        SGD plain(expected.parameters(), sgd());
        for (int step = 0; step < 5; ++step) {
          train_branches(ddp, world, step, use(step));
          train_branches(expected, world, step, use(step));
          plain.step();
          expect_same(ddp.parameters(), copies_of(expected.parameters()), "step " + std::to_string(step), kClose);
        }
        EXPECT_GT(zero.overlap_info().params_per_bucket.size(), 1U);
      }
    }
  });
}

// ZERO-64
TEST(ZeroOverlap, LeavesAloneWhatAStaticGraphNeverUses) {
  on_ranks(
      [](const World& world) {
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          const DdpOptions options{.bucket_cap_mb = 0.00005, .static_graph = true};
          DistributedDataParallel ddp(seeded(Branchy()), world.group(), options);
          const auto right = ddp.module()->right->weight.detach().clone();
          Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(form, ddp, zero, true));
          const auto left = ddp.module()->left->weight.detach().clone();
          for (int step = 0; step < 6; ++step) train_branches(ddp, world, step, {true, false});
          EXPECT_TRUE(at::equal(ddp.module()->right->weight, right));
          EXPECT_FALSE(at::equal(ddp.module()->left->weight, left));
        }
      },
      {1, 2, 3});
}

template <class Optimizer>
void expect_overlap_of(const World& world, const typename ZeroRedundancyOptimizer<Optimizer>::LocalOptions& options) {
  SCOPED_TRACE(c10::demangle_type<Optimizer>());
  DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
  ZeroRedundancyOptimizer<Optimizer> zero(ddp.parameters(), options, overlapped(world.group()));
  ddp.register_comm_hook(hook_of(Form::kInterleaved, ddp, zero, true));
  for (int step = 0; step < 6; ++step) train_once(ddp, world, step);
  expect_same(ddp.parameters(), plain_result<Optimizer>(world, 2, 6, options), "result", {1e-4});
}

// ZERO-58, ZERO-59
TEST(ZeroOverlap, StepsAllOptimizersThatHaveAFunctionalForm) {
  on_ranks(
      [](const World& world) {
        expect_overlap_of<torch::optim::Adagrad>(world, {0.01});
        expect_overlap_of<torch::optim::Adam>(world, torch::optim::AdamOptions(0.01).amsgrad(true));
        expect_overlap_of<AdamW>(world, {0.01});
        expect_overlap_of<torch::optim::RMSprop>(world, torch::optim::RMSpropOptions(0.01).momentum(0.5));
        expect_overlap_of<SGD>(world, SGDOptions(0.1).momentum(0.9).nesterov(true));
        expect_overlap_of<optim::Adadelta>(world, {.lr = 0.1});
        expect_overlap_of<optim::Adagrad>(world, {.lr = 0.01, .initial_accumulator_value = 0.5});
        expect_overlap_of<optim::Adam>(world, {.lr = 0.01, .maximize = true});
        expect_overlap_of<optim::Adamax>(world, {.lr = 0.01});
        expect_overlap_of<optim::AdamW>(world, {.lr = 0.01, .amsgrad = true});
        expect_overlap_of<optim::RMSprop>(world, {.lr = 0.01, .centered = true});
        expect_overlap_of<optim::Rprop>(world, {.lr = 0.001});
        expect_overlap_of<optim::SGD>(world, {.lr = 0.1, .momentum = 0.9, .maximize = true});
      },
      {2, 3}, {"threads", "shm"});
}

}  // namespace
}  // namespace lockstep::overlap_test
