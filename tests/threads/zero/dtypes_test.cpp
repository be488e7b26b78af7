// Parameters of several dtypes in one optimizer.
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/zero_dtype_fixtures.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep::dtypes_test {
namespace {

using namespace zero_fixtures;
using namespace zero_dtype_fixtures;
using testing::expect_error;
using torch::optim::AdamW;
using torch::optim::SGD;
using torch::optim::SGDOptions;

const std::vector<at::ScalarType> kSeveral = {at::kBFloat16, at::kFloat, at::kDouble};

/// libtorch's own kernels round the last elements of tensors of half types, which do not fill a vector, more often than
/// the others, and slices end elsewhere than parameters.
constexpr Within kLowSlices{1e-2};

std::vector<std::pair<std::string, ZeroOptions>> all_ways(const GroupPtr& group) {
  auto all = ways(group);
  all.emplace_back("replicated", ZeroOptions{.process_group = group, .stage = ZeroStage::kReplicated});
  return all;
}

// ZERO-73: every parameter is stepped in its own dtype
TEST(ZeroDtypes, SeveralAreSteppedAsByThePlainOptimizer) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : all_ways(world.group())) {
          const auto parameters = mixed_parameters(kSeveral);
          const auto expected = copies_of(parameters);
          ZeroRedundancyOptimizer<AdamW> optimizer(parameters, adamw(), zero);
          AdamW plain(expected, adamw());
          expect_same_steps(optimizer, plain, parameters, expected, 4, name);
          for (std::size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_EQ(parameters[i].scalar_type(), expected[i].scalar_type()) << name;
          }
          optimizer.consolidate_state_dict(0);
          if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
        }
      },
      {1, 2, 3}, {"threads", "shm"});
}

// ZERO-73: large ones are sent one by one, whatever they are
TEST(ZeroDtypes, LargeParametersOfSeveralAreSent) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          auto parameters = parameters_of({{400, 400}, {7}, {300, 500}, {9}});
          parameters[0] = parameters[0].detach().to(at::kBFloat16).requires_grad_();
          parameters[3] = parameters[3].detach().to(at::kDouble).requires_grad_();
          const auto expected = copies_of(parameters);
          ZeroRedundancyOptimizer<SGD> optimizer(parameters, SGDOptions(0.1).momentum(0.9), zero);
          SGD plain(expected, SGDOptions(0.1).momentum(0.9));
          for (int step = 0; step < 2; ++step) {
            set_gradients(parameters, step);
            set_gradients(expected, step);
            optimizer.step();
            plain.step();
            expect_same(parameters, expected, name, name == "elements" ? kLowSlices : Within());
          }
        }
      },
      {2, 3}, {"threads"});
}

// ZERO-73: groups and dtypes that come later
TEST(ZeroDtypes, AnotherMayComeWithAGroupThatIsAdded) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : all_ways(world.group())) {
          auto parameters = mixed_parameters({at::kFloat});
          auto expected = copies_of(parameters);
          ZeroRedundancyOptimizer<SGD> optimizer(parameters, SGDOptions(0.1).momentum(0.9), zero);
          SGD plain(expected, SGDOptions(0.1).momentum(0.9));
          expect_same_steps(optimizer, plain, parameters, expected, 2, name);
          const auto added = mixed_parameters(kSeveral, 5);
          const auto added_expected = copies_of(added);
          optimizer.add_param_group({added});
          plain.add_param_group(torch::optim::OptimizerParamGroup(added_expected));
          parameters.insert(parameters.end(), added.begin(), added.end());
          expected.insert(expected.end(), added_expected.begin(), added_expected.end());
          expect_same_steps(optimizer, plain, parameters, expected, 2, name);
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: DDP's buckets have one dtype each, and so have the blocks of the second stage
TEST(ZeroDtypes, SeveralAreDividedWithTheirGradients) {
  on_ranks(
      [](const World& world) {
        const auto train = [&](auto& ddp, torch::optim::Optimizer& optimizer) {
          for (int step = 0; step < 4; ++step) {
            optimizer.zero_grad();
            {
              const auto guard = ddp.no_sync();
              loss_of(ddp, world, 50 + step).backward();
            }
            loss_of(ddp, world, step).backward();
            optimizer.step();
          }
        };
        DistributedDataParallel plain_ddp(MixedMlp(), small_buckets());
        AdamW plain(plain_ddp.parameters(), adamw());
        train(plain_ddp, plain);
        for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel ddp(MixedMlp(), small_buckets());
          ZeroRedundancyOptimizer<AdamW> zero(ddp.parameters(), adamw(), {.stage = stage, .ddp = ddp});
          train(ddp, zero);
          expect_same(ddp.parameters(), plain_ddp.parameters(), std::to_string(static_cast<int>(stage)),
                      stage == ZeroStage::kGradients ? kLowSlices : Within());
        }
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73: the step that is part of backward
TEST(ZeroDtypes, SeveralAreSteppedInBackward) {
  using namespace zero_overlap_fixtures;
  on_ranks(
      [](const World& world) {
        DistributedDataParallel plain_ddp(MixedMlp(), {.bucket_cap_mb = 0.002, .find_unused_parameters = true});
        optim::SGD plain(plain_ddp.parameters(), {.lr = 0.1, .momentum = 0.9});
        DistributedDataParallel ddp(MixedMlp(), {.bucket_cap_mb = 0.002, .find_unused_parameters = true});
        ZeroRedundancyOptimizer<optim::SGD> zero(ddp.parameters(), {.lr = 0.1, .momentum = 0.9},
                                                 {.overlap_with_ddp = true});
        ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(world.group()), ddp, zero));
        for (int step = 0; step < 4; ++step) {
          plain.zero_grad();
          zero.zero_grad();
          loss_of(plain_ddp, world, step).backward();
          plain.step();
          loss_of(ddp, world, step).backward();
        }
        expect_same(ddp.parameters(), plain_ddp.parameters(), "", {1e-6});
      },
      {1, 2, 3}, {"threads"});
}

// ZERO-73
TEST(ZeroDtypes, ParametersMustKeepThem) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : all_ways(world.group())) {
          const auto parameters = mixed_parameters(kSeveral);
          ZeroRedundancyOptimizer<SGD> optimizer(parameters, {0.1}, zero);
          parameters[1].set_data(parameters[1].detach().to(at::kBFloat16));
          const auto before = copies_of(parameters);
          set_gradients(parameters, 1);
          expect_error([&] { optimizer.step(); }, {"parameter 1 ", "BFloat16", "Float"});
          expect_same(parameters, before, name);
        }
      },
      {1, 2, 3}, {"threads"});
}

}  // namespace
}  // namespace lockstep::dtypes_test
