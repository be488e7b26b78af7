// Combinations of named values, and few of them that hold every pair (or triple) of values: a covering array with
// rules. Pure; the same seed gives the same list everywhere.
//
//   Combinations all({{"way", {"plain", "elements"}}, {"world", {"1", "2"}}}, {{.when = {"way=elements", "world=1"}}});
//   for (const auto& each : all.covering(2)) …
//
// A rule says of some combinations that they do not work, so they count as covered by themselves only: what stands
// beside a refused pair was not tried.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::testing {

struct Axis {
  std::string name;
  std::vector<std::string> values;
};

/// The index of a value for every axis, in the axes' order.
using Combination = std::vector<std::size_t>;

/// Holds for combinations that meet every one of `when`: "axis=value", or "axis=value|other".
struct Rule {
  enum class Kind {
    kRefused,    // the library throws
    kSenseless,  // there is no such program
  };
  std::vector<std::string> when;
  /// Refused: what the message says. Senseless: why.
  std::string text = "";
  Kind kind = Kind::kRefused;
  /// The error comes after parameters have been changed, as Python's does: see the text.
  bool is_late = false;
};

class Combinations {
 public:
  /// Refuses axes without values, and rules that name unknown axes or values, or none.
  Combinations(std::vector<Axis> axes, std::vector<Rule> rules);

  /// Combinations that hold every `strength` values of different axes that are possible together, in one of them that
  /// no rule is about; and every refusal with every `strength` of the values it names, if possible in one that no other
  /// rule is about. Refuses a strength that is not from 1 to the number of axes.
  std::vector<Combination> covering(int strength, std::uint64_t seed = 1) const;
  /// Of all `strength` values of different axes, those that are possible together and in no combination of `list` that
  /// no rule is about: "way=elements, world=2".
  std::vector<std::string> uncovered(const std::vector<Combination>& list, int strength) const;

  /// `combination`, which fails, with as many first values as it fails with.
  Combination shrunk(Combination combination, const std::function<bool(const Combination&)>& fails) const;

  /// The rules about it; none if it is to work.
  std::vector<const Rule*> rules_of(const Combination& combination) const;
  const std::string& value(const Combination& combination, const std::string& axis) const;
  /// "way=elements, world=2", which parse() reads; axes that are not named have their first value there.
  std::string describe(const Combination& combination) const;
  Combination parse(const std::string& text) const;

  const std::vector<Axis>& axes() const { return axes_; }
  const std::vector<Rule>& rules() const { return rules_; }

 private:
  /// A value of an axis.
  struct Choice {
    std::size_t axis;
    std::size_t value;
  };
  using Choices = std::vector<Choice>;
  /// By rule and condition, the values that meet it.
  using Condition = Choices;
  class Search;

  std::size_t axis_of(const std::string& name) const;
  Condition condition_of(const std::string& text) const;
  std::vector<Choices> tuples(int strength) const;

  std::vector<Axis> axes_;
  std::vector<Rule> rules_;
  std::vector<std::vector<Condition>> conditions_;  // by rule
};

}  // namespace lockstep::testing
