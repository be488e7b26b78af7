// Pieces of optimizer state: what one rank holds of a parameter, whole or some of its elements. Consolidation, files
// and loading deal in them, so that they need not know how parameters were divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "lockstep/shard/slice_plan.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep::detail {

/// Elements are counted in the order in which the parameter lies in memory.
struct StatePiece {
  int64_t index = 0;  // of the parameter, over all groups
  ElementRange elements = {};
  /// The parameter's state as it is. Else tensors with a value for each element hold those of this piece, flat.
  bool is_whole = true;
  NamedValues values = {};
};

/// Where a rank's state comes from when it is loaded: the values of a parameter's elements, in the form of a
/// StatePiece; none if the parameter has no state. Tensors may be views of what the source keeps.
using StateSource =
    std::function<std::optional<NamedValues>(int64_t index, const ElementRange& elements, bool is_whole)>;

/// Whether a tensor of a piece of `elements` elements has a value for each of them.
bool is_elementwise(const c10::IValue& value, int64_t elements);

/// Cuts pieces from a whole dictionary, for `parameters` by index. The source refers to both.
StateSource source_of(const OptimizerStateDict& dict, const std::vector<at::Tensor>& parameters);
StateSource source_of(const std::vector<StatePiece>& pieces);

/// Adds a piece to the state of a whole dictionary, as copies on the CPU. Pieces of one parameter may come one by one.
void add_piece(OptimizerStateDict& dict, const StatePiece& piece, const at::Tensor& parameter);

c10::IValue to_ivalue(const std::vector<StatePiece>& pieces);
std::vector<StatePiece> pieces_from(const c10::IValue& value);

}  // namespace lockstep::detail
