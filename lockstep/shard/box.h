// Boxes: runs of neighbouring indices in every dim of a tensor. Whatever way a tensor is divided, what a rank has of it
// is some boxes, so that state which was divided in one way can be read in another. Pure functions of sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/shard/slice_plan.h"

namespace lockstep {

struct Box {
  std::vector<int64_t> offsets = {};
  std::vector<int64_t> sizes = {};

  int64_t numel() const;
  /// "[2, 0]+[2, 5]".
  std::string to_string() const;
  auto operator<=>(const Box&) const = default;
};

/// All of a tensor of `sizes`.
Box whole_box(const std::vector<int64_t>& sizes);

/// What both have; none if that is nothing. The box of a scalar is one element.
std::optional<Box> intersection(const Box& one, const Box& other);

/// A view of `inner`'s elements in `tensor`, which holds those of `outer`. REQUIRES: `inner` lies in `outer`.
at::Tensor box_in(const at::Tensor& tensor, const Box& outer, const Box& inner);

/// Where `inner` lies in `outer`, counted row by row, if it is one run there. REQUIRES: `inner` lies in `outer`.
std::optional<ElementRange> run_in(const Box& inner, const Box& outer);

/// Elements [run.begin, run.end) of a tensor of `sizes`, counted row by row, as boxes in the same order: as few as
/// there can be, at most two per dim.
std::vector<Box> boxes_of_run(const ElementRange& run, const std::vector<int64_t>& sizes);

/// A box of a tensor, and the values in it: a view of whatever memory holds them, with the box's sizes.
struct BoxedValues {
  Box box = {};
  at::Tensor values = {};
};

/// The same for elements that are counted in the order in which a tensor of these strides lies in memory, or row by row
/// if `strides` is empty. `row` holds them, one after the other; results are views of it.
std::vector<BoxedValues> boxed_run(const ElementRange& run, const at::Tensor& row, const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& strides);

}  // namespace lockstep
