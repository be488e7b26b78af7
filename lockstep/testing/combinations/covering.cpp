#include "lockstep/testing/combinations/covering.h"

#include <algorithm>
#include <random>
#include <set>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing {
namespace {

constexpr std::size_t kOpen = static_cast<std::size_t>(-1);  // an axis without a value yet
constexpr int kTries = 40;

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    part.erase(0, part.find_first_not_of(' '));
    parts.push_back(part);
  }
  return parts;
}

}  // namespace

Combinations::Combinations(std::vector<Axis> axes, std::vector<Rule> rules)
    : axes_(std::move(axes)), rules_(std::move(rules)) {
  for (const auto& axis : axes_) {
    if (axis.values.empty()) throw CheckFailure(str("axis '", axis.name, "' has no values"));
  }
  for (const auto& rule : rules_) {
    if (rule.when.empty()) {
      throw CheckFailure(str("the rule '", rule.text, "' says of no values when it holds, so it would hold always"));
    }
    auto& conditions = conditions_.emplace_back();
    for (const auto& text : rule.when) conditions.push_back(condition_of(text));
  }
}

std::size_t Combinations::axis_of(const std::string& name) const {
  for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
    if (axes_[axis].name == name) return axis;
  }
  std::vector<std::string> names;
  for (const auto& axis : axes_) names.push_back(str("'", axis.name, "'"));
  throw CheckFailure(str("there is no axis '", name, "'. There are ", join(names, ", ")));
}

Combinations::Condition Combinations::condition_of(const std::string& text) const {
  const auto equals = text.find('=');
  const auto axis = axis_of(text.substr(0, equals));
  const auto& values = axes_[axis].values;
  auto names = split(equals == std::string::npos ? "" : text.substr(equals + 1), '|');
  if (names.empty()) names.emplace_back();
  Condition condition;
  for (const auto& name : names) {
    const auto found = std::find(values.begin(), values.end(), name);
    if (found == values.end()) {
      throw CheckFailure(
          str("axis '", axes_[axis].name, "' has no value '", name, "'. It has '", join(values, "', '"), "'"));
    }
    condition.push_back({axis, static_cast<std::size_t>(found - values.begin())});
  }
  return condition;
}

std::vector<const Rule*> Combinations::rules_of(const Combination& combination) const {
  std::vector<const Rule*> result;
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    const auto is_met = [&](const Condition& condition) {
      return std::any_of(condition.begin(), condition.end(),
                         [&](const Choice& choice) { return combination[choice.axis] == choice.value; });
    };
    if (std::all_of(conditions_[i].begin(), conditions_[i].end(), is_met)) result.push_back(&rules_[i]);
  }
  return result;
}

Combination Combinations::shrunk(Combination combination, const std::function<bool(const Combination&)>& fails) const {
  for (auto& value : combination) {
    const auto kept = std::exchange(value, 0);
    const bool is_program = [&] {
      const auto rules = rules_of(combination);
      return std::none_of(rules.begin(), rules.end(),
                          [](const Rule* rule) { return rule->kind == Rule::Kind::kSenseless; });
    }();
    if (kept != 0 && !(is_program && fails(combination))) value = kept;
  }
  return combination;
}

const std::string& Combinations::value(const Combination& combination, const std::string& axis) const {
  const auto index = axis_of(axis);
  return axes_[index].values[combination[index]];
}

std::string Combinations::describe(const Combination& combination) const {
  std::vector<std::string> parts;
  for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
    if (combination[axis] != kOpen) {
      parts.push_back(str(axes_[axis].name, "=", axes_[axis].values[combination[axis]]));
    }
  }
  return join(parts, ", ");
}

Combination Combinations::parse(const std::string& text) const {
  Combination result(axes_.size(), 0);
  for (const auto& part : split(text, ',')) {
    const auto condition = condition_of(part);
    result[condition.front().axis] = condition.front().value;
  }
  return result;
}

std::vector<Combinations::Choices> Combinations::tuples(int strength) const {
  if (strength < 1 || static_cast<std::size_t>(strength) > axes_.size()) {
    throw CheckFailure(str("there are no ", strength, " values of different axes: there are ", axes_.size(), " axes"));
  }
  std::vector<Choices> result = {{}};
  for (int i = 0; i < strength; ++i) {
    std::vector<Choices> longer;
    for (const auto& tuple : result) {
      for (std::size_t axis = tuple.empty() ? 0 : tuple.back().axis + 1; axis < axes_.size(); ++axis) {
        for (std::size_t value = 0; value < axes_[axis].values.size(); ++value) {
          longer.push_back(tuple);
          longer.back().push_back({axis, value});
        }
      }
    }
    result = std::move(longer);
  }
  return result;
}

/// Fills combinations up, one value after the other, and keeps count of what is left to cover.
class Combinations::Search {
 public:
  Search(const Combinations& all, int strength, std::uint64_t seed) : all_(all), strength_(strength), random_(seed) {
    for (const auto& tuple : all.tuples(strength)) left_.insert(key_of(tuple));
  }

  bool is_left(const Choices& tuple) const { return left_.contains(key_of(tuple)); }
  void cover(const Combination& combination) {
    for (const auto key : keys_of(combination)) left_.erase(key);
  }
  /// Whether some `strength` values of `begun` are not in `seen`, to which they are added; always if it has fewer.
  bool is_new(const Combination& begun, std::set<std::uint64_t>& seen) const {
    const auto keys = keys_of(begun);
    const auto before = seen.size();
    seen.insert(keys.begin(), keys.end());
    return keys.empty() || seen.size() > before;
  }
  /// The best of some tries to give `begun` values for its open axes, so that no rule but `allowed` is about it. Empty
  /// if there is none.
  Combination fill(const Combination& begun, const Rule* allowed) {
    Combination best;
    std::size_t best_gain = 0;
    for (int i = 0; i < kTries; ++i) {
      const auto tried = fill_once(begun, allowed);
      if (tried.empty()) continue;
      const auto gain = gain_of(tried);
      if (best.empty() || gain > best_gain) {
        best = tried;
        best_gain = gain;
      }
      // Where nothing counts as covered, one is as good as another.
      if (allowed != nullptr) break;
    }
    return best;
  }

 private:
  static constexpr std::uint64_t kBase = 64;  // more than there are axes, and values of an axis

  static std::uint64_t key_of(const Choices& tuple) {
    std::uint64_t key = 1;
    for (const auto& choice : tuple) key = (key * kBase + choice.axis) * kBase + choice.value;
    return key;
  }
  std::vector<std::uint64_t> keys_of(const Combination& combination) const {
    std::vector<std::uint64_t> keys;
    std::vector<std::pair<std::uint64_t, std::size_t>> begun = {{1, 0}};
    for (int i = 0; i < strength_; ++i) {
      std::vector<std::pair<std::uint64_t, std::size_t>> longer;
      for (const auto& [key, first] : begun) {
        for (std::size_t axis = first; axis < combination.size(); ++axis) {
          if (combination[axis] != kOpen)
            longer.emplace_back((key * kBase + axis) * kBase + combination[axis], axis + 1);
        }
      }
      begun = std::move(longer);
    }
    for (const auto& [key, first] : begun) keys.push_back(key);
    return keys;
  }
  std::size_t gain_of(const Combination& combination) const {
    const auto keys = keys_of(combination);
    return static_cast<std::size_t>(
        std::count_if(keys.begin(), keys.end(), [&](std::uint64_t key) { return left_.contains(key); }));
  }
  bool is_free(const Combination& combination, const Rule* allowed) const {
    const auto rules = all_.rules_of(combination);
    return std::all_of(rules.begin(), rules.end(), [&](const Rule* rule) { return rule == allowed; });
  }
  Combination fill_once(Combination combination, const Rule* allowed) {
    std::vector<std::size_t> open;
    for (std::size_t axis = 0; axis < combination.size(); ++axis) {
      if (combination[axis] == kOpen) open.push_back(axis);
    }
    std::shuffle(open.begin(), open.end(), random_);
    for (const auto axis : open) {
      std::vector<std::size_t> values(all_.axes_[axis].values.size());
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = i;
      std::shuffle(values.begin(), values.end(), random_);
      std::size_t best = kOpen;
      std::size_t best_gain = 0;
      for (const auto value : values) {
        combination[axis] = value;
        if (!is_free(combination, allowed)) continue;
        const auto gain = gain_of(combination);
        if (best != kOpen && gain <= best_gain) continue;
        best = value;
        best_gain = gain;
      }
      if (best == kOpen) return {};
      combination[axis] = best;
    }
    return is_free(combination, allowed) ? combination : Combination();
  }

  const Combinations& all_;
  const int strength_;
  std::mt19937_64 random_;
  std::set<std::uint64_t> left_;
};

std::vector<Combination> Combinations::covering(int strength, std::uint64_t seed) const {
  Search search(*this, strength, seed);
  std::vector<Combination> result;
  const auto begun_with = [&](const Choices& choices) {
    Combination begun(axes_.size(), kOpen);
    for (const auto& choice : choices) begun[choice.axis] = choice.value;
    return begun;
  };
  for (const auto& tuple : tuples(strength)) {
    if (!search.is_left(tuple)) continue;
    const auto found = search.fill(begun_with(tuple), nullptr);
    if (found.empty()) continue;  // a rule is about it, by itself or by what it leaves
    search.cover(found);
    result.push_back(found);
  }
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    if (rules_[i].kind == Rule::Kind::kSenseless) continue;
    std::vector<Choices> refusals = {{}};
    for (const auto& condition : conditions_[i]) {
      std::vector<Choices> longer;
      for (const auto& begun : refusals) {
        for (const auto& choice : condition) {
          longer.push_back(begun);
          longer.back().push_back(choice);
        }
      }
      refusals = std::move(longer);
    }
    std::set<std::uint64_t> seen;
    for (const auto& refusal : refusals) {
      if (!search.is_new(begun_with(refusal), seen)) continue;
      const auto found = search.fill(begun_with(refusal), &rules_[i]);
      if (!found.empty()) result.push_back(found);
    }
  }
  return result;
}

std::vector<std::string> Combinations::uncovered(const std::vector<Combination>& list, int strength) const {
  Search search(*this, strength, 1);
  for (const auto& combination : list) {
    if (rules_of(combination).empty()) search.cover(combination);
  }
  std::vector<std::string> result;
  for (const auto& tuple : tuples(strength)) {
    if (!search.is_left(tuple)) continue;
    Combination begun(axes_.size(), kOpen);
    for (const auto& choice : tuple) begun[choice.axis] = choice.value;
    if (!search.fill(begun, nullptr).empty()) result.push_back(describe(begun));
  }
  return result;
}

}  // namespace lockstep::testing
