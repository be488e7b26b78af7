#include "lockstep/dtensor/redistribute_limit.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "lockstep/base/rank_local.h"
#include "lockstep/dtensor/check_limit.h"
#include "lockstep/dtensor/plan_at.h"

namespace lockstep {
namespace {

// Of all ranks of the process: with none nobody looks further.
std::atomic<int> limit_count = 0;

}  // namespace

namespace detail {

struct RedistributeLimits {
  // Guarded by mutex: a rank may have several threads.
  std::mutex mutex;
  std::list<int64_t> bytes;

  std::optional<int64_t> lowest() {
    const std::lock_guard lock(mutex);
    if (bytes.empty()) return std::nullopt;
    return *std::min_element(bytes.begin(), bytes.end());
  }
};

void check_limit(const RedistributePlan& plan, const Layout& from, const Placements& to, at::ScalarType dtype,
                 const PlanOptions& options) {
  if (limit_count.load(std::memory_order_relaxed) == 0) return;
  const auto limit = rank_local<RedistributeLimits>().lowest();
  if (!limit) return;
  // Uneven parts: whoever receives most decides for all.
  const auto& mesh = from.mesh();
  const auto target = Layout(mesh, to, from.sizes()).placements();
  int64_t most = 0;
  for (int64_t place = 0; place < mesh.size(); ++place) {
    const auto coordinate = unravel(place, mesh.shape());
    most = std::max(most, plan_at(coordinate, from, target, static_cast<int64_t>(c10::elementSize(dtype))).bytes());
  }
  TORCH_CHECK(most <= *limit, "[lockstep/dtensor] rank ", mesh.get_rank(), ": redistributing ", from, " to ",
              to_string(to), options.needed_by != nullptr ? " for " + *options.needed_by : "", " brings ", most,
              " bytes to a rank, and the RedistributeLimit is ", *limit,
              ". Raise it, or keep the tensor as it is. The plan:\n", plan);
}

}  // namespace detail

RedistributeLimit::RedistributeLimit(int64_t bytes) : limits_(rank_local<detail::RedistributeLimits>()) {
  TORCH_CHECK(bytes >= 0, "[lockstep/dtensor] a RedistributeLimit of ", bytes, " bytes. Give 0 or more.");
  const std::lock_guard lock(limits_.mutex);
  mine_ = limits_.bytes.insert(limits_.bytes.end(), bytes);
  limit_count.fetch_add(1, std::memory_order_relaxed);
}

RedistributeLimit::~RedistributeLimit() {
  const std::lock_guard lock(limits_.mutex);
  limits_.bytes.erase(mine_);
  limit_count.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace lockstep
