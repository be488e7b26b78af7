// Iterations inside a Join scope, on live and on joined ranks, over every backend for CPU tensors.
#include "lockstep/testing/recorder.h"
#include "tests/support/join_fixtures.h"

namespace lockstep {
namespace {

using namespace join_fixtures;
using testing::expect_error;
using testing::Recorder;

struct Where {
  std::string backend;
  int world_size;
};

void PrintTo(const Where& where, std::ostream* out) {
  *out << where.backend << ", " << where.world_size << " ranks";
}

class JoinIterations : public ::testing::TestWithParam<Where> {
 protected:
  static void run(const testing::RankBody& body) {
    testing::run_threads_in_gtest({.world_size = GetParam().world_size, .backend = GetParam().backend}, body);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, JoinIterations,
                         ::testing::Values(Where{"threads", 1}, Where{"threads", 2}, Where{"threads", 3},
                                           Where{"threads", 4}, Where{"shm", 2}, Where{"shm", 3}, Where{"shm", 4},
                                           Where{"gloo", 2}, Where{"gloo", 3}),
                         [](const auto& info) { return info.param.backend + std::to_string(info.param.world_size); });

struct Fixture {
  explicit Fixture(const World& world, std::size_t count = 1, AllReducerHooks hooks = {}) {
    for (std::size_t i = 0; i < count; ++i) {
      reducers.push_back(std::make_unique<AllReducer>(world.group(), "reducer " + std::to_string(i), hooks));
      joinables.push_back(reducers.back().get());
    }
  }
  /// As many iterations, each of all joinables; returns the sum of all that was seen.
  double iterate(int64_t iterations) {
    double total = 0;
    for (; completed < iterations; ++completed) {
      for (const auto& reducer : reducers) total += (*reducer)();
    }
    return total;
  }
  AllReducer& first() { return *reducers[0]; }

  std::vector<std::unique_ptr<AllReducer>> reducers;
  std::vector<Joinable*> joinables;
  int64_t completed = 0;
};

/// "main" as often as this rank mirrors, then "post", for a rank with 3 + rank inputs.
std::vector<std::string> expected_events(const World& world) {
  std::vector<std::string> events(world.world_size() - 1 - world.rank(), "main");
  events.emplace_back(events.empty() ? "post 1" : "post 0");
  return events;
}

// JOIN-49, JOIN-18, JOIN-20, JOIN-21
TEST_P(JoinIterations, EveryRankSumsWhatTheLiveRanksGive) {
  run([](const World& world) {
    for (const std::size_t joinables : {1, 3}) {
      for (const int64_t times : {1, 2}) {
        Fixture fixture(world, joinables);
        double total = 0;
        Join(fixture.joinables, {.options = {.extra = {{"num_allreduces", times}}}}).run([&] {
          total = fixture.iterate(3 + world.rank());
        });
        EXPECT_EQ(total, expected_total(world.rank(), world.world_size()) * times * joinables);
        for (const auto& reducer : fixture.reducers) {
          EXPECT_EQ(reducer->events, expected_events(world));
          EXPECT_EQ(reducer->final_value.item<double>(), kAfter);
        }
      }
    }
  });
}

// JOIN-49
TEST_P(JoinIterations, MainHooksAlone) {
  run([](const World& world) {
    Fixture fixture(world, 3, {.has_post = false});
    double total = 0;
    Join(fixture.joinables).run([&] { total = fixture.iterate(3 + world.rank()); });
    EXPECT_EQ(total, 3 * expected_total(world.rank(), world.world_size()));
    EXPECT_EQ(fixture.first().final_value.item<double>(), kBefore);
  });
}

// JOIN-49
TEST_P(JoinIterations, PostHooksAlone) {
  run([](const World& world) {
    Fixture fixture(world, 3, {.has_main = false});
    Join(fixture.joinables, {.options = {.extra = {{"num_allreduces", 0}}}}).run([&] {
      fixture.iterate(3 + world.rank());
    });
    for (const auto& reducer : fixture.reducers) EXPECT_EQ(reducer->final_value.item<double>(), kAfter);
  });
}

// JOIN-49, JOIN-16, JOIN-23
TEST_P(JoinIterations, ADisabledScopeCostsNothing) {
  run([](const World& world) {
    for (const std::size_t joinables : {1, 3}) {
      Fixture fixture(world, joinables);
      const Recorder recorder;
      double total = 0;
      const auto report = Join(fixture.joinables, {.enable = false}).run([&] { total = fixture.iterate(4); });
      EXPECT_EQ(total, 4.0 * static_cast<double>(joinables) * world.world_size());
      EXPECT_EQ(recorder.events("launch").size(), 4 * joinables) << "the joinables' own and no other";
      EXPECT_TRUE(fixture.first().events.empty());
      EXPECT_FALSE(fixture.first().tally.is_open());
      EXPECT_EQ(report.own_iterations, 0);
      EXPECT_FALSE(report.authoritative_rank);
    }
  });
}

// JOIN-16
TEST_P(JoinIterations, NotifyOutsideAScopeCostsNothing) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    const Recorder recorder;
    EXPECT_FALSE(Join::notify(reducer).is_open());
    EXPECT_FALSE(Join::current_tally(reducer).is_open());
    EXPECT_FALSE(Join::own_tally(reducer).is_open());
    EXPECT_TRUE(recorder.events().empty());
    expect_error([] { JoinTally().live_count(); }, {"this tally is empty"});
    expect_error([&] { Join::authoritative_rank(reducer); }, {"outside a post hook"});
  });
}

// JOIN-9, JOIN-54
TEST_P(JoinIterations, CostOneControlMessageEach) {
  run([](const World& world) {
    const auto skew = static_cast<std::size_t>(world.world_size() - 1 - world.rank());
    for (const std::size_t joinables : {1, 3}) {
      for (const bool has_limit : {false, true}) {
        Fixture fixture(world, joinables, {.has_post = false});
        Recorder recorder;
        Join scope(fixture.joinables, {.max_mirrored_iterations = has_limit ? std::optional(100) : std::nullopt});
        EXPECT_TRUE(recorder.events().empty()) << "opening is local";
        fixture.iterate(3 + world.rank());
        const auto own = static_cast<std::size_t>(3 + world.rank());
        EXPECT_EQ(recorder.events("launch").size(), own * (1 + joinables));
        EXPECT_TRUE(fixture.first().tally.is_open());
        EXPECT_EQ(fixture.reducers.back()->tally.is_open(), joinables == 1);
        recorder.clear();
        scope.finish();
        EXPECT_EQ(recorder.events("launch").size(), skew * (1 + joinables) + 1) << "and one to see that nobody is left";
      }
    }
  });
}

// JOIN-12, JOIN-13, JOIN-59
TEST_P(JoinIterations, TheTallyCountsLiveAndReducingRanks) {
  run([](const World& world) {
    const int size = world.world_size();
    Fixture fixture(world);
    // Odd ranks do not reduce in every second iteration.
    const auto reduces = [](int rank, int iteration) { return rank % 2 == 0 || iteration % 2 == 0; };
    std::vector<int> live;
    std::vector<int> reducing;
    for (int iteration = 0; iteration < 2 + size; ++iteration) {
      int live_now = 0;
      int reducing_now = 0;
      for (int rank = 0; rank < size; ++rank) {
        if (iteration >= 3 + rank) continue;
        ++live_now;
        reducing_now += reduces(rank, iteration) ? 1 : 0;
      }
      live.push_back(live_now);
      reducing.push_back(reducing_now);
    }
    std::vector<int> seen_live;
    std::vector<int> seen_reducing;
    const auto report = Join(fixture.joinables).run([&] {
      for (int i = 0; i < 3 + world.rank(); ++i) {
        fixture.first()({.will_reduce = reduces(world.rank(), i)});
        seen_live.push_back(fixture.first().tally.live_count());
        seen_reducing.push_back(fixture.first().tally.reducing_count());
        EXPECT_EQ(fixture.first().tally.live_ranks().back(), size - 1);
      }
    });
    const auto& reducer = fixture.first();
    seen_live.insert(seen_live.end(), reducer.mirrored_live_counts.begin(), reducer.mirrored_live_counts.end());
    seen_reducing.insert(seen_reducing.end(), reducer.mirrored_reducing_counts.begin(),
                         reducer.mirrored_reducing_counts.end());
    EXPECT_EQ(seen_live, live);
    EXPECT_EQ(seen_reducing, reducing);
    EXPECT_EQ(report.live_counts, live);
    EXPECT_EQ(report.own_iterations, 3 + world.rank());
    EXPECT_EQ(report.mirrored_iterations, size - 1 - world.rank());
    EXPECT_EQ(report.authoritative_rank, size - 1);
  });
}

// JOIN-59
TEST_P(JoinIterations, TheReportIsCompleteWhenNobodyAskedForATally) {
  run([](const World& world) {
    Fixture fixture(world);
    // More than a scope keeps unread.
    const auto report = Join(fixture.joinables).run([&] { fixture.iterate(300); });
    EXPECT_EQ(report.live_counts, std::vector<int>(300, world.world_size()));
  });
}

// JOIN-54
TEST_P(JoinIterations, ALiveRankDoesNotWaitForTheMessage) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    Join scope({&reducer});
    if (world.rank() == 0) {
      Join::notify(reducer);
      world.store()->set("is past notify", "yes");
      all_reduce(at::ones({1}), world.group());
    } else {
      // Would wait for ever if rank 0 waited for this rank's part of the message.
      world.store()->wait({"is past notify"}, std::chrono::seconds(30));
    }
    const auto report = scope.finish();
    EXPECT_EQ(report.live_counts, std::vector<int>{1});
  });
}

// JOIN-54
TEST_P(JoinIterations, ALiveRankMayBeIterationsAhead) {
  run([](const World& world) {
    AllReducer reducer(world.group(), "silent", {.has_main = false, .has_post = false});
    Join scope({&reducer});
    if (world.rank() == 0) {
      for (int i = 0; i < 3; ++i) Join::notify(reducer);
      world.store()->set("is ahead", "yes");
    } else {
      world.store()->wait({"is ahead"}, std::chrono::seconds(30));
      Join::notify(reducer);
    }
    EXPECT_EQ(scope.finish().live_counts, (std::vector<int>{world.world_size(), 1, 1}));
  });
}

// JOIN-17
TEST_P(JoinIterations, TwoCallsPerBatchAreTwoIterations) {
  run([](const World& world) {
    Fixture fixture(world);
    double total = 0;
    const auto report = Join(fixture.joinables).run([&] {
      for (int batch = 0; batch < 3 + world.rank(); ++batch) total += fixture.first()() + fixture.first()();
    });
    EXPECT_EQ(total, 2 * expected_total(world.rank(), world.world_size()));
    EXPECT_EQ(report.mirrored_iterations, 2 * (world.world_size() - 1 - world.rank()));
  });
}

// JOIN-25
TEST_P(JoinIterations, ARankWithoutInputsJoinsAtOnce) {
  run([](const World& world) {
    const std::vector<int> inputs = {0, 2, 3, 10};
    const int most = inputs[world.world_size() - 1];
    Fixture fixture(world);
    const auto report = Join(fixture.joinables).run([&] { fixture.iterate(inputs[world.rank()]); });
    EXPECT_EQ(report.own_iterations, inputs[world.rank()]);
    EXPECT_EQ(report.mirrored_iterations, most - inputs[world.rank()]);
    EXPECT_EQ(report.authoritative_rank, world.world_size() - 1);
    EXPECT_EQ(fixture.first().final_value.item<double>(), kAfter);
  });
}

// JOIN-20, JOIN-59
TEST_P(JoinIterations, LastJoinersMayBeSeveralAndTheHighestCounts) {
  run([](const World& world) {
    const int size = world.world_size();
    // Ranks 0 and, if there, 1 have most; then all have the same, then none has any.
    for (const auto& inputs : {std::vector{5, 5, 4, 2}, std::vector{3, 3, 3, 3}, std::vector{0, 0, 0, 0}}) {
      Fixture fixture(world);
      const auto report = Join(fixture.joinables).run([&] { fixture.iterate(inputs[world.rank()]); });
      const bool is_last = inputs[world.rank()] == inputs[0];
      EXPECT_EQ(fixture.first().events.back(), is_last ? "post 1" : "post 0");
      const int highest = inputs[0] == 5 ? std::min(1, size - 1) : size - 1;
      EXPECT_EQ(fixture.first().authoritative_rank, highest);
      EXPECT_EQ(report.authoritative_rank, highest);
      EXPECT_EQ(fixture.first().final_value.item<double>(), kAfter);
    }
  });
}

// JOIN-26
TEST_P(JoinIterations, ScopesMayFollowOneAnother) {
  run([](const World& world) {
    Fixture fixture(world, 2);
    for (int round = 0; round < 3; ++round) {
      fixture.completed = 0;
      double total = 0;
      const auto report = Join(fixture.joinables).run([&] { total = fixture.iterate(3 + world.rank()); });
      EXPECT_EQ(total, 2 * expected_total(world.rank(), world.world_size()));
      EXPECT_EQ(report.own_iterations, 3 + world.rank());
    }
  });
}

// JOIN-55
TEST_P(JoinIterations, TheMirrorCallbackFollowsTheMainHooks) {
  run([](const World& world) {
    Fixture fixture(world, 2);
    auto& events = fixture.reducers[1]->events;
    Join(fixture.joinables, {.on_mirrored_step = [&] { events.emplace_back("step"); }}).run([&] {
      fixture.iterate(3 + world.rank());
    });
    std::vector<std::string> expected;
    for (int i = world.rank() + 1; i < world.world_size(); ++i) expected.insert(expected.end(), {"main", "step"});
    expected.emplace_back(expected.empty() ? "post 1" : "post 0");
    EXPECT_EQ(events, expected);
  });
}

// JOIN-34: what a joinable that is not first needs to know of the live ranks
TEST_P(JoinIterations, OtherJoinablesReachTheFirstOnesTally) {
  run([](const World& world) {
    Fixture fixture(world, 2);
    std::vector<int> seen;
    Join(fixture.joinables).run([&] {
      EXPECT_FALSE(Join::current_tally(*fixture.reducers[1]).is_open()) << "no iteration yet";
      for (int i = 0; i < 3 + world.rank(); ++i) {
        fixture.iterate(i + 1);
        seen.push_back(Join::current_tally(*fixture.reducers[1]).live_count());
      }
    });
    for (int i = 0; i < 3 + world.rank(); ++i) EXPECT_EQ(seen[i], world.world_size() - std::max(0, i - 2));
    EXPECT_EQ(fixture.reducers[1]->mirrored_live_counts, fixture.first().mirrored_live_counts);
  });
}

// JOIN-36: the vote of a joinable that is not first
TEST_P(JoinIterations, AJoinableThatIsNotFirstMaySendAMessageOfItsOwn) {
  run([](const World& world) {
    Fixture fixture(world, 2);
    auto& second = *fixture.reducers[1];
    std::vector<int> mirrored;
    second.in_main_hook = [&] { mirrored.push_back(Join::own_tally(second).reducing_count()); };
    Join(fixture.joinables).run([&] {
      for (int i = 0; i < 3 + world.rank(); ++i) {
        fixture.first()();
        Join::notify(second);
        const auto tally = Join::own_tally(second, {.will_reduce = i % 2 == 1});
        all_reduce(at::ones({1}), world.group());
        EXPECT_EQ(tally.reducing_count(), i % 2 == 1 ? fixture.first().tally.live_count() : 0);
      }
    });
    ASSERT_EQ(static_cast<int>(mirrored.size()), world.world_size() - 1 - world.rank());
    for (std::size_t i = 0; i < mirrored.size(); ++i) {
      const auto iteration = static_cast<std::size_t>(3 + world.rank()) + i;
      EXPECT_EQ(mirrored[i], iteration % 2 == 1 ? second.mirrored_live_counts[i] : 0);
    }
  });
}

// JOIN-46: a hook that calls what a live rank calls
TEST_P(JoinIterations, NotifyInsideAHookDoesNothing) {
  run([](const World& world) {
    Fixture fixture(world, 2);
    for (const auto& reducer : fixture.reducers) {
      reducer->in_main_hook = [&] { EXPECT_FALSE(Join::notify(*reducer).is_open()); };
    }
    const auto report = Join(fixture.joinables).run([&] { fixture.iterate(3 + world.rank()); });
    EXPECT_EQ(report.own_iterations, 3 + world.rank());
    EXPECT_EQ(fixture.first().final_value.item<double>(), kAfter);
  });
}

TEST(JoinTallies, HoldMoreRanksThanOneWord) {
  testing::run_threads_in_gtest({.world_size = 35}, [](const World& world) {
    AllReducer reducer(world.group());
    std::vector<int> live;
    const auto report = Join({&reducer}).run([&] {
      if (world.rank() < 31 || world.rank() == 33) return;
      reducer({.will_reduce = world.rank() != 34});
      live = reducer.tally.live_ranks();
      EXPECT_EQ(reducer.tally.reducing_ranks(), (std::vector<int>{31, 32}));
    });
    EXPECT_EQ(live, report.own_iterations == 1 ? std::vector<int>({31, 32, 34}) : std::vector<int>());
    EXPECT_EQ(report.live_counts, std::vector<int>{3});
    EXPECT_EQ(report.authoritative_rank, 34);
  });
}

/// Three ranks, two joinables, whatever the schedule.
void expect_right_counts(testing::RunOptions options) {
  options.world_size = 3;
  testing::run_threads_in_gtest(options, [](const World& world) {
    Fixture fixture(world, 2);
    double total = 0;
    const auto report = Join(fixture.joinables).run([&] { total = fixture.iterate(3 + world.rank()); });
    EXPECT_EQ(total, 2 * expected_total(world.rank(), 3));
    EXPECT_EQ(report.live_counts, (std::vector<int>{3, 3, 3, 2, 1}));
  });
}

TEST(JoinSchedules, CountsAreRightWhateverTheOrder) {
  for (uint64_t seed = 1; seed <= 5; ++seed) expect_right_counts({.chaos_seed = seed});
}

TEST(JoinSchedules, NoResultIsReadBeforeItIsThere) {
  expect_right_counts({.completes_late = true});
}

}  // namespace
}  // namespace lockstep
