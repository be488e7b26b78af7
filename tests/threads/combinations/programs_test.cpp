// Training programs composed of every pair of models, optimizers, options, loops and events, each compared with one
// process. LOCKSTEP_COMBINATIONS asks for others: see docs/testing.md.
#include <chrono>
#include <iostream>
#include <map>

#include "lockstep/testing/combinations/trainer.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/interpose.h"

namespace lockstep::testing::combinations {
namespace {

constexpr std::chrono::seconds kRunTimeout{60};
constexpr std::chrono::seconds kCollectiveTimeout{15};

RunReport run(const Combination& combination) {
  return run_threads(
      {.world_size = world_size_of(combination), .timeout = kRunTimeout, .collective_timeout = kCollectiveTimeout},
      [&](const World& world) { run_program(world, combination); });
}

TEST(Combinations, TrainAsOneProcessOrAreRefused) {
  const auto list = asked_for();
  std::map<Combination, std::string> faults;  // by the smallest program that fails
  for (const auto& combination : list) {
    std::string text;
    const auto fails = [&](const Combination& each) {
      const auto report = run(each);
      if (!report.has_passed()) text = report.describe();
      return !report.has_passed();
    };
    if (!fails(combination)) continue;
    const auto smallest = programs().shrunk(combination, fails);
    faults.emplace(smallest, text + description_of(smallest) + "seen in " + programs().describe(combination));
  }
  for (const auto& [smallest, text] : faults) ADD_FAILURE() << text;
  std::cout << list.size() << " programs, " << faults.size() << " faults\n";
}

// What took three values to fail, and no list of pairs is sure to hold.
TEST(Combinations, ThatFailedOnceTrain) {
  for (const std::string text :
       {"model=plain, wrapper=fully_shard kept, loop=forward for the log, event=unfreeze, world=2",
        "model=two models, wrapper=fully_shard kept, loop=evaluation between, event=freeze, world=2",
        "model=plain, wrapper=fully_shard kept, loop=forward for the log, event=load, world=3",
        "model=plain, wrapper=fully_shard kept, loop=evaluation between, event=to, world=3",
        "model=plain, wrapper=fully_shard, loop=weighted, inputs=uneven, world=2",
        "model=sparse, wrapper=mixed_precision, inputs=uneven, world=2",
        "model=shared storage, wrapper=delayed, loop=backward throws, world=2",
        "model=branches by step, wrapper=fsdp+tp, event=unfreeze, world=2"}) {
    const auto report = run(programs().parse(text));
    EXPECT_TRUE(report.has_passed()) << text << "\n" << report.describe();
  }
}

// The one process plays ranks one after the other; on samples that know nothing of each other that is the whole batch.
TEST(Combinations, OneProcessTrainsOnTheWholeBatch) {
  const auto program = program_of(programs().parse("model=plain, world=3"));
  const auto expected = train_in_one_process(program);
  const auto model = make_nets(program.kind, kFirstSeed).front();
  const auto optimizer = program.way.make(model.net->unique_parameters(), program.kind, {});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto whole = at::cat({batch_of(step, 0), batch_of(step, 1), batch_of(step, 2)});
    (model.forward(whole, 0) - 1).pow(2).mean().backward();
    optimizer.step();
    Snapshot now;
    for (const auto& each : model.net->named_parameters()) now.emplace_back(each.key(), each.value());
    EXPECT_EQ(difference(now, expected[step + 1], 1e-5), "") << "step " << step;
    EXPECT_NE(difference(now, expected[step], 1e-2), "") << "a step changes more than any tolerance, step " << step;
  }
}

TEST(Combinations, AreRefusedInAWorldOfAnotherSize) {
  const auto report = run_threads({.world_size = 2, .timeout = kRunTimeout}, [](const World& world) {
    expect_error([&] { run_program(world, programs().parse("model=plain, world=3")); },
                 {"one for 3 ranks", "this world has 2", "\"world=2\""});
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
}

// A library that forgets to average must not pass.
TEST(Combinations, SayWhatDiffersAndInWhichProgram) {
  const auto combination = programs().parse("model=tied, way=parameters, loop=accumulate, event=load, world=2");
  const auto report = run_threads({.world_size = 2}, [&](const World& world) {
    const auto lost = drop_calls(CallKind::kAllReduce);
    run_program(world, combination);
  });
  EXPECT_FALSE(report.has_passed());
  const auto text = report.describe() + description_of(combination);
  for (const auto* part :
       {"rank 1, after step 0: again[", "] is ", " instead of ", "LOCKSTEP_COMBINATIONS=\"model=tied, way=p",
        "std::make_shared<TiedNet>()", "ddp.no_sync()", "optimizer.step();", "torch::load(net"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 25) << text;
}

}  // namespace
}  // namespace lockstep::testing::combinations
