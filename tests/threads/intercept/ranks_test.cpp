// Interception among ranks as threads: what one rank sees, owns or defers is no business of the others.
#include <mutex>

#include "lockstep/intercept/deferred_init.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_counter.h"
#include "lockstep/intercept/storage_owner.h"
#include "lockstep/testing/seeds.h"

namespace lockstep {
namespace {

LOCKSTEP_RANK_TEST(Intercept, CountersOfRanksAreApart, 3) {
  OperatorCounter counter;
  auto weight = torch::ones({4, 4}, torch::requires_grad());
  const auto calls = world.rank() + 1;
  for (int i = 0; i < calls; ++i) {
    const auto counting = counter.count();
    weight.mm(weight).sum().backward();
  }
  weight.mm(weight);
  EXPECT_EQ(counter.counts().at("aten::mm").calls, 3 * calls);
}

class Counting : public StorageOwner {
 public:
  void before_operator(OperatorCall&, c10::ArrayRef<TouchedTensor>) override { ++calls; }
  int calls = 0;
};

LOCKSTEP_RANK_TEST(Intercept, OwnersOfRanksAreApart, 3) {
  const auto owner = std::make_shared<Counting>();
  const auto tensor = torch::ones({8});
  const OwnedStorage ownership(tensor, owner);
  for (int i = 0; i < 200; ++i) tensor.neg();
  EXPECT_EQ(owner->calls, 200);
}

LOCKSTEP_RANK_TEST(Intercept, RanksDeferAndMaterialiseTheSameBits, 3) {
  const auto make = [] { return torch::nn::Linear(16, 8); };
  const auto ordinary = testing::build_deterministically_as(make);
  const auto deferred = testing::build_deterministically_as([&] { return deferred_init(make); });
  EXPECT_TRUE(is_deferred(deferred->weight));
  // Rank threads share the generator, which the last draw of a build moves on: no rank may still be building.
  barrier(world.group());
  materialize_module(*deferred);  // all ranks at once
  EXPECT_TRUE(at::equal(deferred->weight, ordinary->weight));
  EXPECT_TRUE(at::equal(deferred->bias, ordinary->bias));
}

LOCKSTEP_RANK_TEST(Intercept, CollectivesSayThatDeferredTensorsHaveNoMemory, 2) {
  const auto tensor = deferred_init([] { return torch::ones({3}); });
  testing::expect_error([&] { all_reduce(tensor); }, {"no memory", "materialize_module()"});
  materialize_tensor(tensor);
  all_reduce(tensor);
  EXPECT_EQ(tensor[0].item<float>(), 2);
}

}  // namespace
}  // namespace lockstep
