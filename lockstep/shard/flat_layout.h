// FlatLayout: which parameter lies where in a flat buffer, and which rank has which slice of it. A pure function of
// sizes: every rank knows what any other holds without a message.
#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/shard/slice_plan.h"

namespace lockstep {

/// In elements.
struct FlatAlignment {
  int64_t parameters = 1;  // every parameter begins at a multiple of this
  int64_t slices = 1;      // and every rank's slice at one of this
};

/// What a rank has of one parameter.
struct FlatPiece {
  std::size_t index = 0;       // of the parameter
  ElementRange elements = {};  // in the buffer
  ElementRange in_parameter = {};

  bool operator==(const FlatPiece&) const = default;
};

class FlatLayout {
 public:
  FlatLayout() = default;
  /// Parameters of these numbers of elements, one after the other, in equal slices for `world_size` ranks.
  explicit FlatLayout(const std::vector<int64_t>& elements, int world_size = 1, const FlatAlignment& alignment = {});

  std::size_t count() const { return parameters_.size(); }
  /// Where the index-th parameter lies.
  const ElementRange& range_of(std::size_t index) const { return parameters_[index]; }
  /// How the buffer is cut; its padded() is what the buffer must hold.
  const SlicePlan& plan() const { return plan_; }
  /// What `rank` has, parameter by parameter. One without elements belongs to the rank its place is in: it may have
  /// state all the same.
  std::vector<FlatPiece> pieces_of(int rank) const;
  /// What lies between parameters and behind the last one, none of it empty.
  std::vector<ElementRange> gaps() const;

  bool operator==(const FlatLayout&) const = default;

 private:
  std::vector<ElementRange> parameters_;
  SlicePlan plan_;
};

}  // namespace lockstep
