// Compares Join with PyTorch's on a simple joinable: what every rank reduced, how many iterations it completed and
// mirrored, who was a last joiner and who threw.
#include <algorithm>

#include "lockstep/base/str.h"
#include "tests/support/join_fixtures.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using namespace join_fixtures;
using oracle::at_key;

void compare(const c10::IValue& subject, const World& world) {
  const auto expected = at_key(subject, "ranks").toList().get(world.rank());
  const auto inputs = c10::IValue(at_key(subject, "inputs").toList().get(world.rank())).toInt();
  std::vector<std::unique_ptr<AllReducer>> reducers;
  std::vector<Joinable*> joinables;
  for (int64_t i = 0; i < at_key(subject, "joinables").toInt(); ++i) {
    reducers.push_back(std::make_unique<AllReducer>(world.group()));
    joinables.push_back(reducers.back().get());
    reducers.back()->times = at_key(subject, "times").toInt();
  }
  double total = 0;
  int64_t iterations = 0;
  bool threw = false;
  try {
    Join(joinables, {.enable = at_key(subject, "enable").toBool(),
                     .throw_on_early_termination = at_key(subject, "throws").toBool(),
                     .options = {.extra = {{"num_allreduces", at_key(subject, "times").toInt()}}}})
        .run([&] {
          for (; iterations < inputs; ++iterations) {
            for (const auto& reducer : reducers) total += (*reducer)();
          }
        });
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const c10::Error&) {
    threw = true;
  }
  const auto& last = *reducers.back();
  const bool has_post = !last.events.empty() && last.events.back() != "main";
  EXPECT_EQ(total, at_key(expected, "total").toDouble());
  EXPECT_EQ(iterations, at_key(expected, "iterations").toInt());
  EXPECT_EQ(std::count(last.events.begin(), last.events.end(), "main"), at_key(expected, "mains").toInt());
  EXPECT_EQ(!has_post ? -1 : last.events.back() == "post 1" ? 1 : 0, at_key(expected, "is_last").toInt());
  EXPECT_EQ(threw, at_key(expected, "threw").toInt() == 1);
  EXPECT_EQ(last.final_value.item<double>(), at_key(expected, "final").toDouble());
}

// JOIN-49, JOIN-18, JOIN-19, JOIN-20, JOIN-25
TEST(JoinOracle, AgreesWithPyTorch) {
  const auto saved = oracle::run_reference("join/join_reference.py");
  if (saved.isNone()) {
    GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
  }
  EXPECT_EQ(saved.toList().size(), 32U);
  for (const auto& backend : {"threads", "shm", "gloo"}) {
    for (const int world_size : {2, 3}) {
      testing::run_threads_in_gtest({.world_size = world_size, .backend = backend}, [&](const World& world) {
        int index = 0;
        for (const auto& subject : saved.toListRef()) {
          const ::testing::ScopedTrace trace(__FILE__, __LINE__, str(backend, ", case ", index++));
          if (static_cast<int>(at_key(subject, "inputs").toList().size()) == world_size) compare(subject, world);
        }
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
