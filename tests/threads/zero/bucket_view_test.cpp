// Parameters as views of buckets.
#include <torch/nn/modules/conv.h>

#include "lockstep/base/str.h"
#include "tests/support/ddp_models.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::bucket_view_test {
namespace {

using namespace zero_fixtures;
using ddp_models::mlp;
using ddp_models::random_batch;
using ddp_models::Warnings;
using Zero = ZeroRedundancyOptimizer<torch::optim::Adam>;

ZeroOptions views(const World& world) {
  return {.process_group = world.group(), .parameters_as_bucket_view = true};
}

bool share_storage(const at::Tensor& one, const at::Tensor& other) {
  return one.storage().is_alias_of(other.storage());
}

// ZERO-15
TEST(ZeroBucketViews, HoldEachRanksParametersInOneTensor) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{4, 3}, {5}, {2, 2, 2}, {7}, {1}});
    const auto before = copies_of(parameters);
    Zero optimizer(parameters, {}, views(world));
    expect_same(parameters, before);
    for (const auto& groups : optimizer.partition().partition()) {
      const auto& own = groups[0].params();
      int64_t begin = 0;
      for (const auto& parameter : own) {
        EXPECT_TRUE(share_storage(parameter, own[0]));
        EXPECT_EQ(parameter.storage_offset(), begin);
        EXPECT_TRUE(parameter.is_contiguous());
        EXPECT_TRUE(parameter.is_leaf());
        begin += parameter.numel();
      }
      for (const auto& parameter : parameters) {
        const auto is_own =
            std::any_of(own.begin(), own.end(), [&](const auto& each) { return each.is_same(parameter); });
        EXPECT_EQ(!own.empty() && share_storage(parameter, own[0]), is_own);
      }
    }
  });
}

// ZERO-15
TEST(ZeroBucketViews, OffLeavesParametersWhereTheyAre) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{4, 3}, {5}});
    const std::vector<const void*> before = {parameters[0].data_ptr(), parameters[1].data_ptr()};
    Zero optimizer(parameters, {}, world.group());
    set_gradients(parameters, 1);
    optimizer.step();
    EXPECT_EQ(parameters[0].data_ptr(), before[0]);
    EXPECT_EQ(parameters[1].data_ptr(), before[1]);
  });
}

// ZERO-15, ZERO-26
TEST(ZeroBucketViews, WorkWithDdpBuiltBeforeOrAfter) {
  on_ranks(
      [](const World& world) {
        for (const bool is_before : {true, false}) {
          for (const bool as_gradient_view : {true, false}) {
            const auto plain_model = mlp({4, 6, 3});
            const auto model = mlp({4, 6, 3});
            DistributedDataParallel plain(plain_model, DdpOptions{.process_group = world.group()});
            std::optional<DistributedDataParallel<ddp_models::Mlp>> ddp;
            const DdpOptions options{.process_group = world.group(), .gradient_as_bucket_view = as_gradient_view};
            if (is_before) ddp.emplace(model, options);
            Zero optimizer(model->parameters(), {0.01}, views(world));
            if (!is_before) ddp.emplace(model, options);
            torch::optim::Adam expected(plain_model->parameters(), 0.01);
            for (int step = 0; step < 5; ++step) {
              const auto input = random_batch(3, 4, 10 * step + world.rank());
              optimizer.zero_grad();
              expected.zero_grad();
              (*ddp)(input).pow(2).mean().backward();
              plain(input).pow(2).mean().backward();
              optimizer.step();
              expected.step();
              expect_same(model->parameters(), plain_model->parameters(), str("step ", step));
            }
          }
        }
      },
      {1, 2, 3});
}

// ZERO-16
TEST(ZeroBucketViews, GiveFrozenParametersMemoryOfTheirOwn) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{8}, {6}, {4}});
    parameters[0].requires_grad_(false);
    const auto before = copies_of(parameters);
    const Zero optimizer(parameters, {}, views(world));
    expect_same(parameters, before);
    EXPECT_EQ(parameters[0].storage().nbytes(), 8 * sizeof(float));
    for (const auto i : {1, 2}) EXPECT_FALSE(share_storage(parameters[0], parameters[i]));
  });
}

// ZERO-16
TEST(ZeroBucketViews, WorkWhereARankHasNothingTrainable) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{8}, {3}});
        parameters[0].requires_grad_(false);
        const auto expected = copies_of(parameters);
        Zero optimizer(parameters, {}, views(world));
        torch::optim::Adam plain(expected);
        expect_same_steps(optimizer, plain, parameters, expected, 2);
        EXPECT_EQ(optimizer.memory_report().buckets, (3 + world.world_size() - 1) * static_cast<int64_t>(sizeof(float)))
            << "one element for each rank without any";
      },
      {2, 3, 4});
}

// ZERO-17
TEST(ZeroBucketViews, KeepStridesOfDenseParameters) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto make = [] {
        auto parameters = parameters_of({{3}, {4, 3, 2, 2}, {5, 4}});
        parameters[1] = parameters[1].detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
        parameters[2] = parameters[2].detach().t().requires_grad_();
        return parameters;
      };
      const auto expected = make();
      const auto parameters = make();
      Zero optimizer(parameters, {}, zero);
      torch::optim::Adam plain(expected);
      expect_same_steps(optimizer, plain, parameters, expected, 3, name);
      for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(parameters[i].strides(), expected[i].strides()) << name;
      optimizer.consolidate_state_dict();
      if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
    }
  });
}

// ZERO-17
TEST(ZeroBucketViews, MakeParametersWithGapsContiguous) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto wide = parameters_of({{4, 6}})[0].detach();
      const std::vector<at::Tensor> parameters = {wide.narrow(1, 1, 3).requires_grad_()};
      const auto expected = copies_of(parameters);
      Zero optimizer(parameters, {}, zero);
      torch::optim::Adam plain(expected);
      expect_same_steps(optimizer, plain, parameters, expected, 3, name);
    }
  });
}

// ZERO-19, ZERO-34
TEST(ZeroBucketViews, AreRebuiltWhenParametersAreFrozenOrAdded) {
  on_ranks([](const World& world) {
    const auto parameters = parameters_of({{8}, {6}, {4}, {2}});
    const auto more = parameters_of({{3}, {3}}, 9);
    Zero optimizer(parameters, {}, views(world));
    const auto* bucket = parameters[3].storage().data();
    parameters[1].requires_grad_(false);
    auto before = copies_of(parameters);
    {
      const Warnings warnings;
      optimizer.zero_grad();
      optimizer.step();
      EXPECT_EQ(warnings.count("frozen or are trainable now"), 1);
      optimizer.step();
      EXPECT_EQ(warnings.count("frozen or are trainable now"), 1) << "only when it changes";
    }
    expect_same(parameters, before);
    EXPECT_NE(parameters[3].storage().data(), bucket);
    for (const auto i : {0, 2, 3}) EXPECT_FALSE(share_storage(parameters[1], parameters[i]));
    parameters[1].requires_grad_(true);
    optimizer.step();
    expect_same(parameters, before);
    optimizer.add_param_group({more});
    expect_same(parameters, before);
    const auto owner = optimizer.partition().param_to_rank().at(more[0].unsafeGetTensorImpl());
    EXPECT_TRUE(share_storage(more[0], optimizer.partition().partition()[owner][1].params()[0]));
    for (const auto& parameter : optimizer.partition().partition()[owner][0].params()) {
      EXPECT_TRUE(share_storage(more[0], parameter)) << "one bucket for all groups of a rank";
    }
  });
}

}  // namespace
}  // namespace lockstep::bucket_view_test
