// Pieces of state: what one rank holds of one tensor's state, be it a parameter's optimizer state or a weight itself.
// Consolidation, files and loading deal in pieces, so that they need not know how tensors were divided among ranks.
//
// Tensors are known by name where names are known, and always by an index: over an optimizer's groups, or in the order
// in which a save lists them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/shard/slice_plan.h"
#include "lockstep/state/named_values.h"

namespace lockstep::detail {

/// Elements are counted in the order in which the tensor lies in memory.
struct StatePiece {
  int64_t index = 0;
  /// Dotted, as modules name it: "encoder.weight". Empty if it is not known.
  std::string name = "";
  ElementRange elements = {};
  /// The state as it is. Else tensors with a value for each element hold those of this piece, flat.
  bool is_whole = true;
  NamedValues values = {};
};

/// What a piece of a weight or buffer calls its one value.
inline constexpr const char* kWeight = "weight";

/// A parameter or buffer of a module as a piece: all of it, or the row of these elements of it. The tensor itself, not
/// a copy.
StatePiece weight_piece(int64_t index, std::string name, const at::Tensor& weight);
StatePiece weight_piece(int64_t index, std::string name, const at::Tensor& row, const ElementRange& elements);

/// Whole state by index; tensors without state are absent.
using StateByIndex = std::map<int64_t, NamedValues>;

/// Where a rank's state comes from when it is loaded: the values of a tensor's elements, in the form of a StatePiece;
/// none if the tensor has no state. Tensors may be views of what the source keeps.
using StateSource =
    std::function<std::optional<NamedValues>(int64_t index, const ElementRange& elements, bool is_whole)>;

/// Whether a tensor of a piece of `elements` elements has a value for each of them.
bool is_elementwise(const c10::IValue& value, int64_t elements);

/// Takes pieces from whole state, for `parameters` by index. The source refers to both.
StateSource source_of(const StateByIndex& state, const std::vector<at::Tensor>& parameters);
StateSource source_of(const std::vector<StatePiece>& pieces);

/// A source that knows tensors by other indices: asked for i, it asks `source` for indices[i]. Refers to neither.
StateSource with_indices(StateSource source, std::vector<int64_t> indices);

/// For every name of `wanted` its position among `saved`. A name that is empty on either side says nothing: such
/// tensors are matched by position, as are all if one of the lists is empty. Throws, naming it, if a name was not
/// saved. `who` opens the message.
std::vector<int64_t> indices_by_name(const std::vector<std::string>& wanted, const std::vector<std::string>& saved,
                                     const std::string& who);

/// Adds a piece to whole state, as copies on the CPU. Pieces of one tensor may come one by one.
void add_piece(StateByIndex& state, const StatePiece& piece, const at::Tensor& parameter);

/// With tensors on the CPU: whoever gets them may not have the device.
c10::IValue to_ivalue(const std::vector<StatePiece>& pieces);
/// Also what was written before pieces had names.
std::vector<StatePiece> pieces_from(const c10::IValue& value);

}  // namespace lockstep::detail
