// Random module trees, options and steps against one process; and worlds too large to run.
#include "lockstep/base/str.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/fsdp/memory_plan.h"
#include "lockstep/testing/fsdp/random_programs.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::fsdp_random_test {

using namespace testing;
using ::testing::HasSubstr;

/// LOCKSTEP_FSDP_PROGRAMS=500:100 runs a hundred from seed 500.
std::pair<uint64_t, uint64_t> first_and_count() {
  uint64_t first = 0;
  uint64_t count = 60;
  if (const char* text = std::getenv("LOCKSTEP_FSDP_PROGRAMS")) {
    std::string rest = text;
    first = std::stoull(rest);
    const auto colon = rest.find(':');
    count = colon == std::string::npos ? 1 : std::stoull(rest.substr(colon + 1));
  }
  return {first, count};
}

// TEST-64, FSDP-2, FSDP-65
TEST(FsdpRandom, ProgramsTrainAsOneProcess) {
  const auto [first, count] = first_and_count();
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(str("LOCKSTEP_FSDP_PROGRAMS=", seed));
    EXPECT_NO_THROW(check_program(random_program(seed)));
  }
}

// TEST-64
TEST(FsdpRandom, FailuresShrink) {
  EXPECT_EQ(random_program(7), random_program(7));
  EXPECT_NE(random_program(7).describe(), random_program(8).describe());
  // A library that divides wrongly if there are several ranks: nothing else of the program is needed.
  const AroundRank breaks = [](const World& world, const std::function<void()>& body) {
    if (world.world_size() == 1) return body();
    const auto broken = replace_calls(CallKind::kReduceScatterSingle, [](const Call& call, const NextCall& next) {
      const at::NoGradGuard no_grad;
      call.inputs[0].mul_(1.5);
      return next(call);
    });
    body();
  };
  RandomProgram program = random_program(12);
  program.world_size = 3;
  program.steps.push_back(RandomProgram::Step::kAccumulate);
  const auto message = expect_error([&] { check_program(program, breaks); }, {"differs from one process"});
  EXPECT_THAT(message, HasSubstr("2 ranks: train; linear\n"));
  EXPECT_THAT(message, HasSubstr(program.describe()));
  const auto small = simplest(random_program(3), [](const RandomProgram& each) {
    return each.world_size > 2 && each.describe().find("idle") == std::string::npos && each.steps.size() > 1;
  });
  EXPECT_EQ(small.describe(), "3 ranks: train, train; linear");
  // Options too, each by itself.
  for (bool RandomProgram::*option : {&RandomProgram::is_flat, &RandomProgram::cuts_columns, &RandomProgram::is_low}) {
    RandomProgram all = random_program(3);
    all.is_flat = all.cuts_columns = all.is_low = true;
    const auto needed = simplest(all, [&](const RandomProgram& each) { return each.*option; });
    EXPECT_EQ(needed.is_flat + needed.cuts_columns + needed.is_low, 1);
    EXPECT_TRUE(needed.*option);
  }
}

// TEST-64: on one of 1024 ranks, which the others need not be there for.
TEST(FsdpRandom, PretendWorldsCutAndCallAsRealOnes) {
  for (const int rank : {0, 699, 700, 1023}) {
    const auto fake = make_fake_group(rank, 1024);
    MLPStack model(700);
    model->parallelize(std::nullopt, DeviceMesh::from_group(fake.group, "cpu"), false);
    const auto rows = [&](const std::string& name) { return model->named_parameters()[name].size(0); };
    EXPECT_EQ(rows("0.in_proj.weight"), rank < 700 ? 3 : 0);  // of 2100
    EXPECT_EQ(rows("1.in_proj.weight"), rank * 3 < 2800 ? std::min(3, 2800 - rank * 3) : 0);
    EXPECT_EQ(rows("1.out_proj.weight"), rank < 700 ? 1 : 0);
    EXPECT_TRUE(fake.backend->calls().empty());
    // Plans need no memory but the shards: of 2100 x 700 and 700 x 2100 floats, and their biases.
    const auto plan = memory_plan(*model);
    EXPECT_EQ(plan.units.size(), 4U);
    EXPECT_GE(plan.units[0].whole, int64_t{4} * (2 * 2100 * 700 + 2100 + 700));
    EXPECT_GE(plan.units[0].shards * 1024, plan.units[0].whole);
    EXPECT_LT(plan.units[0].shards, 4 * (4 * 700 + 2200));
    EXPECT_GT(plan.peak, plan.units[1].whole + plan.between_steps);
  }
  const auto fake = make_fake_group(5, 1024);
  MLPStack model(6);
  model->parallelize(std::nullopt, DeviceMesh::from_group(fake.group, "cpu"), false);
  model->forward(at::ones({1, 6})).sum().backward();
  std::map<CallKind, int> counts;
  for (const auto& call : fake.backend->calls()) ++counts[call.kind];
  EXPECT_EQ(counts[CallKind::kReduceScatterSingle], 3);
  EXPECT_GE(counts[CallKind::kAllGatherSingle], 5);
  EXPECT_EQ(counts.size(), 2U);
}

}  // namespace lockstep::fsdp_random_test
