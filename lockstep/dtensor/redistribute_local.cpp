#include "lockstep/dtensor/redistribute_local.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "lockstep/comm/plain_memory.h"
#include "lockstep/dtensor/check_limit.h"
#include "lockstep/dtensor/plan_at.h"

namespace lockstep::detail {
namespace {

using LocalSizes = std::vector<int64_t>;

/// A collective that was launched: where its result will be, and what is to be done when it has come.
struct Begun {
  at::Tensor result;
  Pending pending = {};
  std::function<void()> unpack = {};
};

/// One step of this rank.
struct Stage {
  const RedistributeStep& step;
  GroupPtr group;
  int rank;  // on the axis
  bool is_async;

  LocalSizes sizes_of(const Placement& placement, int place) const {
    return part_of_step(step, placement, place).sizes();
  }
  Pending launch(Call call) const {
    call.is_async = is_async;
    call.label = {.text = "redistribute"};
    return lockstep::launch(std::move(call), group);
  }
};

int64_t elements_of(const LocalSizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

LocalSizes with_size(LocalSizes sizes, int64_t dim, int64_t size) {
  sizes[static_cast<std::size_t>(dim)] = size;
  return sizes;
}

LocalSizes stacked(LocalSizes sizes, int64_t count) {
  sizes.insert(sizes.begin(), count);
  return sizes;
}

/// Pieces along `dim` lie one after the other in memory, as they travel.
bool is_outermost(const LocalSizes& sizes, int64_t dim) {
  return std::accumulate(sizes.begin(), sizes.begin() + dim, int64_t{1}, std::multiplies<>()) <= 1;
}

/// All ranks have as much, and each one run.
bool is_even(const RedistributeStep& step, const Placement& placement) {
  const auto dim = static_cast<std::size_t>(sharded_dim(placement).value());
  const bool is_chunked = std::holds_alternative<Shard>(placement) || step.is_one_run;
  return is_chunked && step.sizes[dim] % step.ranks == 0;
}

/// `dim` cut into `count` equal pieces, one per row.
at::Tensor as_rows(const at::Tensor& tensor, int64_t dim, int64_t count) {
  return tensor.unflatten(dim, {count, tensor.size(dim) / count}).movedim(dim, 0);
}

/// Calls visit(rank, begin in the whole, begin in the rank's part, length) for each run of `dim`.
template <class Visit>
void for_each_run(const RedistributeStep& step, const Placement& placement, int64_t dim, const Visit& visit) {
  for (int rank = 0; rank < static_cast<int>(step.ranks); ++rank) {
    const auto part = part_of_step(step, placement, rank);
    int64_t local = 0;
    for (const auto& run : part.ranges()[static_cast<std::size_t>(dim)]) {
      visit(rank, run.begin, local, run.size());
      local += run.size();
    }
  }
}

/// `tensor` with `size` indices in `dim`, the ones it lacks zero; in plain memory.
at::Tensor padded(const at::Tensor& tensor, int64_t dim, int64_t size) {
  const auto has = tensor.size(dim);
  if (has == size) return as_plain_memory(tensor);
  auto frame = at::empty(with_size(tensor.sizes().vec(), dim, size), tensor.options());
  frame.narrow(dim, 0, has).copy_(tensor);
  frame.narrow(dim, has, size - has).zero_();
  return frame;
}

at::Tensor cut_to(const at::Tensor& tensor, int64_t dim, int64_t size) {
  return tensor.size(dim) == size ? tensor : tensor.narrow(dim, 0, size);
}

/// What the rank with most holds of `dim`: the first, unless counts are given.
int64_t longest(const RedistributeStep& step, const Placement& placement, int64_t dim) {
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    return *std::max_element(ragged->counts.begin(), ragged->counts.end());
  }
  return part_of_step(step, placement, 0).sizes()[static_cast<std::size_t>(dim)];
}

Begun begin_gather(const Stage& stage, const at::Tensor& local) {
  const auto& step = stage.step;
  const auto dim = sharded_dim(step.from).value();
  const auto length = longest(step, step.from, dim);
  const auto mine = padded(local, dim, length);
  const bool is_chunked = std::holds_alternative<Shard>(step.from) || step.is_one_run;
  if (is_chunked && is_outermost(step.sizes, dim)) {
    auto all = at::empty(with_size(step.sizes, dim, length * step.ranks), local.options());
    auto pending = stage.launch({.kind = CallKind::kAllGatherSingle, .inputs = {mine}, .outputs = {all}});
    return {cut_to(all, dim, step.sizes[static_cast<std::size_t>(dim)]), std::move(pending)};
  }
  auto rows = at::empty(stacked(mine.sizes().vec(), step.ranks), local.options());
  auto result = at::empty(step.sizes, local.options());
  auto pending = stage.launch({.kind = CallKind::kAllGatherSingle, .inputs = {mine}, .outputs = {rows}});
  return {result, std::move(pending), [step, dim, rows, result] {
            if (is_even(step, step.from)) {
              as_rows(result, dim, step.ranks).copy_(rows);
              return;
            }
            for_each_run(step, step.from, dim, [&](int rank, int64_t begin, int64_t in_part, int64_t size) {
              result.narrow(dim, begin, size).copy_(rows[rank].narrow(dim, in_part, size));
            });
          }};
}

Begun begin_reduce_scatter(const Stage& stage, const at::Tensor& local) {
  const auto& step = stage.step;
  const auto dim = sharded_dim(step.to).value();
  const auto op = std::get<Partial>(step.from).op;
  const auto sizes = stage.sizes_of(step.to, stage.rank);
  const auto length = longest(step, step.to, dim);
  const bool is_outer = is_outermost(step.sizes, dim);
  at::Tensor given;
  if (is_outer) {
    given = padded(local, dim, length * step.ranks);
  } else if (is_even(step, step.to)) {
    given = as_plain_memory(as_rows(local, dim, step.ranks));
  } else {
    given = at::zeros(stacked(with_size(step.sizes, dim, length), step.ranks), local.options());
    for_each_run(step, step.to, dim, [&](int rank, int64_t begin, int64_t in_part, int64_t size) {
      given[rank].narrow(dim, in_part, size).copy_(local.narrow(dim, begin, size));
    });
  }
  auto frame = at::empty(with_size(step.sizes, dim, length), local.options());
  auto pending =
      stage.launch({.kind = CallKind::kReduceScatterSingle, .inputs = {given}, .outputs = {frame}, .op = op});
  const auto has = sizes[static_cast<std::size_t>(dim)];
  if (has == length || is_outer) return {cut_to(frame, dim, has), std::move(pending)};
  auto result = at::empty(sizes, local.options());
  return {result, std::move(pending), [=] { result.copy_(frame.narrow(dim, 0, has)); }};
}

/// How many elements of the tensor each rank's run of `dim` has.
std::vector<int64_t> split_sizes(const RedistributeStep& step, const Placement& placement, const at::Tensor& tensor) {
  const auto dim = static_cast<std::size_t>(sharded_dim(placement).value());
  // The whole dim lies in this tensor, so its other dims count as they are.
  const auto per_index = elements_of(with_size(tensor.sizes().vec(), static_cast<int64_t>(dim), 1));
  std::vector<int64_t> splits;
  for (int rank = 0; rank < static_cast<int>(step.ranks); ++rank) {
    splits.push_back(part_of_step(step, placement, rank).sizes()[dim] * per_index);
  }
  return splits;
}

/// A tensor's pieces along a dim, and the same pieces one after the other in flat memory: copies one way or the other.
template <class Copy>
void for_each_piece(const at::Tensor& tensor, const RedistributeStep& step, const Placement& placement,
                    const at::Tensor& flat, const Copy& copy) {
  const auto dim = sharded_dim(placement).value();
  if (is_even(step, placement)) {
    const auto rows = as_rows(tensor, dim, step.ranks);
    copy(rows, flat.view(rows.sizes()));
    return;
  }
  int64_t place = 0;
  for_each_run(step, placement, dim, [&](int, int64_t begin, int64_t, int64_t size) {
    const auto piece = tensor.narrow(dim, begin, size);
    copy(piece, flat.narrow(0, place, piece.numel()).view(piece.sizes()));
    place += piece.numel();
  });
}

Begun begin_all_to_all(const Stage& stage, const at::Tensor& local) {
  const auto& step = stage.step;
  const auto result_sizes = stage.sizes_of(step.to, stage.rank);
  at::Tensor given;
  if (is_outermost(local.sizes().vec(), sharded_dim(step.to).value())) {
    given = as_plain_memory(local).view({-1});
  } else {
    given = at::empty({local.numel()}, local.options());
    for_each_piece(local, step, step.to, given,
                   [](const at::Tensor& piece, const at::Tensor& in_flat) { in_flat.copy_(piece); });
  }
  const auto received = at::empty({elements_of(result_sizes)}, local.options());
  const bool is_straight = is_outermost(result_sizes, sharded_dim(step.from).value());
  const auto result = is_straight ? received.view(result_sizes) : at::empty(result_sizes, local.options());
  Call call = {.kind = CallKind::kAllToAllSingle, .inputs = {given}, .outputs = {received}};
  if (!is_even(step, step.from) || !is_even(step, step.to)) {
    call.input_splits = split_sizes(step, step.to, local);
    call.output_splits = split_sizes(step, step.from, result);
  }
  auto pending = stage.launch(std::move(call));
  if (is_straight) return {result, std::move(pending)};
  return {result, std::move(pending), [step, result, received] {
            for_each_piece(result, step, step.from, received,
                           [](const at::Tensor& piece, const at::Tensor& in_flat) { piece.copy_(in_flat); });
          }};
}

Begun begin_all_reduce(const Stage& stage, const at::Tensor& local, bool is_own) {
  const auto result = is_own ? as_plain_memory(local) : plain_copy(local);
  const auto op = std::get<Partial>(stage.step.from).op;
  return {result, stage.launch({.kind = CallKind::kAllReduce, .inputs = {result}, .op = op})};
}

bool communicates(const RedistributeStep& step) {
  const bool is_local = step.move == Move::kNone || step.move == Move::kSlice || step.move == Move::kPartition;
  // Nobody on the axis has an element: all of them know.
  return !is_local && elements_of(step.sizes) > 0;
}

Begun begin(const Stage& stage, const at::Tensor& local, bool is_own) {
  switch (stage.step.move) {
    case Move::kAllGather:
      return begin_gather(stage, local);
    case Move::kReduceScatter:
      return begin_reduce_scatter(stage, local);
    case Move::kAllToAll:
      return begin_all_to_all(stage, local);
    default:
      return begin_all_reduce(stage, local, is_own);
  }
}

at::Tensor slice(const RedistributeStep& step, const at::Tensor& local, int rank) {
  const auto dim = sharded_dim(step.to).value();
  const auto part = part_of_step(step, step.to, rank);
  const auto& ranges = part.ranges()[static_cast<std::size_t>(dim)];
  if (ranges.empty()) return at::empty(part.sizes(), local.options());
  if (ranges.size() == 1) return plain_copy(local.narrow(dim, ranges[0].begin, ranges[0].size()));
  std::vector<at::Tensor> runs;
  for (const auto& range : ranges) runs.push_back(local.narrow(dim, range.begin, range.size()));
  return as_plain_memory(at::cat(runs, dim));
}

/// Integers do not divide: the first rank has the value, the others nothing.
at::Tensor partition(const RedistributeStep& step, const at::Tensor& local, int rank) {
  if (std::get<Partial>(step.to).op != ReduceOp::SUM) return local;
  if (!c10::isIntegralType(local.scalar_type(), /*includeBool=*/true)) return as_plain_memory(local.div(step.ranks));
  return rank == 0 ? local : at::zeros(local.sizes(), local.options());
}

at::Tensor take_local_step(const RedistributeStep& step, const at::Tensor& local, int rank) {
  if (step.move == Move::kSlice) return slice(step, local, rank);
  if (step.move == Move::kPartition) return partition(step, local, rank);
  if (step.move == Move::kNone) return local;
  const auto is_sharded = sharded_dim(step.to).has_value();
  return at::empty(is_sharded ? part_of_step(step, step.to, rank).sizes() : step.sizes, local.options());
}

/// Below autograd, which would cost time and remember views.
struct WithoutAutograd {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
};

void check_sizes(const at::Tensor& local, const Layout& from) {
  const auto sizes = from.local_sizes();
  TORCH_CHECK(local.sizes() == at::IntArrayRef(sizes), "[lockstep/dtensor] rank ", from.mesh().get_rank(),
              ": a local tensor of sizes ", local.sizes(), " is not this rank's part of ", from, ", which has sizes ",
              at::IntArrayRef(sizes), ".");
}

at::Tensor take_local_steps(std::vector<RedistributeStep>::const_iterator begin,
                            std::vector<RedistributeStep>::const_iterator end, const std::vector<int>& coordinate,
                            at::Tensor local) {
  for (auto step = begin; step != end; ++step) {
    local = take_local_step(*step, local, coordinate[static_cast<std::size_t>(step->mesh_dim)]);
  }
  return local;
}

/// What is begun, with `rest`, which is local, to be done when it has come: a tensor that is cut again after a gather.
PendingLocal left_open(Begun begun, const std::vector<RedistributeStep>& rest, const Layout& from,
                       const Placements& to) {
  if (rest.empty()) return {std::move(begun.result), std::move(begun.pending), std::move(begun.unpack)};
  auto result = at::empty(Layout(from.mesh(), to, from.sizes()).local_sizes(), begun.result.options());
  auto finish = [rest, result, coordinate = from.mesh().get_coordinate().value(), whole = std::move(begun.result),
                 unpack = std::move(begun.unpack)] {
    if (unpack) unpack();
    result.copy_(take_local_steps(rest.begin(), rest.end(), coordinate, whole));
  };
  return {std::move(result), std::move(begun.pending), std::move(finish)};
}

PendingLocal run_plan(const at::Tensor& given, const Layout& from, const Placements& to, const RedistributePlan& plan,
                      bool is_async) {
  check_sizes(given, from);
  const WithoutAutograd without_autograd;
  const auto& mesh = from.mesh();
  const auto& coordinate = mesh.get_coordinate().value();
  const auto begin_of_rest = std::find_if(plan.steps.rbegin(), plan.steps.rend(), communicates).base();
  auto local = given.requires_grad() ? given.detach() : given;
  for (auto step = plan.steps.begin(); step != begin_of_rest; ++step) {
    const auto rank = coordinate[static_cast<std::size_t>(step->mesh_dim)];
    if (!communicates(*step)) {
      local = take_local_step(*step, local, rank);
      continue;
    }
    const bool is_left_open = is_async && step + 1 == begin_of_rest;
    const Stage stage = {*step, mesh.get_group(step->mesh_dim), rank, is_left_open};
    auto begun = begin(stage, local, /*is_own=*/!local.is_alias_of(given));
    if (is_left_open) return left_open(std::move(begun), {begin_of_rest, plan.steps.end()}, from, to);
    begun.pending.wait();
    if (begun.unpack) begun.unpack();
    local = std::move(begun.result);
  }
  return PendingLocal(take_local_steps(begin_of_rest, plan.steps.end(), coordinate, local));
}

PendingLocal redistribute(const at::Tensor& local, const Layout& from, const Placements& to, const PlanOptions& options,
                          bool is_async) {
  const auto plan = plan_redistribute(from, to, local.scalar_type(), options);
  check_limit(plan, from, to, local.scalar_type(), options);
  if (!from.mesh().is_member()) return PendingLocal(local.numel() == 0 ? local : at::empty({0}, local.options()));
  if (plan.steps.empty()) return PendingLocal(local);
  return run_plan(local, from, to, plan, is_async);
}

}  // namespace

at::Tensor redistribute_local(const at::Tensor& local, const Layout& from, const Placements& to,
                              const PlanOptions& options) {
  if (from.placements() == to && from.mesh().is_member()) return local;
  return redistribute(local, from, to, options, /*is_async=*/false).tensor();
}

PendingLocal launch_redistribute_local(const at::Tensor& local, const Layout& from, const Placements& to,
                                       const PlanOptions& options) {
  return redistribute(local, from, to, options, /*is_async=*/true);
}

const at::Tensor& PendingLocal::wait() {
  pending_.wait();
  if (finish_) {
    const WithoutAutograd without_autograd;
    // Not again, though it should throw: what it reads may be gone in part.
    std::exchange(finish_, nullptr)();
  }
  return tensor_;
}

}  // namespace lockstep::detail
