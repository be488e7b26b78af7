#include "lockstep/dtensor/redistribute_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/plan_at.h"

namespace lockstep {
namespace {

using Sizes = std::vector<int64_t>;

int64_t product_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

bool cuts(const Placement& placement, int64_t dim) {
  return sharded_dim(placement) == dim;
}

bool is_cut(const Placement& placement) {
  return sharded_dim(placement).has_value();
}

bool is_replicate(const Placement& placement) {
  return std::holds_alternative<Replicate>(placement);
}

/// Moves to and from these go through Replicate.
bool is_special(const Placement& placement) {
  return std::holds_alternative<StridedShard>(placement) || std::holds_alternative<RaggedShard>(placement);
}

Move move_between(const Placement& from, const Placement& to) {
  if (std::holds_alternative<Partial>(to)) return Move::kPartition;
  if (std::holds_alternative<Partial>(from)) return is_replicate(to) ? Move::kAllReduce : Move::kReduceScatter;
  if (is_replicate(from)) return Move::kSlice;
  return is_replicate(to) ? Move::kAllGather : Move::kAllToAll;
}

/// Puts steps in order. An axis can move alone only if no axis to its right cuts a dim that it cuts before or after:
/// those divide what it leaves to them. So axes that are in the way, or that hold chunks of the wrong whole, are
/// gathered first, innermost first, and cut again in the end, outermost first.
class StepOrder {
 public:
  StepOrder(const Sizes& shape, const Placements& from, const Placements& to, const Sizes& sizes)
      : shape_(shape), now_(from), goal_(to), sizes_(sizes) {
    steps_.reserve(2 * to.size());
  }

  std::vector<RedistributeStep> take() {
    skip_single_ranks();
    const auto last = free_strided_axes();
    slice_where_possible();  // all that follows moves less
    reduce_where_possible();
    unwind();
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      if (now_[axis] != goal_[axis]) add(axis, goal_[axis]);
    }
    for (const auto& [axis, strided] : last) add(axis, strided, /*is_one_run=*/true);
    return std::move(steps_);
  }

 private:
  void add(std::size_t axis, const Placement& to, bool is_one_run = false) {
    TORCH_INTERNAL_ASSERT(is_one_run || (is_free(axis, now_[axis]) && is_free(axis, to)), "axis ", axis);
    steps_.push_back({.mesh_dim = static_cast<int64_t>(axis),
                      .from = now_[axis],
                      .to = to,
                      .move = shape_[axis] == 1 ? Move::kNone : move_between(now_[axis], to),
                      .ranks = shape_[axis],
                      .is_one_run = is_one_run});
    now_[axis] = to;
  }

  /// What they hold is the same by any name. They take part in nothing: both sides are made Replicate.
  void skip_single_ranks() {
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      if (shape_[axis] != 1) continue;
      if (now_[axis] != goal_[axis]) {
        steps_.push_back({.mesh_dim = static_cast<int64_t>(axis), .from = now_[axis], .to = goal_[axis]});
      }
      now_[axis] = goal_[axis] = Replicate();
    }
  }

  bool is_innermost(std::size_t axis, int64_t dim) const {
    return std::none_of(now_.begin() + static_cast<std::ptrdiff_t>(axis) + 1, now_.end(),
                        [&](const Placement& right) { return cuts(right, dim); });
  }

  bool is_free(std::size_t axis, const Placement& placement) const {
    const auto dim = sharded_dim(placement);
    return !dim || is_innermost(axis, *dim);
  }

  /// The axes to the left leave the same of the dim to this one now and in the end.
  bool is_aligned(std::size_t axis, int64_t dim) const {
    for (std::size_t left = 0; left < axis; ++left) {
      if ((cuts(now_[left], dim) || cuts(goal_[left], dim)) && now_[left] != goal_[left]) return false;
    }
    return true;
  }

  bool can_cut(std::size_t axis, int64_t dim) const { return is_aligned(axis, dim) && is_innermost(axis, dim); }

  /// A StridedShard that stands for "cut last, after the axes to the right", all of it evenly: FSDP over tensor
  /// parallelism. It moves while those stay as they are.
  bool is_cut_last(std::size_t axis, const Placements& placements) const {
    const auto* strided = std::get_if<StridedShard>(&placements[axis]);
    if (strided == nullptr) return false;
    int64_t right_chunks = 1;
    for (std::size_t other = 0; other < placements.size(); ++other) {
      if (other == axis || !cuts(placements[other], strided->dim)) continue;
      if (other < axis || !std::holds_alternative<Shard>(placements[other])) return false;
      right_chunks *= shape_[other];
    }
    const auto size = sizes_[static_cast<std::size_t>(strided->dim)];
    return right_chunks == strided->split_factor && size % (right_chunks * shape_[axis]) == 0;
  }

  /// Gathers axes that are cut last, and keeps those that will be for the end: returns these.
  std::vector<std::pair<std::size_t, Placement>> free_strided_axes() {
    std::vector<std::pair<std::size_t, Placement>> last;
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      if (now_[axis] == goal_[axis]) continue;
      if (is_cut_last(axis, now_)) add(axis, Replicate(), /*is_one_run=*/true);
      if (is_cut_last(axis, goal_)) last.emplace_back(axis, goal_[axis]);
    }
    for (const auto& each : last) goal_[each.first] = Replicate();
    return last;
  }

  void slice_where_possible() {
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      const auto dim = sharded_dim(goal_[axis]);
      if (dim && is_replicate(now_[axis]) && can_cut(axis, *dim)) add(axis, goal_[axis]);
    }
  }

  /// Before anything is gathered, since it is least then; scattered first, for the same reason.
  void reduce_where_possible() {
    const auto is_partial = [&](std::size_t axis) { return std::holds_alternative<Partial>(now_[axis]); };
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      const auto* shard = std::get_if<Shard>(&goal_[axis]);
      if (is_partial(axis) && shard != nullptr && can_cut(axis, shard->dim)) add(axis, goal_[axis]);
    }
    for (std::size_t axis = 0; axis < goal_.size(); ++axis) {
      if (is_partial(axis) && is_replicate(goal_[axis])) add(axis, goal_[axis]);
    }
  }

  /// From the innermost axis outwards: to the goal if what the axis will cut is there, else to Replicate. As Python.
  void unwind() {
    for (std::size_t axis = goal_.size(); axis-- > 0;) {
      auto target = goal_[axis];
      const auto dim = sharded_dim(target);
      const auto& current = now_[axis];
      if (dim && !is_aligned(axis, *dim)) target = Replicate();
      if (current != target && !is_replicate(current) && (is_special(current) || is_special(target))) {
        target = Replicate();
      }
      // Terms are made last, of what is left then.
      if (current != target && !std::holds_alternative<Partial>(target)) add(axis, target);
    }
  }

  const Sizes& shape_;
  Placements now_;
  Placements goal_;
  const Sizes& sizes_;
  std::vector<RedistributeStep> steps_;
};

/// Whose terms can be made from the value: it divided, or it itself.
bool can_partition(ReduceOp op) {
  return op != ReduceOp::PRODUCT && op != ReduceOp::BXOR;
}

/// What is wrong with the move of one axis; null if nothing.
const char* find_move_problem(const Placement& from, const Placement& to, const PlanOptions& options) {
  const auto* partial = std::get_if<Partial>(&to);
  if (partial == nullptr || from == to) return nullptr;
  if (std::holds_alternative<Partial>(from)) {
    return "terms of one reduction are not those of another. Redistribute to Replicate or Shard.";
  }
  if (is_cut(from)) return "a part is not a term of the whole. Redistribute to Replicate or Shard.";
  if (!options.allow_partial_target) {
    return "values that are complete are not made into terms. Leave it Replicate, or use from_local() for terms.";
  }
  return can_partition(partial->op) ? nullptr : "no terms can be made for this reduction. Leave it Replicate.";
}

void check_moves(const DeviceMesh& mesh, const Placements& from, const Placements& to, const PlanOptions& options) {
  for (std::size_t axis = 0; axis < to.size(); ++axis) {
    const auto* problem = find_move_problem(from[axis], to[axis], options);
    TORCH_CHECK(problem == nullptr, "[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh,
                ": cannot redistribute from ", from[axis], " to ", to[axis], " on mesh dim ", axis, ": ", problem);
  }
}

/// No dim is cut by two axes, so that each moves in one step, or through Replicate.
bool moves_axes_alone(const Layout& from, const Placements& to) {
  const auto meets = [](const Placement& one, const Placement& other) {
    return is_cut(one) && sharded_dim(one) == sharded_dim(other);
  };
  const auto& now = from.placements();
  for (std::size_t left = 0; left < to.size(); ++left) {
    for (std::size_t right = left + 1; right < to.size(); ++right) {
      if (meets(now[left], now[right]) || meets(now[left], to[right])) return false;
      if (meets(to[left], now[right]) || meets(to[left], to[right])) return false;
    }
  }
  return true;
}

/// Adds up what moves bring, as if all sizes were divisible.
class Price {
 public:
  Price(const Layout& from, int64_t element_bytes) : local_(from.numel() * element_bytes) {
    for (std::size_t axis = 0; axis < from.placements().size(); ++axis) {
      if (is_cut(from.placements()[axis])) local_ /= from.mesh().size(static_cast<int64_t>(axis));
    }
  }

  void add(const Placement& from, const Placement& to, int64_t ranks) {
    if (ranks == 1) return;
    if (!is_replicate(from) && !is_replicate(to) && (is_special(from) || is_special(to))) {
      add(from, Replicate(), ranks);
      add(Replicate(), to, ranks);
      return;
    }
    const auto move = move_between(from, to);
    const auto whole = is_cut(from) ? local_ * ranks : local_;
    const auto from_others = whole / ranks * (ranks - 1);
    total_ += 1;
    if (move == Move::kAllGather || move == Move::kReduceScatter) total_ += from_others;
    if (move == Move::kAllReduce) total_ += 2 * from_others;
    if (move == Move::kAllToAll) total_ += from_others / ranks;
    local_ = is_cut(to) ? whole / ranks : whole;
  }

  int64_t total() const { return total_; }

 private:
  int64_t local_;
  int64_t total_ = 0;
};

/// What of the whole that an axis's ranks hold together its `rank` holds.
int64_t part_along(const Placement& placement, const RedistributeStep& step, int rank) {
  const auto dim = static_cast<std::size_t>(sharded_dim(placement).value());
  return detail::part_of_step(step, placement, rank).sizes()[dim];
}

int64_t elements_received(const RedistributeStep& step, int rank) {
  const auto all = product_of(step.sizes);
  if (all == 0) return 0;
  const auto per_index = [&](const Placement& placement) {
    return all / step.sizes[static_cast<std::size_t>(sharded_dim(placement).value())];
  };
  switch (step.move) {
    case Move::kAllGather:
      return all - part_along(step.from, step, rank) * per_index(step.from);
    case Move::kAllReduce:
      return 2 * all * (step.ranks - 1) / step.ranks;
    case Move::kReduceScatter:
      return (step.ranks - 1) * part_along(step.to, step, rank) * per_index(step.to);
    case Move::kAllToAll: {
      // Of its new part all but what it holds of it.
      const auto gets = part_along(step.to, step, rank);
      const auto size = step.sizes[static_cast<std::size_t>(sharded_dim(step.from).value())];
      return gets * (size - part_along(step.from, step, rank)) * (per_index(step.to) / size);
    }
    default:
      return 0;
  }
}

}  // namespace

namespace detail {

TensorPart part_of_step(const RedistributeStep& step, const Placement& placement, int rank) {
  const auto dim = sharded_dim(placement);
  const auto cut = step.is_one_run && dim ? Placement(Shard(*dim)) : placement;
  return part_at({rank}, {step.ranks}, {cut}, step.sizes);
}

RedistributePlan plan_at(const std::vector<int>& coordinate, const Layout& from, const Placements& to,
                         int64_t element_bytes) {
  const auto shape = from.mesh().shape();
  auto now = from.placements();
  RedistributePlan plan = {StepOrder(shape, now, to, from.sizes()).take()};
  for (auto& step : plan.steps) {
    const auto axis = static_cast<std::size_t>(step.mesh_dim);
    now[axis] = Replicate();
    step.sizes = part_at(coordinate, shape, now, from.sizes()).sizes();
    step.bytes = elements_received(step, coordinate[axis]) * element_bytes;
    now[axis] = step.to;
  }
  return plan;
}

}  // namespace detail

const char* name_of(Move move) {
  switch (move) {
    case Move::kNone:
      return "nothing";
    case Move::kSlice:
      return "slice";
    case Move::kAllGather:
      return "all_gather";
    case Move::kAllReduce:
      return "all_reduce";
    case Move::kReduceScatter:
      return "reduce_scatter";
    case Move::kAllToAll:
      return "all_to_all";
    case Move::kPartition:
      return "partition";
  }
  return "unknown";
}

std::string RedistributeStep::to_string() const {
  auto text = str("mesh dim ", mesh_dim, ": ", from, " -> ", to, ": ", name_of(move));
  const bool is_local = move == Move::kNone || move == Move::kSlice || move == Move::kPartition;
  return is_local ? text : str(text, " over ", ranks, " ranks, ", bytes, " bytes");
}

int64_t RedistributePlan::bytes() const {
  int64_t total = 0;
  for (const auto& step : steps) total += step.bytes;
  return total;
}

std::string RedistributePlan::to_string() const {
  if (steps.empty()) return "nothing to do";
  std::string text;
  for (const auto& step : steps) text += step.to_string() + "\n";
  return str(text, "together ", bytes(), " bytes");
}

std::ostream& operator<<(std::ostream& out, const RedistributePlan& plan) {
  return out << plan.to_string();
}

RedistributePlan plan_redistribute(const Layout& from, const Placements& to, at::ScalarType dtype,
                                   const PlanOptions& options) {
  if (from.placements() == to) return {};
  const Layout target(from.mesh(), to, from.sizes());
  check_moves(from.mesh(), from.placements(), target.placements(), options);
  const auto& coordinate = from.mesh().get_coordinate();
  if (!coordinate) return {};
  return detail::plan_at(*coordinate, from, target.placements(), static_cast<int64_t>(c10::elementSize(dtype)));
}

int64_t redistribute_bytes(const Layout& from, const Placements& to, at::ScalarType dtype, const PlanOptions& options) {
  if (from.placements() == to) return 0;
  for (std::size_t axis = 0; axis < to.size(); ++axis) {
    if (find_move_problem(from.placements()[axis], to[axis], options) != nullptr) return kNoWay;
  }
  Price price(from, static_cast<int64_t>(c10::elementSize(dtype)));
  if (!moves_axes_alone(from, to)) {
    const auto shape = from.mesh().shape();
    for (const auto& step : StepOrder(shape, from.placements(), to, from.sizes()).take()) {
      price.add(step.from, step.to, step.ranks);
    }
    return price.total();
  }
  // As StepOrder would: what makes the rest smaller first, gathers last.
  const auto add_if = [&](bool is_gathered) {
    for (std::size_t axis = 0; axis < to.size(); ++axis) {
      const auto& before = from.placements()[axis];
      if (is_gathered != (is_cut(before) && is_replicate(to[axis])) || before == to[axis]) continue;
      price.add(before, to[axis], from.mesh().size(static_cast<int64_t>(axis)));
    }
  };
  add_if(false);
  add_if(true);
  return price.total();
}

}  // namespace lockstep
