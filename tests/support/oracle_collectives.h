// Numbers of collectives beside those that Python's CommDebugMode counted.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::oracle {

/// By Python's short names: {"all_gather": 1}.
using Counts = std::map<std::string, int64_t>;

inline Counts counts_of(const c10::IValue& dict) {
  Counts counts;
  for (const auto& item : dict.toGenericDict()) counts[item.key().toStringRef()] = item.value().toInt();
  return counts;
}

inline Counts launched(const testing::Recorder& recorder) {
  Counts counts;
  for (const auto& event : recorder.events("launch")) {
    auto kind = event.kind;
    for (const std::string suffix : {"_into_tensor", "_tensor", "_single"}) {
      if (kind.ends_with(suffix)) kind.resize(kind.size() - suffix.size());
    }
    ++counts[kind];
  }
  return counts;
}

inline void add(Counts& counts, const Counts& more) {
  for (const auto& [kind, count] : more) counts[kind] += count;
}

inline int64_t total(const Counts& counts) {
  int64_t sum = 0;
  for (const auto& [kind, count] : counts) sum += count;
  return sum;
}

/// In shares of what an all-gather moves: an all-reduce gathers after it has scattered, an all-to-all brings each rank
/// only what it keeps.
inline double bytes_moved(const Counts& counts) {
  double sum = 0;
  for (const auto& [kind, count] : counts) {
    const double share = kind == "all_reduce" ? 2 : kind == "all_to_all" ? 0.5 : 1;
    sum += share * static_cast<double>(count);
  }
  return sum;
}

inline std::string to_text(const Counts& counts) {
  std::vector<std::string> texts;
  for (const auto& [kind, count] : counts) texts.push_back(str(count, " ", kind));
  return texts.empty() ? "none" : join(texts, ", ");
}

/// The same as Python's, or fewer and moving no more, or as many and moving less.
inline bool are_as_good(const Counts& ours, const Counts& python) {
  if (ours == python) return true;
  const auto fewer = total(python) - total(ours);
  const auto saved = bytes_moved(python) - bytes_moved(ours);
  return fewer >= 0 && saved >= 0 && (fewer > 0 || saved > 0);
}

}  // namespace lockstep::oracle
