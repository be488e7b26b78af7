// How one axis of a mesh holds a tensor: cut along a dim, whole on every rank, or as terms that are still to be
// reduced. Placements are plain values under Python's names, one per axis of the mesh; shard/layout.h says what they
// mean for the elements of a tensor, shard/torch_placement.h turns them into libtorch's classes and back.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/comm/call.h"

namespace lockstep {

/// Every rank of the axis holds all of it.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// Rank i of n holds the i-th of n chunks of a dim, each ceil(size / n) long; the last ones may be shorter or empty. A
/// negative dim counts from the end, until a Layout makes it positive.
struct Shard {
  explicit Shard(int64_t tensor_dim) : dim(tensor_dim) {}
  bool operator==(const Shard&) const = default;

  int64_t dim;
};

/// A dim that an axis further right has cut into `split_factor` chunks before: rank i of n holds the i-th of n chunks
/// of each of them. FSDP over a dim that tensor parallelism shards is StridedShard on its axis and Shard on the
/// other's.
struct StridedShard {
  StridedShard(int64_t tensor_dim, int64_t split) : dim(tensor_dim), split_factor(split) {}
  bool operator==(const StridedShard&) const = default;

  int64_t dim;
  int64_t split_factor;
};

/// Rank i holds the i-th run of neighbouring indices of a dim, counts[i] of them, which add up to its size. No other
/// axis cuts that dim. Python has none.
struct RaggedShard {
  RaggedShard(int64_t tensor_dim, std::vector<int64_t> indices) : dim(tensor_dim), counts(std::move(indices)) {}
  bool operator==(const RaggedShard&) const = default;

  int64_t dim;
  std::vector<int64_t> counts;
};

/// The reductions a Partial may be waiting for.
inline constexpr std::array kPartialOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                           ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};

/// Every rank of the axis holds a term of the values, which are `op` over all of them.
struct Partial {
  explicit Partial(ReduceOp reduce_op = ReduceOp::SUM) : op(reduce_op) {}
  bool operator==(const Partial&) const = default;

  ReduceOp op;
};

using Placement = std::variant<Replicate, Shard, StridedShard, Partial, RaggedShard>;

/// One per axis of a mesh, in its order.
using Placements = std::vector<Placement>;

/// The dim that a Shard, StridedShard or RaggedShard cuts; none for the others.
std::optional<int64_t> sharded_dim(const Placement& placement);

/// "Shard(dim=0)", "Replicate()", "Partial(sum)", "StridedShard(dim=0, split_factor=2)", "RaggedShard(dim=0, 3+0+2)".
std::string to_string(const Placement& placement);
/// "(Shard(dim=0), Replicate())".
std::string to_string(const Placements& placements);
std::ostream& operator<<(std::ostream& out, const Placement& placement);

}  // namespace lockstep
