#include "benchmarks/collectives/rows.h"

#include <algorithm>

#include "benchmarks/collectives/memory_stream.h"
#include "lockstep/base/str.h"

namespace lockstep::bench {
namespace {

/// What ratios are meant to reach on two cores.
std::optional<double> goal_of(const std::string& case_name, const std::string& peer) {
  static const std::map<std::pair<std::string, std::string>, double> goals = {
      {{"allreduce 25MiB world 2 zero-copy", kGloo}, 3.5},
      {{"allreduce 25MiB world 2 zero-copy", kMpi}, 1.3},
      {{"allreduce 25MiB world 4 zero-copy", kGloo}, 8},
      {{"allreduce 25MiB world 4 zero-copy", kMpi}, 3.5},
      {{"allreduce 25MiB world 2 ordinary", kGloo}, 2.3},
      {{"allreduce 25MiB world 2 ordinary", kMpi}, 1},
      {{"allreduce 1KiB world 2", kGloo}, 100},
      {{"allreduce 1KiB world 2", kMpi}, 0.8},
      {{"allreduce 1KiB world 4", kGloo}, 50},
      {{"allreduce 1KiB world 4", kMpi}, 0.8},
  };
  const auto found = goals.find({case_name, peer});
  return found == goals.end() ? std::nullopt : std::optional(found->second);
}

constexpr double kMemoryGoal = 0.6;

Samples milliseconds(Samples seconds) {
  for (auto& value : seconds) value *= 1e3;
  return seconds;
}

Samples gigabytes_per_second(Samples seconds, int64_t bytes) {
  for (auto& value : seconds) value = static_cast<double>(bytes) / value / 1e9;
  return seconds;
}

/// A limit is what was reached once: a median that others disturbed would flatter us.
Figure best_of(const Samples& samples) {
  auto figure = figure_of(samples);
  figure.value = *std::max_element(samples.begin(), samples.end());
  return figure;
}

std::string case_name(Operation operation, int64_t bytes, int world_size, const std::string& tensors) {
  const auto name = str(name_of(operation), " ", size_name(bytes), " world ", world_size);
  return bytes < kLargeBytes && tensors == kOrdinary ? name : name + " " + tensors;
}

}  // namespace

std::vector<Row> rows_of(Operation operation, int64_t bytes, int world_size, const Measurements& measurements) {
  const auto samples_of = [&](const char* contender) -> const Samples* {
    const auto found = measurements.find({bytes, contender});
    return found == measurements.end() ? nullptr : &found->second;
  };
  std::vector<Row> rows;
  for (const char* tensors : {kOrdinary, kZeroCopy}) {
    const auto* ours = samples_of(tensors);
    const auto name = case_name(operation, bytes, world_size, tensors);
    for (const char* peer : {kGloo, kMpi}) {
      const auto* theirs = samples_of(peer);
      if (!ours || !theirs) continue;
      rows.push_back({.case_name = name,
                      .metric = "ms",
                      .ours = figure_of(milliseconds(*ours)),
                      .peer = peer,
                      .theirs = figure_of(milliseconds(*theirs)),
                      .goal = goal_of(name, peer)});
    }
  }
  for (const char* peer : {kMemory, kMemoryHuge}) {
    const auto* ours = samples_of(kZeroCopy);
    const auto* memory = samples_of(peer);
    if (!ours || !memory) continue;
    // Of each of the N shares of n/N bytes, all N copies are read and all N are written.
    const auto moved = 2 * world_size * bytes;
    const auto passed = gigabytes_per_second(*memory, world_size * MemoryStream::kBytesPerPass);
    rows.push_back({.case_name = case_name(operation, bytes, world_size, kZeroCopy) + ", share of memory bandwidth",
                    .metric = "GB/s",
                    .ours = figure_of(gigabytes_per_second(*ours, moved)),
                    .peer = peer,
                    .theirs = best_of(passed),
                    .better = Better::kHigher,
                    .goal = kMemoryGoal});
  }
  return rows;
}

}  // namespace lockstep::bench
