// One body, many settings: the full product of named values, in a fixed order, the same on all ranks.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

using SubtestValue = std::variant<bool, int64_t, double, std::string>;

/// The values of one subtest, by name.
class Subtest {
 public:
  using Names = std::map<std::string, std::string>;
  explicit Subtest(std::vector<std::pair<std::string, SubtestValue>> values, Names names = {})
      : values_(std::move(values)), names_(std::move(names)) {}

  /// Refuses an unknown name or another type, naming it.
  template <class T>
  T get(const std::string& name) const {
    if (const auto* value = std::get_if<T>(&find(name))) return *value;
    refuse_type(name);
  }
  /// "dtype=half, size=3"; a value that has a name of its own ("offload=true" named "offloaded") is shown by it.
  std::string describe() const;

 private:
  const SubtestValue& find(const std::string& name) const;
  [[noreturn]] void refuse_type(const std::string& name) const;

  std::vector<std::pair<std::string, SubtestValue>> values_;
  Names names_;
};

struct SubtestOptions {
  /// Called before each subtest: what must not leak from one into the next.
  std::function<void()> reset = [] {};
  /// Names for values in descriptions: {{"offload=true", "offloaded"}}.
  Subtest::Names names = {};
};

/// Runs `body` for the full product of `values`, the last name varying fastest, a barrier over the world around each. A
/// failure is rethrown as CheckFailure that shows the values. Collective.
void run_subtests(const World& world, const std::vector<std::pair<std::string, std::vector<SubtestValue>>>& values,
                  const std::function<void(const Subtest& subtest)>& body, const SubtestOptions& options = {});

}  // namespace lockstep::testing
