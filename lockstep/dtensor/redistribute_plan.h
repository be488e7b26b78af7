// What it takes to bring a tensor from one set of placements to another on the same mesh: steps, each along one axis,
// known before anything runs. See docs/dtensor.md.
//
// Pure: nothing here communicates. The order of steps follows from mesh, placements and sizes alone, so all ranks run
// the same ones; bytes are those of the rank that asks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "lockstep/shard/layout.h"

namespace lockstep {

enum class Move {
  kNone,           // the axis has one rank
  kSlice,          // Replicate to a shard: copies the rank's part
  kAllGather,      // a shard to Replicate
  kAllReduce,      // Partial to Replicate
  kReduceScatter,  // Partial to Shard
  kAllToAll,       // Shard to Shard of another dim
  kPartition,      // Replicate to Partial: terms that reduce to the value. Internal
};

/// "all_gather".
const char* name_of(Move move);

struct RedistributeStep {
  int64_t mesh_dim = 0;
  Placement from = Replicate();
  Placement to = Replicate();
  Move move = Move::kNone;
  /// That this rank receives.
  int64_t bytes = 0;
  /// On the axis.
  int64_t ranks = 1;
  /// Of what the ranks of the axis hold together.
  std::vector<int64_t> sizes = {};
  /// A StridedShard of this step cuts what the axes to its right have left in one run, as Shard would.
  bool is_one_run = false;

  /// "mesh dim 1: Shard(dim=0) -> Replicate(): all_gather over 4 ranks, 96 bytes".
  std::string to_string() const;
};

struct RedistributePlan {
  std::vector<RedistributeStep> steps = {};

  /// That this rank receives in all steps.
  int64_t bytes() const;
  /// A line for each step, and one for all; "nothing to do" without steps.
  std::string to_string() const;
};

std::ostream& operator<<(std::ostream& out, const RedistributePlan& plan);

struct PlanOptions {
  /// Replicate to Partial, which only the library itself has a use for.
  bool allow_partial_target = false;
  /// Named where it is refused: the operator that asks for it.
  const std::string* needed_by = nullptr;
};

/// The steps from `from` to `to`, on ranks outside of the mesh none. Local. Refuses, alike on all ranks, what Layout
/// refuses, Partial as a target of anything but itself, and so from one reduction to another.
RedistributePlan plan_redistribute(const Layout& from, const Placements& to, at::ScalarType dtype,
                                   const PlanOptions& options = {});

/// What redistribute_bytes() answers where there is no way; a few of them can be added.
inline constexpr int64_t kNoWay = int64_t{1} << 60;

/// Roughly what plan_redistribute().bytes() would be on any rank, for choosing among placements: the same on all ranks,
/// and cheap. Each step counts one byte at least, so that a slice is worse than nothing. Never throws for a move that
/// is refused: kNoWay. REQUIRES: one placement per axis, with dims that exist, counted from the front.
int64_t redistribute_bytes(const Layout& from, const Placements& to, at::ScalarType dtype,
                           const PlanOptions& options = {});

}  // namespace lockstep
