#include "lockstep/comm/absent_ranks.h"

#include <fstream>
#include <iterator>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

// Longer than ranks of one job are apart when they start, as a rule.
constexpr auto kLong = std::chrono::seconds(10);

}  // namespace

std::optional<std::string> how_rank_ended(const std::string& ended_dir, int rank) {
  if (ended_dir.empty()) return std::nullopt;
  std::ifstream file(str(ended_dir, "/", rank));
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

AbsenceWatch::AbsenceWatch(c10d::Store& store, const GroupDescription& group, const std::string& what,
                           const std::function<std::string(int)>& key)
    : store_(store), group_(group), what_(what), key_(key) {}

std::vector<int> AbsenceWatch::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group_.size; ++rank) {
    if (!has_come(rank)) ranks.push_back(group_.global_ranks[rank]);
  }
  return ranks;
}

std::string AbsenceWatch::look() {
  for (int rank = 0; rank < group_.size; ++rank) {
    const int global = group_.global_ranks[rank];
    // In this order: one that came and then ended has come.
    const auto end = how_rank_ended(group_.ended_dir, global);
    if ((!end && !group_.has_ended(rank)) || has_come(rank)) continue;
    return str("rank ", global, " ended ", end ? str("(", *end, ") ") : "", "before it came");
  }
  const auto waited = std::chrono::steady_clock::now() - begin_;
  if (waited < kLong || std::exchange(has_warned_, true)) return "";
  TORCH_WARN("[lockstep/comm] rank ", group_.global_ranks[group_.rank], ": ", what_, " waits for rank ",
             join(absent(), ", "), " since ", std::chrono::duration_cast<std::chrono::seconds>(waited).count(),
             " s. It goes on doing so until ", group_.timeout.count(), " ms are over.");
  return "";
}

}  // namespace lockstep::detail
