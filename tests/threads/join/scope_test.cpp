// Opening a Join scope: what joinables see of it, and what is refused.
#include "lockstep/testing/recorder.h"
#include "tests/support/join_fixtures.h"

namespace lockstep {
namespace {

using namespace join_fixtures;
using testing::expect_error;

// JOIN-1
LOCKSTEP_THREAD_TEST(JoinScope, RunsHooksThatOverrideNothing, 3) {
  AllReducer silent(world.group(), "silent", {.has_main = false, .has_post = false});
  const auto report = Join({&silent}).run([&] {
    for (int i = 0; i < world.rank(); ++i) Join::notify(silent);
  });
  EXPECT_EQ(report.mirrored_iterations, 2 - world.rank());
}

// JOIN-2, JOIN-3
LOCKSTEP_THREAD_TEST(JoinScope, ConfigIsDisabledOutsideAndSaysWhatTheScopeIsInside, 2) {
  AllReducer first(world.group());
  AllReducer second(world.group());
  EXPECT_EQ(first.join_config(), JoinConfig());
  EXPECT_FALSE(JoinConfig().enable || JoinConfig().throw_on_early_termination || JoinConfig().is_first_joinable);
  Join scope({&first, &second}, {.throw_on_early_termination = true});
  EXPECT_EQ(first.join_config(), (JoinConfig{true, true, true}));
  EXPECT_EQ(second.join_config(), (JoinConfig{true, true, false}));
  scope.finish();
  EXPECT_EQ(first.join_config(), JoinConfig());
}

// JOIN-4
LOCKSTEP_THREAD_TEST(JoinScope, HandsTheOptionsToEveryJoinable, 2) {
  AllReducer first(world.group());
  AllReducer second(world.group());
  Join scope({&first, &second}, {.options = {.extra = {{"num_allreduces", 2}, {"unknown to all", "text"}}}});
  EXPECT_EQ(first.times, 2);
  EXPECT_EQ(second.times, 2);
}

// JOIN-4
TEST(JoinOptions, ValuesHaveATypeAndADefault) {
  EXPECT_TRUE(JoinOptions().divide_by_initial_world_size);
  const JoinOptions options{.extra = {{"count", 2}, {"scale", 0.5}, {"name", "a"}, {"on", true}}};
  EXPECT_EQ(options.get<int64_t>("count", 1), 2);
  EXPECT_EQ(options.get<int64_t>("other", 7), 7);
  EXPECT_EQ(options.get("scale", 1.0), 0.5);
  EXPECT_EQ(options.get<std::string>("name", ""), "a");
  EXPECT_TRUE(options.get("on", false));
  expect_error([&] { options.get<int64_t>("name", 1); }, {"'name'", "String", "Int"});
}

/// Writes down when its hook is built.
class Noting : public AllReducer {
 public:
  Noting(const GroupPtr& group, std::string name, std::vector<std::string>& built)
      : AllReducer(group, std::move(name)), built_(built) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    built_.push_back(join_name());
    return AllReducer::join_hook(options);
  }

 private:
  std::vector<std::string>& built_;
};

// JOIN-5
LOCKSTEP_THREAD_TEST(JoinScope, BuildsHooksInListOrderWhenItIsBuilt, 2) {
  std::vector<std::string> built;
  Noting one(world.group(), "one", built);
  Noting two(world.group(), "two", built);
  Join scope({&two, &one});
  EXPECT_EQ(built, (std::vector<std::string>{"two", "one"}));
  EXPECT_FALSE(one.join_config().throw_on_early_termination);
  scope.finish();
}

// JOIN-6, JOIN-57
LOCKSTEP_THREAD_TEST(JoinScope, RefusesEmptyListsNullEntriesAndNegativeLimits, 1) {
  AllReducer reducer(world.group());
  expect_error([] { Join({}); }, {"at least one joinable"});
  expect_error([&] { Join({&reducer, nullptr}); }, {"null", "position 1"});
  expect_error([&] { Join({&reducer}, {.max_mirrored_iterations = -1}); }, {"max_mirrored_iterations", "-1"});
  EXPECT_FALSE(reducer.join_config().enable);
}

// JOIN-7
LOCKSTEP_THREAD_TEST(JoinScope, RefusesJoinablesOfDifferentGroups, 2) {
  AllReducer one(world.group(), "one");
  AllReducer two(world.group(), "two");
  AllReducer other(spare_group(world), "other");
  AllReducer none(nullptr, "none");
  expect_error([&] { Join({&one, &two, &other}); }, {"positions 0 and 2", "'one'", "'other'"});
  expect_error([&] { Join({&one, &none}); }, {"'none'", "position 1", "no process group"});
  EXPECT_FALSE(one.join_config().enable);
}

/// Says that it lives where nobody can.
class Elsewhere : public AllReducer {
 public:
  using AllReducer::AllReducer;
  c10::Device join_device() const override { return {c10::kCUDA, 7}; }
};

// JOIN-8
LOCKSTEP_THREAD_TEST(JoinScope, ControlMessagesLiveOnTheFirstJoinablesDevice, 2) {
  AllReducer first(world.group());
  Elsewhere second(world.group());
  const auto report = Join({&first, &second}).run([&] {
    if (world.rank() == 0) return;
    first();
    second();
  });
  EXPECT_EQ(report.mirrored_iterations, 1 - world.rank());
}

// JOIN-10
LOCKSTEP_THREAD_TEST(JoinScope, RefusesAJoinableListedTwiceOrOpenElsewhere, 2) {
  AllReducer one(world.group(), "one");
  AllReducer two(world.group(), "two");
  expect_error([&] { Join({&two, &one, &two}); }, {"'two' twice"});
  Join scope({&one, &two});
  expect_error([&] { Join({&two}); }, {"'two'", "another open scope"});
  EXPECT_TRUE(two.join_config().enable) << "the open scope keeps it";
  scope.finish();
  Join({&two}).finish();
}

// JOIN-11
LOCKSTEP_THREAD_TEST(JoinScope, RefusesAStepListedBeforeItsGradients, 2) {
  AllReducer ddp(world.group(), "ddp");
  AllReducer zero(world.group(), "zero");
  AllReducer user(world.group(), "user");
  ddp.phase = JoinPhase::kGradients;
  zero.phase = JoinPhase::kStep;
  const testing::Recorder recorder;
  expect_error([&] { Join({&zero, &ddp}); }, {"'zero'", "'ddp'", "List 'ddp' first"});
  expect_error([&] { Join({&user, &zero, &ddp}); }, {"'zero'", "'ddp'"});
  EXPECT_TRUE(recorder.events().empty());
  Join({&ddp, &zero}).finish();
  Join({&user, &zero}).finish();
  Join({&zero, &user}).finish();
  Join({&ddp, &user, &zero}).finish();
}

/// Refuses to be joined, or gives nothing.
class Unwilling : public AllReducer {
 public:
  Unwilling(const GroupPtr& group, bool throws) : AllReducer(group, "unwilling"), throws_(throws) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& /*options*/) override {
    TORCH_CHECK(!throws_, "not with me");
    return nullptr;
  }

 private:
  const bool throws_;
};

LOCKSTEP_THREAD_TEST(JoinScope, ThatIsRefusedByAJoinableChangesNothing, 2) {
  AllReducer reducer(world.group());
  Unwilling refusing(world.group(), true);
  Unwilling empty(world.group(), false);
  expect_error([&] { Join({&reducer, &refusing}); }, {"not with me"});
  expect_error([&] { Join({&reducer, &empty}); }, {"'unwilling'", "no hook", "rank"});
  EXPECT_EQ(reducer.join_config(), JoinConfig());
  Join({&reducer}).finish();
}

}  // namespace
}  // namespace lockstep
