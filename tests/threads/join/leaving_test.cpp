// Leaving a Join scope: early stops, exceptions, guards, limits and warnings.
#include <thread>

#include "lockstep/comm/barrier.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/join_fixtures.h"

namespace lockstep::leaving_test {
namespace {

using namespace join_fixtures;
using namespace std::chrono_literals;
using testing::expect_error;
using ::testing::HasSubstr;

struct Where {
  std::string backend;
  int world_size;
};

void PrintTo(const Where& where, std::ostream* out) {
  *out << where.backend << ", " << where.world_size << " ranks";
}

class JoinLeaving : public ::testing::TestWithParam<Where> {
 protected:
  static void run(const testing::RankBody& body) {
    testing::run_threads_in_gtest({.world_size = GetParam().world_size, .backend = GetParam().backend}, body);
  }
};

/// The whole of a group's life after a rank left it by an exception. Over gloo, a group with a collective that nobody
/// finishes is destroyed only after its timeout; tests/multiprocess/join has that.
class JoinFailures : public JoinLeaving {};

std::string name_of_where(const ::testing::TestParamInfo<Where>& info) {
  return info.param.backend + std::to_string(info.param.world_size);
}

INSTANTIATE_TEST_SUITE_P(Backends, JoinLeaving,
                         ::testing::Values(Where{"threads", 2}, Where{"threads", 3}, Where{"threads", 4},
                                           Where{"shm", 2}, Where{"shm", 3}, Where{"gloo", 2}, Where{"gloo", 3}),
                         name_of_where);
INSTANTIATE_TEST_SUITE_P(Backends, JoinFailures,
                         ::testing::Values(Where{"threads", 2}, Where{"threads", 4}, Where{"shm", 2}, Where{"shm", 4}),
                         name_of_where);

std::string rank_text(const World& world) {
  return "rank " + std::to_string(world.rank()) + " of " + std::to_string(world.world_size());
}

/// Warnings of this thread while it lives.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }

  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// JOIN-14, JOIN-19, JOIN-49, JOIN-54
TEST_P(JoinLeaving, AllRanksStopAfterTheFewestInputsIfAsked) {
  run([](const World& world) {
    for (const std::size_t joinables : {1, 3}) {
      std::vector<std::unique_ptr<AllReducer>> reducers;
      std::vector<Joinable*> list;
      for (std::size_t i = 0; i < joinables; ++i) {
        reducers.push_back(std::make_unique<AllReducer>(world.group()));
        list.push_back(reducers.back().get());
      }
      int completed = 0;
      Join scope(list, {.throw_on_early_termination = true});
      const testing::Recorder recorder;
      const auto message = expect_error(
          [&] {
            scope.run([&] {
              for (; completed < 3 + world.rank(); ++completed) {
                for (const auto& reducer : reducers) (*reducer)();
              }
            });
          },
          {rank_text(world), "ran out of inputs", "all ranks stop"});
      EXPECT_EQ(completed, 3);
      EXPECT_THAT(message, HasSubstr("rank 0 ran out of inputs"));
      EXPECT_EQ(scope.report().own_iterations, 3);
      EXPECT_FALSE(scope.report().authoritative_rank);
      EXPECT_EQ(recorder.events("launch").size(), 3 * (1 + joinables) + 1) << "no message beside the control message";
      for (const auto& reducer : reducers) {
        EXPECT_TRUE(reducer->events.empty()) << "no hook runs";
        EXPECT_FALSE(reducer->join_config().enable);
      }
      // Nothing has failed.
      barrier(world.group());
    }
  });
}

// JOIN-14
TEST_P(JoinLeaving, AStopNamesAllRanksThatRanOut) {
  run([](const World& world) {
    if (world.world_size() < 3) return;
    AllReducer reducer(world.group());
    const bool has_more = world.rank() == 1;
    expect_error(
        [&] {
          Join({&reducer}, {.throw_on_early_termination = true}).run([&] {
            for (int i = 0; i < (has_more ? 2 : 1); ++i) reducer();
          });
        },
        {has_more ? "ranks 0, 2" : "while rank 1 had more", "ran out of inputs"});
  });
}

// JOIN-19
TEST_P(JoinLeaving, RanksThatFinishTogetherThrowNothing) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    const auto report = Join({&reducer}, {.throw_on_early_termination = true}).run([&] {
      for (int i = 0; i < 4; ++i) reducer();
    });
    EXPECT_EQ(report.own_iterations, 4);
    EXPECT_EQ(reducer.events, std::vector<std::string>{"post 1"});
    EXPECT_EQ(reducer.final_value.item<double>(), kAfter);
  });
}

// JOIN-19
TEST_P(JoinLeaving, ABodyThatCatchesTheStopEndsInPeace) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    Join scope({&reducer}, {.throw_on_early_termination = true});
    if (world.rank() == 0) {
      expect_error([&] { scope.finish(); }, {"rank 0 ran out of inputs after 0 iterations"});
    } else {
      expect_error([&] { reducer(); }, {"rank 0 ran out of inputs, all ranks stop"});
      expect_error([&] { reducer(); }, {"rank 0 ran out of inputs, all ranks stop"});
      scope.finish();
    }
    EXPECT_TRUE(reducer.events.empty());
    barrier(world.group());
  });
}

// JOIN-19, JOIN-28
TEST_P(JoinLeaving, AStopThatLeavesThroughAGuardIsNoFailure) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    expect_error(
        [&] {
          Join scope({&reducer}, {.throw_on_early_termination = true});
          for (int i = 0; i < world.rank(); ++i) reducer();
          scope.finish();
        },
        {"rank 0 ran out of inputs"});
    EXPECT_FALSE(reducer.join_config().enable);
    barrier(world.group());
  });
}

// JOIN-57
TEST_P(JoinLeaving, AllRanksStopWhenOneHasMirroredTooMuch) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    // Rank 0 is out at once, rank 1 after two more.
    const int inputs = world.rank() < 2 ? 2 * world.rank() : 20;
    const int most = world.world_size() == 2 ? 2 : 20;
    Join scope({&reducer}, {.max_mirrored_iterations = 5});
    const auto train = [&] {
      scope.run([&] {
        for (int i = 0; i < inputs; ++i) reducer();
      });
    };
    if (most == 2) {
      train();
      return;
    }
    expect_error(train, {rank_text(world), ": rank 0 would have to mirror more than max_mirrored_iterations = 5"});
    EXPECT_EQ(scope.report().own_iterations + scope.report().mirrored_iterations, 5);
    barrier(world.group());
  });
}

// JOIN-57
TEST_P(JoinLeaving, ALimitThatIsJustReachedStopsNobody) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    const auto report = Join({&reducer}, {.max_mirrored_iterations = 5}).run([&] {
      for (int i = 0; i < (world.rank() == 0 ? 0 : 5); ++i) reducer();
    });
    EXPECT_EQ(report.mirrored_iterations, world.rank() == 0 ? 5 : 0);
  });
}

// JOIN-22
TEST(JoinSkew, IsWarnedOfOnceBeyondAThousandMirroredIterations) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    for (const int inputs : {1000, 1005}) {
      AllReducer reducer(world.group());
      Warnings warnings;
      Join({&reducer}).run([&] {
        for (int i = 0; i < 3 + world.rank() * inputs; ++i) reducer();
      });
      ASSERT_EQ(warnings.texts.size(), world.rank() == 0 && inputs > 1000 ? 1U : 0U);
      if (warnings.texts.empty()) continue;
      EXPECT_THAT(warnings.texts[0], HasSubstr("rank 0 of 2"));
      EXPECT_THAT(warnings.texts[0], HasSubstr("after 3 iterations and has mirrored 1001 of rank 1"));
      EXPECT_THAT(warnings.texts[0], HasSubstr("slower"));
    }
  });
}

// JOIN-28
TEST_P(JoinLeaving, FinishEndsAScopeOnce) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    Join scope({&reducer});
    reducer();
    scope.finish();
    EXPECT_EQ(reducer.final_value.item<double>(), kAfter);
    const testing::Recorder recorder;
    expect_error([&] { scope.finish(); }, {"the scope has ended"});
    bool has_run = false;
    expect_error([&] { scope.run([&] { has_run = true; }); }, {"the scope has ended"});
    EXPECT_FALSE(has_run);
    EXPECT_TRUE(recorder.events().empty());
    Join disabled({&reducer}, {.enable = false});
    disabled.finish();
    expect_error([&] { disabled.finish(); }, {"the scope has ended"});
  });
}

// JOIN-28, JOIN-27
TEST_P(JoinLeaving, AGuardLeftWithoutFinishMirrorsTheOthers) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    {
      const Join scope({&reducer});
      for (int i = 0; i < 3 + world.rank(); ++i) reducer();
    }
    EXPECT_EQ(static_cast<int>(reducer.events.size()), world.world_size() - world.rank());
    EXPECT_EQ(reducer.final_value.item<double>(), kAfter);
    EXPECT_FALSE(reducer.join_config().enable);
  });
}

// JOIN-28
TEST_P(JoinLeaving, AGuardsDestructorWarnsInsteadOfThrowing) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    Warnings warnings;
    if (world.rank() == 0) {
      {
        const Join scope({&reducer}, {.throw_on_early_termination = true});
      }
      ASSERT_EQ(warnings.texts.size(), 1U);
      EXPECT_THAT(warnings.texts[0], HasSubstr("rank 0 ran out of inputs"));
    } else {
      Join scope({&reducer}, {.throw_on_early_termination = true});
      expect_error([&] { reducer(); }, {"all ranks stop"});
    }
    EXPECT_FALSE(reducer.join_config().enable);
  });
}

// JOIN-27
TEST_P(JoinLeaving, EveryWayOutDisablesTheJoinables) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    const auto expect_no_cost = [&] {
      EXPECT_EQ(reducer.join_config(), JoinConfig());
      const testing::Recorder recorder;
      reducer();
      EXPECT_EQ(recorder.events("launch").size(), 1U);
    };
    Join({&reducer}).run([] {});
    expect_no_cost();
    Join({&reducer}).finish();
    expect_no_cost();
    { const Join scope({&reducer}); }
    expect_no_cost();
    const auto group = spare_group(world);
    barrier(world.group());  // nobody may close the group while others still connect
    AllReducer doomed(group);
    expect_error([&] { Join({&doomed}).run([] { throw std::runtime_error("out"); }); }, {"out"});
    EXPECT_EQ(doomed.join_config(), JoinConfig());
    EXPECT_THROW(
        {
          const Join scope({&doomed});
          throw std::runtime_error("out");
        },
        std::runtime_error);
    EXPECT_EQ(doomed.join_config(), JoinConfig());
  });
}

/// As expect_error(), which lets errors of woken ranks pass to the harness.
std::string expect_any_error(const std::function<void()>& action, const std::vector<std::string>& words) {
  try {
    action();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    for (const auto& word : words) EXPECT_THAT(text, HasSubstr(word));
    return text;
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

struct DiskFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Rank 1 leaves a scope on a spare group by `leave`; the others train on or wait and must be told why.
void expect_others_are_told(const World& world, const std::function<void(AllReducer& reducer)>& leave,
                            const std::function<void(AllReducer& reducer)>& go_on, const std::string& told) {
  const auto group = spare_group(world);
  AllReducer reducer(group);
  if (world.rank() == 1) {
    const testing::Recorder recorder;
    leave(reducer);
    EXPECT_TRUE(recorder.events("launch").empty());
    EXPECT_TRUE(reducer.events.empty()) << "no hook runs";
  } else {
    const auto start = std::chrono::steady_clock::now();
    expect_any_error([&] { Join({&reducer}).run([&] { go_on(reducer); }); }, {told});
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  }
  EXPECT_EQ(reducer.join_config(), JoinConfig());
  expect_any_error([&] { all_reduce(at::ones({1}), group); }, {"rank 1 left by an exception"});
  // Other groups are as good as before.
  barrier(world.group());
}

void train(AllReducer& reducer) {
  for (int i = 0; i < 3; ++i) reducer();
}

// JOIN-24, JOIN-56
TEST_P(JoinFailures, AnExceptionPassesThroughAndTheOthersAreTold) {
  run([](const World& world) {
    const auto leave = [](AllReducer& reducer) {
      try {
        Join({&reducer}).run([] { throw DiskFull("the disk is full\nsecond line"); });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const DiskFull& error) {
        EXPECT_STREQ(error.what(), "the disk is full\nsecond line");
      }
    };
    const std::string told = "rank 1 left by an exception: the disk is full";
    expect_others_are_told(world, leave, train, told);
    // Ranks that have joined wait in the control message.
    expect_others_are_told(world, leave, [](AllReducer&) {}, told);
  });
}

// JOIN-24, JOIN-56
TEST_P(JoinFailures, WhateverIsThrownIsToldOfAtOnceOrLater) {
  run([](const World& world) {
    const auto throw_number = [](AllReducer& reducer) {
      std::this_thread::sleep_for(300ms);
      EXPECT_THROW(Join({&reducer}).run([] { throw 17; }), int);
    };
    expect_others_are_told(world, throw_number, train, "rank 1 left by an exception: one that is no std::exception");
    const auto throw_torch_error = [](AllReducer& reducer) {
      EXPECT_THROW(Join({&reducer}).run([] { TORCH_CHECK(false, "bad batch"); }), c10::Error);
    };
    const auto come_late = [](AllReducer& reducer) {
      std::this_thread::sleep_for(300ms);
      train(reducer);
    };
    expect_others_are_told(world, throw_torch_error, come_late, "rank 1 left by an exception: bad batch");
  });
}

// JOIN-28, JOIN-56
TEST_P(JoinFailures, AGuardDestroyedByAnExceptionTellsTheOthers) {
  run([](const World& world) {
    const auto leave = [](AllReducer& reducer) {
      EXPECT_THROW(
          {
            const Join scope({&reducer});
            throw DiskFull("full");
          },
          DiskFull);
    };
    expect_others_are_told(world, leave, train, "rank 1 left by an exception");
  });
}

// JOIN-56
TEST_P(JoinFailures, AHookThatThrowsIsToldToo) {
  run([](const World& world) {
    const auto group = spare_group(world);
    AllReducer reducer(group);
    if (world.rank() == 1) reducer.in_main_hook = [] { throw DiskFull("no room for the mirror"); };
    expect_any_error(
        [&] {
          Join({&reducer}).run([&] {
            for (int i = 0; i < (world.rank() == 1 ? 1 : 3); ++i) reducer();
          });
        },
        {"no room for the mirror"});
    EXPECT_FALSE(reducer.join_config().enable);
    barrier(world.group());
  });
}

// JOIN-11
TEST_P(JoinFailures, JoinablesInAnotherOrderThanTheirUseNeverHang) {
  run([](const World& world) {
    const auto group = spare_group(world);
    AllReducer late(group, "late");
    AllReducer early(group, "early");
    const auto message = expect_any_error(
        [&] {
          Join({&late, &early}).run([&] {
            if (world.rank() == 0) return;
            early();
            late();
          });
        },
        {"'early' at position 1", "'late' at position 0"});
    EXPECT_EQ(message.find("left by an exception") != std::string::npos, world.rank() == 0);
    barrier(world.group());
  });
}

TEST_P(JoinFailures, RanksThatOpenedTheScopeDifferentlyNeverHang) {
  // Without inputs it would have all ranks stop at once.
  for (const bool has_inputs : {true, false}) {
    run([&](const World& world) {
      const auto group = spare_group(world);
      AllReducer reducer(group);
      const bool throws = world.rank() == 1;
      expect_any_error(
          [&] {
            Join({&reducer}, {.throw_on_early_termination = throws}).run([&] {
              for (int i = 0; i < (throws && !has_inputs ? 0 : 3 + world.rank()); ++i) reducer();
            });
          },
          {"only rank 1 opened the scope with throw_on_early_termination"});
      barrier(world.group());
    });
  }
}

// JOIN-24
TEST_P(JoinLeaving, AnExceptionOutOfADisabledScopeIsTheUsersBusiness) {
  run([](const World& world) {
    AllReducer reducer(world.group());
    expect_error([&] { Join({&reducer}, {.enable = false}).run([] { throw DiskFull("full"); }); }, {"full"});
    barrier(world.group());
  });
}

}  // namespace
}  // namespace lockstep::leaving_test
