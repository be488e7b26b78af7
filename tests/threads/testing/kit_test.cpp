// The rest of the kit: recorder, interposers, delays, subtests, seeds, checks, memory probe. And the kit against a
// broken library.
#include <torch/torch.h>

#include "lockstep/lockstep.h"
#include "lockstep/testing/compiled_test.h"
#include "lockstep/testing/delay.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/interpose.h"
#include "lockstep/testing/memory_probe.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/seeds.h"
#include "lockstep/testing/subtests.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::CheckFailure;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Recorder;
using testing::run_threads;
using testing::Tolerance;
using namespace std::chrono_literals;

// TEST-21: the full product, in a fixed order, alike on all ranks.
LOCKSTEP_THREAD_TEST(Subtests, RunTheFullProductInOrder, 2) {
  std::vector<std::string> seen;
  int resets = 0;
  testing::run_subtests(world, {{"flag", {false, true}}, {"size", {int64_t{1}, int64_t{2}, int64_t{3}}}},
                        [&](const testing::Subtest& subtest) {
                          EXPECT_GT(subtest.get<int64_t>("size"), 0);
                          seen.push_back(subtest.describe());
                        },
                        {.reset = [&] { ++resets; }});
  EXPECT_EQ(resets, 6);
  expect_error([&] { testing::run_subtests(world, {{"size", {}}}, [](const testing::Subtest&) {}); },
               {"'size' has no values"});
  int traced = 0;
  testing::run_subtests_in_gtest(world, {{"n", {int64_t{1}, int64_t{2}}}}, [&](const testing::Subtest&) { ++traced; });
  EXPECT_EQ(traced, 2);
  EXPECT_EQ(seen, (std::vector<std::string>{"flag=false, size=1", "flag=false, size=2", "flag=false, size=3",
                                            "flag=true, size=1", "flag=true, size=2", "flag=true, size=3"}));
}

// TEST-21: a failure shows the values.
TEST(Subtests, ShowTheValuesOfTheOneThatFailed) {
  const auto report = run_threads({.world_size = 2}, [](const World& world) {
    testing::run_subtests(world, {{"dtype", {std::string("half"), std::string("float")}}, {"n", {int64_t{3}}}},
                          [](const testing::Subtest& subtest) {
                            if (subtest.get<std::string>("dtype") == "float") throw CheckFailure("gradients differ");
                          });
  });
  EXPECT_THAT(report.describe(), HasSubstr("subtest 2 of 2 (dtype=float, n=3)"));
  EXPECT_THAT(report.describe(), HasSubstr("gradients differ"));
  const testing::Subtest subtest({{"n", int64_t{3}}});
  expect_error([&] { subtest.get<int64_t>("m"); }, {"no value 'm'", "n=3"});
  expect_error([&] { subtest.get<bool>("n"); }, {"'n' has another type"});
  EXPECT_EQ(testing::Subtest({{"offload", true}, {"n", int64_t{3}}}, {{"offload=true", "offloaded"}}).describe(),
            "offloaded, n=3");
}

// TEST-23: deterministic models come out alike on all ranks and in every build; inputs differ by rank.
LOCKSTEP_THREAD_TEST(Seeds, MakeModelsAlikeAndInputsDifferent, 4) {
  const auto build = [] { return testing::build_deterministically_as([] { return torch::nn::Linear(7, 5); }); };
  const auto one = build();
  const auto two = build();
  EXPECT_TRUE(one->weight.equal(two->weight));
  auto same = one->weight.detach().clone();
  broadcast(same, 0, world.group());
  EXPECT_TRUE(one->weight.equal(same));
  const auto input = at::randn({3}, testing::input_generator(world));
  EXPECT_TRUE(input.equal(at::randn({3}, at::detail::createCPUGenerator(1 + world.rank()))));
  EXPECT_TRUE(at::randn({3}, testing::expert_generator(world))
                  .equal(at::randn({3}, at::detail::createCPUGenerator(42 + world.rank()))));
}

// TEST-23: building does not disturb the default generator, also when it throws.
TEST(Seeds, LeaveTheDefaultGeneratorAsItWas) {
  torch::manual_seed(5);
  const auto expected = torch::randn({3});
  torch::manual_seed(5);
  testing::build_deterministically([] { torch::randn({100}); });
  EXPECT_THROW(testing::build_deterministically([] { throw CheckFailure("no"); }), CheckFailure);
  EXPECT_TRUE(torch::randn({3}).equal(expected));
}

// TEST-24: without a compiler, a warning and eager only; with one, both modes, settings put back; unknown modes
// refused.
LOCKSTEP_THREAD_TEST(CompiledTest, RunsEagerAndCompiled, 1) {
  std::vector<std::string> modes;
  testing::clear_unit_compiler();
  testing::compiled_test(world, [&](const std::string& mode) { modes.push_back(mode); });
  EXPECT_EQ(modes, std::vector<std::string>{"eager"});
  std::string filter = "off";
  testing::set_unit_compiler(
      {.enable = [&](const std::string& type) { filter = type; }, .disable = [&] { filter = "off"; }});
  modes.clear();
  testing::compiled_test(world,
                         [&](const std::string& mode) {
                           modes.push_back(mode);
                           EXPECT_EQ(filter, mode == "eager" ? "off" : "Block");
                         },
                         {.type_filter = "Block"});
  EXPECT_EQ(modes, (std::vector<std::string>{"eager", "compiled"}));
  expect_error(
      [&] { testing::compiled_test(world, [&](const std::string& mode) { TORCH_CHECK(mode == "eager", "broke"); }); },
      {"broke"});
  EXPECT_EQ(filter, "off");
  expect_error([&] { testing::compiled_test(world, [](const std::string&) {}, {.modes = {"turbo"}}); },
               {"no mode 'turbo'"});
  testing::clear_unit_compiler();
}

// TEST-25: tolerance and dtype policy; exact for parameters on the CPU.
TEST(Checks, StateToleranceAndDtype) {
  const auto one = at::ones({4});
  auto near = one.clone();
  near[2] += 5e-7;
  check_equal("w", near, one, Tolerance::of(at::kFloat));
  expect_error([&] { check_equal("fc.weight", near, one); }, {"fc.weight", "largest difference", "element 2"});
  expect_error([&] { testing::check_parameter("fc.weight", near, one); }, {"fc.weight"});
  expect_error([&] { check_equal("w", one, one.to(at::kDouble)); }, {"Float[4]", "Double[4]"});
  check_equal("w", one, one.to(at::kDouble), {.compare_dtype = false});
  expect_error([&] { check_equal("w", one, at::ones({2, 2})); }, {"[4]", "[2, 2]"});
  expect_error([&] { check_equal("w", at::Tensor(), one); }, {"undefined"});
  check_equal("w", at::Tensor(), at::Tensor());
  auto nan = at::full({1}, NAN);
  check_equal("nan", nan, nan.clone());
  expect_error([&] { check_equal("w", nan, at::ones({1})); }, {"inf"});
  const auto large = at::full({1}, int64_t{1} << 53, at::kLong);
  expect_error([&] { check_equal("count", large + 1, large); }, {"count"});
  EXPECT_GT(Tolerance::of(at::kBFloat16).relative, Tolerance::of(at::kHalf).relative);
  EXPECT_EQ(Tolerance::of(at::kLong).relative, 0);
}

// TEST-25: a variant that asserts on one rank only.
TEST(Checks, CanBeMadeOnOneRank) {
  const auto report = run_threads({.world_size = 3}, [](const World& world) {
    testing::check_on_rank(2, world, [] { check_equal("w", at::ones({1}), at::zeros({1})); });
  });
  EXPECT_EQ(report.ranks[2].kind, testing::RankOutcome::Kind::kFailed);
  EXPECT_NE(report.ranks[0].kind, testing::RankOutcome::Kind::kFailed);
}

// TEST-53: events of collectives, with bytes, dtype, group size and order, per rank; off means nothing is seen.
LOCKSTEP_THREAD_TEST(Recorder, SeesWhatItsRankDoes, 2) {
  Recorder recorder;
  all_reduce(at::ones({3}), world.group());
  auto gathered = at::empty({4}, at::kDouble);
  auto pending = launch_all_gather_into_tensor(gathered, at::ones({2}, at::kDouble), world.group());
  announce({.kind = "unshard", .unit = "layers.0", .state = "launch"});
  pending.wait();
  const auto events = recorder.events();
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(events[0].kind, "all_reduce");
  EXPECT_EQ(events[0].state, "launch");
  EXPECT_EQ(events[0].bytes, 12U);
  EXPECT_EQ(events[0].dtype, "Float");
  EXPECT_EQ(events[0].group_size, 2);
  EXPECT_EQ(events[0].group, "world");
  EXPECT_EQ(events[1].state, "done");
  EXPECT_EQ(events[2].kind, "all_gather_into_tensor");
  EXPECT_EQ(events[3].unit, "layers.0");
  EXPECT_EQ(events[4].state, "done");
  for (std::size_t i = 1; i < events.size(); ++i) EXPECT_GT(events[i].order, events[i - 1].order);
  recorder.clear();
  EXPECT_TRUE(recorder.events().empty());
}

// TEST-56: the checks on a record, and what they say when it differs.
LOCKSTEP_THREAD_TEST(Recorder, ChecksOrderCountsAndOverlap, 2) {
  Recorder recorder;
  auto output = at::empty({2});
  auto gather = launch_all_gather_into_tensor(output, at::ones({1}), world.group());
  announce({.kind = "compute", .unit = "layer 1", .state = "launch"});
  gather.wait();
  all_reduce(at::ones({1}), world.group());
  const auto launches = recorder.events("launch");
  testing::expect_exact_order(launches, {"all_gather_into_tensor", "compute(layer 1)", "all_reduce"});
  testing::expect_subset_order(launches, {"all_gather_into_tensor", "all_reduce"});
  testing::expect_count(launches, "compute", 1);
  testing::expect_none(launches, "reduce_scatter_tensor");
  testing::expect_launched_before(launches, "all_gather_into_tensor", "compute(layer 1)");
  expect_error([&] { testing::expect_exact_order(launches, {"all_gather_into_tensor", "all_reduce"}); },
               {"- all_reduce", "+ compute(layer 1)"});
  expect_error([&] { testing::expect_subset_order(launches, {"all_reduce", "compute"}); },
               {"'compute' does not come after"});
  expect_error([&] { testing::expect_count(launches, "all_reduce", 2); }, {"2 times, found 1"});
  expect_error([&] { testing::expect_none(launches, "compute"); }, {"0 times, found 1"});
  expect_error([&] { testing::expect_launched_before(launches, "all_reduce", "compute"); }, {"launched before"});
}

// TEST-55: wrap, delay, replace, fail on the n-th call.
LOCKSTEP_THREAD_TEST(Interposer, DelaysReplacesDropsAndFailsCalls, 2) {
  {
    const auto delayed = testing::delay_calls(CallKind::kAllReduce, 40ms);
    const auto start = std::chrono::steady_clock::now();
    all_reduce(at::ones({1}), world.group());
    EXPECT_GE(std::chrono::steady_clock::now() - start, 40ms);
  }
  {
    const auto doubled = testing::replace_calls(CallKind::kAllReduce, [](const Call& call, const NextCall& next) {
      call.inputs[0].mul_(2);
      return next(call);
    });
    auto tensor = at::ones({1});
    all_reduce(tensor, world.group());
    EXPECT_EQ(tensor.item<float>(), 4);
  }
  {
    const auto dropped = testing::drop_calls(CallKind::kAllReduce);
    auto tensor = at::ones({1});
    all_reduce(tensor, world.group());
    EXPECT_EQ(tensor.item<float>(), 1);
    broadcast(tensor, 0, world.group());
  }
  {
    const auto failing = testing::fail_call(CallKind::kAllReduce, 1, "injected");
    all_reduce(at::ones({1}), world.group());
    expect_error([&] { all_reduce(at::ones({1}), world.group()); }, {"injected"});
    all_reduce(at::ones({1}), world.group());
  }
  auto tensor = at::ones({1});
  all_reduce(tensor, world.group());
  EXPECT_EQ(tensor.item<float>(), 2);
}

// TEST-54: scopes nest, the inner one first, and restore.
LOCKSTEP_THREAD_TEST(Interposer, NestsAndRestores, 2) {
  std::vector<std::string> order;
  const auto note = [&](const std::string& name) {
    return Interposer([&order, name](const Call& call, const GroupPtr&, const NextCall& next) {
      order.push_back(name);
      return next(call);
    });
  };
  {
    const InterposerScope outer(note("outer"));
    {
      const InterposerScope inner(note("inner"));
      barrier(world.group());
    }
    barrier(world.group());
  }
  barrier(world.group());
  EXPECT_EQ(order, (std::vector<std::string>{"inner", "outer", "outer"}));
}

// TEST-54: a throw inside a shared scope on one rank does not hang the others in its closing barrier.
TEST(SharedScope, TakesNoBarrierWhileUnwinding) {
  const auto start = std::chrono::steady_clock::now();
  const auto report = run_threads({.world_size = 2, .collective_timeout = 20s}, [](const World& world) {
    try {
      const auto broken = testing::drop_calls(CallKind::kBroadcast);
      const testing::SharedScope scope(world.group());
      if (world.rank() == 0) throw std::runtime_error("inside the scope");
    } catch (const std::runtime_error&) {
      barrier(world.group());  // meets rank 1's closing barrier
    }
    barrier(world.group());
  });
  EXPECT_TRUE(report.has_passed()) << report.describe();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
}

// TEST-54: no rank runs inside while another is still, or already, outside.
TEST(SharedScope, KeepsRanksInsideTogether) {
  struct Count {
    explicit Count(std::atomic<int>& count) : count_(count) { ++count_; }
    ~Count() { --count_; }
    std::atomic<int>& count_;
  };
  for (uint64_t seed = 0; seed < 5; ++seed) {
    std::atomic<int> installed = 0;
    testing::run_threads_in_gtest({.world_size = 3, .chaos_seed = seed}, [&](const World& world) {
      const Count install(installed);
      const testing::SharedScope scope(world.group());
      EXPECT_EQ(installed, 3);
      all_reduce(at::ones({1}), world.group());
      EXPECT_EQ(installed, 3);
    });
  }
}

// TEST-57: the check sees the output before the collective runs; no output is an error.
LOCKSTEP_THREAD_TEST(Interposer, ChecksReduceScatterOutputs, 2) {
  int checks = 0;
  const auto checked = testing::reduce_scatter_with_assert([&](const at::Tensor& output) {
    ++checks;
    EXPECT_EQ(output.scalar_type(), at::kHalf);
    EXPECT_EQ(output.numel(), 3);
    EXPECT_EQ(output[0].item<float>(), -1);
  });
  auto output = at::full({3}, -1, at::kHalf);
  reduce_scatter_tensor(output, at::ones({6}, at::kHalf), world.group());
  EXPECT_EQ(output[0].item<float>(), 2);
  EXPECT_EQ(checks, 1);
  expect_error([&] { static_cast<void>(launch({.kind = CallKind::kReduceScatter}, world.group())); }, {"no output"});
}

/// Data-parallel training written by hand: the library the kit is tried on.
std::vector<at::Tensor> train(const World& world, const std::function<void(at::Tensor&)>& reduce_gradient,
                              int steps = 3) {
  auto model = testing::build_deterministically_as([] { return torch::nn::Linear(4, 2); });
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto generator = testing::input_generator(world);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model(torch::randn({3, 4}, generator)).pow(2).mean().backward();
    for (auto& parameter : model->parameters()) reduce_gradient(parameter.mutable_grad());
    optimizer.step();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : model->parameters()) result.push_back(parameter.detach().clone());
  return result;
}

/// The same on one rank with everybody's data.
std::vector<at::Tensor> train_alone(int ranks, int steps = 3) {
  auto model = testing::build_deterministically_as([] { return torch::nn::Linear(4, 2); });
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<at::Generator> generators;
  for (int rank = 0; rank < ranks; ++rank)
    generators.push_back(at::detail::createCPUGenerator(testing::kInputSeed + rank));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    std::vector<at::Tensor> batch;
    for (auto& generator : generators) batch.push_back(torch::randn({3, 4}, generator));
    model(torch::cat(batch)).pow(2).mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : model->parameters()) result.push_back(parameter.detach().clone());
  return result;
}

void expect_parity(const World& world, const std::function<void(at::Tensor&)>& reduce_gradient) {
  const auto ours = train(world, reduce_gradient);
  const auto reference = train_alone(world.world_size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    check_equal("parameter " + std::to_string(i), ours[i], reference[i], {.relative = 1e-5, .absolute = 1e-6});
  }
}

void average(at::Tensor& gradient, const World& world) {
  all_reduce(gradient, world.group(), ReduceOp::AVG);
}

// TEST-52: what is right passes, and a dropped reduce, a wrong divisor and a swapped shard are all caught.
TEST(KitSelfTest, CatchesABrokenLibrary) {
  const auto parity_of = [](const std::function<void(at::Tensor&, const World&)>& reduce_gradient, bool drops = false) {
    return run_threads({.world_size = 3}, [&](const World& world) {
      std::optional<InterposerScope> broken;
      if (drops) broken.emplace([](const Call&, const GroupPtr&, const NextCall&) { return Pending(); });
      expect_parity(world, [&](at::Tensor& gradient) { reduce_gradient(gradient, world); });
    });
  };
  const auto good = parity_of(average);
  EXPECT_TRUE(good.has_passed()) << good.describe();
  EXPECT_FALSE(parity_of(average, /*drops=*/true).has_passed()) << "a dropped all-reduce went unnoticed";
  EXPECT_FALSE(parity_of([](at::Tensor& gradient, const World& world) {
                 all_reduce(gradient, world.group());
                 gradient.div_(world.world_size() - 1);
               }).has_passed())
      << "a wrong divisor went unnoticed";
  EXPECT_FALSE(parity_of([](at::Tensor& gradient, const World& world) {
                 // Each rank gets the share of the next one and hands it back as its own.
                 average(gradient, world);
                 auto flat = at::zeros({world.world_size() * 8});
                 flat.slice(0, 0, gradient.numel()).copy_(gradient.reshape({-1}));
                 auto share = flat.slice(0, 8 * ((world.rank() + 1) % 3), 8 * ((world.rank() + 1) % 3) + 8).clone();
                 all_gather_into_tensor(flat, share, world.group());
                 gradient.copy_(flat.slice(0, 0, gradient.numel()).view_as(gradient));
               }).has_passed())
      << "a swapped shard went unnoticed";
}

// TEST-60: delays change nothing; with a wait removed, they do.
TEST(KitSelfTest, DelaysAreHarmlessUnlessAWaitIsMissing) {
  const auto run_delayed = [](bool waits) {
    return run_threads({.world_size = 2, .completes_late = true}, [&](const World& world) {
      const auto late = testing::delay_calls(CallKind::kAllReduce, std::chrono::milliseconds(3 * (world.rank() + 1)));
      std::vector<Pending> unfinished;
      expect_parity(world, [&](at::Tensor& gradient) {
        auto pending = launch_all_reduce(gradient, world.group(), ReduceOp::AVG);
        if (waits) {
          pending.wait();
        } else {
          unfinished.push_back(pending);
        }
      });
    });
  };
  const auto good = run_delayed(true);
  EXPECT_TRUE(good.has_passed()) << good.describe();
  EXPECT_FALSE(run_delayed(false).has_passed());
}

// TEST-59: a sleep takes as long as it says: in the caller on the CPU, on the stream on a GPU.
TEST(Delay, TakesAsLongAsItSays) {
  auto start = std::chrono::steady_clock::now();
  testing::device_sleep(30ms, at::kCPU);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 30ms);
  const at::Device gpu(at::kCUDA, 0);
  if (testing::device_count() == 0) {
    expect_error([&] { testing::device_sleep(1ms, gpu); }, {"cuda:0"});
    GTEST_SKIP() << "the GPU half needs a GPU";
  }
  testing::device_sleep(1ms, gpu);  // calibrates
  at::ones({1}, gpu).item<float>();
  start = std::chrono::steady_clock::now();
  testing::device_sleep(100ms, gpu);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 50ms) << "the host must run ahead";
  at::ones({1}, gpu).item<float>();
  EXPECT_GE(std::chrono::steady_clock::now() - start, 60ms);
}

// TEST-62: bytes by unit and kind, and limits that fail.
TEST(MemoryProbe, CountsByUnitAndKindAndAssertsLimits) {
  const auto before = at::ones({1000});
  testing::MemoryProbe probe;
  {
    const testing::MemoryLabel label("layer 0", "gradients");
    const auto large = at::ones({1 << 16});
    {
      const testing::MemoryLabel inner("layer 1", "activations");
      const auto small = at::ones({1 << 10});
      EXPECT_EQ(probe.total().current_bytes, (1 << 18) + (1 << 12));
    }
  }
  EXPECT_EQ(probe.total().current_bytes, 0);
  EXPECT_EQ(probe.total().peak_bytes, (1 << 18) + (1 << 12));
  EXPECT_EQ((probe.by_label()[{"layer 0", "gradients"}].peak_bytes), 1 << 18);
  EXPECT_EQ((probe.by_label()[{"layer 1", "activations"}].peak_bytes), 1 << 12);
  probe.expect_peak_at_most(1 << 20);
  expect_error([&] { probe.expect_peak_at_most(1 << 18); }, {"layer 0 gradients: peak 262144", "allowed 262144"});
  probe.reset_peak();
  EXPECT_EQ(probe.total().peak_bytes, 0);
}

}  // namespace
}  // namespace lockstep
