#include "checkpoint_cli/differences.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint_cli/listing.h"
#include "lockstep/base/str.h"
#include "lockstep/checkpoint/reading.h"

namespace lockstep::checkpoint_cli {
namespace {

using Json = nlohmann::ordered_json;
using detail::Reading;
using detail::StoredTensor;

/// What is read at a time.
constexpr int64_t kElements = int64_t{1} << 20;

at::ScalarType integer_of_width(std::size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kChar;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

/// How far apart elements are: 0 where they are the same, infinity where only one is a number.
at::Tensor distances(const at::Tensor& one, const at::Tensor& other) {
  const auto type = one.scalar_type();
  const auto wide = c10::isComplexType(type) ? at::kComplexDouble : at::kDouble;
  const auto a = one.to(wide);
  const auto b = other.to(wide);
  auto distance = at::abs(a - b);
  if (c10::isFloatingType(type) || c10::isComplexType(type)) {
    distance.masked_fill_(at::isnan(distance), std::numeric_limits<double>::infinity());
    return distance.masked_fill_(at::logical_or(a == b, at::logical_and(at::isnan(a), at::isnan(b))), 0);
  }
  // Doubles do not tell all integers apart, and libtorch does not compare unsigned ones.
  const auto exact = integer_of_width(one.element_size());
  return distance.clamp_min_(1).masked_fill_(one.view(exact) == other.view(exact), 0);
}

class Comparison {
 public:
  Comparison(const detail::Catalog& first, const detail::Catalog& second, double tolerance)
      : first_(first, {.verify = dcp::Verify::kNever}, 0, 1),
        second_(second, {.verify = dcp::Verify::kNever}, 0, 1),
        tolerance_(tolerance) {}

  /// Empty if there is no difference.
  std::string of_tensors(const std::string& name, const StoredTensor& one, const StoredTensor& other,
                         detail::ProgressTeller& progress) {
    if (one.sizes != other.sizes) {
      return str("shape [", join(one.sizes, ", "), "] and [", join(other.sizes, ", "), "]");
    }
    if (one.dtype != other.dtype) return str("dtype ", one.dtype, " and ", other.dtype);
    const auto type = one.scalar_type(name);
    const auto total = c10::multiply_integers(one.sizes);
    int64_t differing = 0;
    double largest = 0;
    for (int64_t begin = 0; begin < total; begin += kElements) {
      for (const auto& box : boxes_of_run({begin, std::min(total, begin + kElements)}, one.sizes)) {
        const auto distance = distances(read(first_, name, box, type), read(second_, name, box, type));
        largest = std::max(largest, distance.max().item<double>());
        differing += at::gt(distance, tolerance_).sum().item<int64_t>();
        progress.add(2 * box.numel() * static_cast<int64_t>(c10::elementSize(type)));
      }
    }
    if (differing == 0) return "";
    return str(differing, " of ", total, " elements differ, by up to ", largest);
  }

  void of_values(const std::string& name, const Json& one, const Json& other, std::vector<Difference>& into) const {
    if (one.is_array() && other.is_array() && one.size() == other.size()) {
      for (std::size_t i = 0; i < one.size(); ++i) of_values(str(name, "[", i, "]"), one[i], other[i], into);
      return;
    }
    for (const auto* mark : {"dict", "tuple"}) {  // what JSON has no form for: of no interest here
      const bool is_marked = one.is_object() && one.size() == 1 && one.contains(mark);
      if (is_marked && other.is_object() && other.size() == 1 && other.contains(mark)) {
        return of_values(name, one[mark], other[mark], into);
      }
    }
    if (one.is_object() && other.is_object()) {
      for (const auto& [key, value] : one.items()) of_values(str(name, ".", key), value, at_key(other, key), into);
      for (const auto& [key, value] : other.items()) {
        if (!one.contains(key)) of_values(str(name, ".", key), Json(), value, into);
      }
      return;
    }
    if (one == other || is_near(one, other)) return;
    into.push_back({.name = name, .what = str(short_text(one), " and ", short_text(other))});
  }

 private:
  static at::Tensor read(Reading& reading, const std::string& name, const Box& box, at::ScalarType type) {
    auto values = at::empty(box.sizes, type);
    reading.read_now(name, {{.box = box, .values = values}});
    return values;
  }

  /// Null if there is none.
  static Json at_key(const Json& object, const std::string& key) {
    const auto found = object.find(key);
    return found == object.end() ? Json() : *found;
  }

  bool is_near(const Json& one, const Json& other) const {
    return one.is_number() && other.is_number() && std::abs(one.get<double>() - other.get<double>()) <= tolerance_ &&
           (one.is_number_float() || other.is_number_float());
  }

  Reading first_;
  Reading second_;
  const double tolerance_;
};

/// Names that only one has, and those that both have.
template <class Map>
std::set<std::string> matched(const Map& first, const Map& second, Differences& differences) {
  std::set<std::string> common;
  for (const auto& [name, each] : first) {
    second.contains(name) ? (void)common.insert(name) : differences.only_in_first.push_back(name);
  }
  for (const auto& [name, each] : second) {
    if (!first.contains(name)) differences.only_in_second.push_back(name);
  }
  return common;
}

}  // namespace

Differences compare(const std::string& first, const std::string& second, double tolerance) {
  const at::NoGradGuard no_grad;
  const auto one = detail::open_catalog(first);
  const auto other = detail::open_catalog(second);
  Differences differences;
  const auto tensors = matched(one.tensors, other.tensors, differences);
  const auto values = matched(one.values, other.values, differences);
  differences.compared = static_cast<int64_t>(tensors.size() + values.size());
  int64_t bytes = 0;
  for (const auto& name : tensors) bytes += 2 * bytes_of(one.tensors.at(name));
  detail::ProgressTeller progress("comparing", bytes, nullptr);
  Comparison comparison(one, other, tolerance);
  for (const auto& name : tensors) {
    auto what = comparison.of_tensors(name, one.tensors.at(name), other.tensors.at(name), progress);
    if (!what.empty()) differences.changed.push_back({.name = name, .what = std::move(what)});
  }
  for (const auto& name : values) {
    comparison.of_values(name, one.values.at(name), other.values.at(name), differences.changed);
  }
  return differences;
}

std::string described(const Differences& differences, const std::string& first, const std::string& second) {
  std::string text;
  for (const auto& name : differences.only_in_first) text += str("only in ", first, ": ", name, "\n");
  for (const auto& name : differences.only_in_second) text += str("only in ", second, ": ", name, "\n");
  for (const auto& each : differences.changed) text += str(each.name, ": ", each.what, "\n");
  if (differences.is_none()) return str("the same: ", differences.compared, " tensors and values\n");
  return text;
}

}  // namespace lockstep::checkpoint_cli
