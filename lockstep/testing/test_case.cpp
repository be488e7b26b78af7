#include "lockstep/testing/test_case.h"

#include <cstdio>
#include <utility>

namespace lockstep::testing {
namespace {

TestFramework& framework_in_use() {
  static TestFramework& framework = *new TestFramework;
  return framework;
}

/// Puts a backslash before what has a meaning in a pattern of names.
std::string escaped(const std::string& name, const std::string& special) {
  std::string text;
  for (const char letter : name) {
    if (special.find(letter) != std::string::npos) text += '\\';
    text += letter;
  }
  return text;
}

}  // namespace

TestFramework catch2_framework() {
  return {.arguments = [](const std::string& test) { return std::vector<std::string>{escaped(test, "\\,[*\"")}; }};
}

TestFramework doctest_framework() {
  // Its patterns know * and ? but no way to escape them: a name that holds one leads to more tests than this.
  return {.arguments = [](const std::string& test) {
    return std::vector<std::string>{"--test-case=" + escaped(test, "\\,"), "--no-skipped-summary=true"};
  }};
}

bool use_framework(TestFramework framework) {
  framework_in_use() = std::move(framework);
  return true;
}

void report_to_framework(const RunReport& report) {
  const auto& framework = framework_in_use();
  if (const auto reason = report.skipped()) {
    if (framework.skip) return framework.skip(*reason);
    std::fprintf(stderr, "[lockstep/testing] skipped: %s\n", reason->c_str());
  } else if (!report.has_passed()) {
    if (framework.fail) return framework.fail(report.describe());
    throw CheckFailure(report.describe());
  }
}

void run_thread_test(const RunOptions& options, const RankBody& body) {
  report_to_framework(run_threads(options, body));
}

void run_process_test(const std::string& test, const RunOptions& options, const RankBody& body) {
  const auto& framework = framework_in_use();
  TORCH_CHECK(framework.arguments, "[lockstep/testing] '", test,
              "' wants ranks that are processes, and nobody said how ",
              "they come to a test. Call use_framework() with `arguments`.");
  report_to_framework(
      run_processes(options, {.name = test, .arguments = framework.arguments(test), .unset = framework.unset}, body));
}

}  // namespace lockstep::testing
