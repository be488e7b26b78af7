// Flat parameters are known by the names of what they consist of.
#include "lockstep/testing/fsdp/nested_models.h"
#include "lockstep/testing/fsdp/transformer.h"

namespace lockstep::fsdp_flat_names_test {

std::shared_ptr<testing::NestedWrappedModule> flat_model(const World& world) {
  auto options = testing::with_mesh({.use_orig_params = false}, world.group());
  auto model = testing::NestedWrappedModule::init(
      world.group(), {.fsdp_init_mode = testing::FsdpInitMode::kRecursive, .fsdp = options, .deterministic = true});
  fully_shard(*model, options);
  return model;
}

// FSDP-79: summoned parameters are those of the module, also if it registers flat ones.
LOCKSTEP_THREAD_TEST(FsdpFlatNames, SummonedParametersOfFlatOnesHaveTheOriginalNames, 2) {
  const auto whole = testing::NestedWrappedModule::init(world.group(), {.deterministic = true});
  const auto model = flat_model(world);
  const auto summoned = unit_of(*model)->summon_full_params();
  EXPECT_EQ(model->named_parameters().keys(), whole->named_parameters().keys());
}

// FSDP-75, FSDP-76: the state of a module with tied parameters has both names, and loads into a flat one as well.
LOCKSTEP_THREAD_TEST(FsdpFlatNames, FlatParametersKnowSecondNamesOfTiedOnes, 2) {
  const auto whole = testing::TransformerWithSharedParams::init(world.group(), {.deterministic = true});
  const auto model = testing::TransformerWithSharedParams::init(
      world.group(), {.fsdp_init_mode = testing::FsdpInitMode::kRecursive, .fsdp = {.use_orig_params = false}});
  load_full_state_dict(*model, full_state_dict(*whole));
  EXPECT_TRUE(full_state_dict(*model).contains("output_proj.weight"));
}

}  // namespace lockstep::fsdp_flat_names_test
