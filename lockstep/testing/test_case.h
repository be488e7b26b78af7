// The kit for frameworks whose tests are TEST_CASEs, Catch2 and doctest among them, and for any other one: a
// TestFramework says how to fail, how to skip and how a fresh process is led to one test. Include the framework first.
//
//   const bool is_set = lockstep::testing::use_framework(lockstep::testing::doctest_framework());
//
//   LOCKSTEP_THREAD_TEST_CASE("gradients are averaged", 3) {
//     auto tensor = at::ones({4}) * (world.rank() + 1);
//     lockstep::all_reduce(tensor, world.group());
//     REQUIRE(tensor[0].item<float>() == 6);
//   }
//
// On a rank, fail by what throws: REQUIRE, or the checks of checks.h. What is only noted (CHECK) a framework may not
// see from another thread, and not at all from another process.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/testing/process_ranks.h"
#include "lockstep/testing/thread_ranks.h"

namespace lockstep::testing {

struct TestFramework {
  /// Fails the current test. Unset: throws CheckFailure(text), which all frameworks report.
  std::function<void(const std::string& text)> fail = nullptr;
  /// Skips the current test. Unset: says so on stderr, and the test passes.
  std::function<void(const std::string& reason)> skip = nullptr;
  /// Arguments that lead a fresh process of this program to the test of this name and no other. Unset: ranks cannot be
  /// processes.
  std::function<std::vector<std::string>(const std::string& test)> arguments = nullptr;
  /// Variables that would lead it elsewhere.
  std::vector<std::string> unset = {};
};

/// What can be said without the frameworks' headers. For Catch2 3, set `skip` to what calls SKIP.
TestFramework catch2_framework();
TestFramework doctest_framework();

/// For all tests of this program from now on. Returns true, so that it can be called before main() begins.
bool use_framework(TestFramework framework);

/// Makes a run's report the result of the current test.
void report_to_framework(const RunReport& report);
void run_thread_test(const RunOptions& options, const RankBody& body);
/// `test` is the name the framework knows it by; one call per test.
void run_process_test(const std::string& test, const RunOptions& options, const RankBody& body);

}  // namespace lockstep::testing

// NOLINTBEGIN(cppcoreguidelines-macro-usage)
#define LOCKSTEP_JOINED_AGAIN(one, other) one##other
#define LOCKSTEP_JOINED(one, other) LOCKSTEP_JOINED_AGAIN(one, other)
#define LOCKSTEP_TEST_CASE_OF(name, body, ...)                       \
  static void body([[maybe_unused]] const ::lockstep::World& world); \
  TEST_CASE(name) {                                                  \
    __VA_ARGS__;                                                     \
  }                                                                  \
  static void body([[maybe_unused]] const ::lockstep::World& world)

/// A test whose ranks are threads.
#define LOCKSTEP_THREAD_TEST_CASE(name, ranks)            \
  LOCKSTEP_TEST_CASE_OF(                                  \
      name, LOCKSTEP_JOINED(lockstep_on_rank_, __LINE__), \
      ::lockstep::testing::run_thread_test({.world_size = (ranks)}, LOCKSTEP_JOINED(lockstep_on_rank_, __LINE__)))

/// A test whose ranks are processes.
#define LOCKSTEP_PROCESS_TEST_CASE(name, ranks)                                              \
  LOCKSTEP_TEST_CASE_OF(name, LOCKSTEP_JOINED(lockstep_on_rank_, __LINE__),                  \
                        ::lockstep::testing::run_process_test(name, {.world_size = (ranks)}, \
                                                              LOCKSTEP_JOINED(lockstep_on_rank_, __LINE__)))
// NOLINTEND(cppcoreguidelines-macro-usage)
