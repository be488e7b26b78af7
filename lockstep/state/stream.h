// State that travels in chunks: first what there is, then the bytes of its tensors, a bounded number at a time.
// Internal to state and the layers above it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/state/piece.h"

namespace lockstep::detail {

/// How a tensor lies in memory, without gaps.
struct TensorForm {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};

  int64_t numel() const;
  int64_t nbytes() const;
  /// One like it, on the CPU.
  at::Tensor empty() const;
};

/// A piece with a description in place of each tensor.
StatePiece described(const StatePiece& piece);
/// The form of a tensor that was described; none for any other value.
std::optional<TensorForm> form_of(const c10::IValue& value);

/// The tensor's memory as bytes: a view if it has no gaps.
at::Tensor bytes_of_state(const at::Tensor& tensor);

/// Where the bytes of tensor `name` of a described piece belong in whole state: makes the tensor, on the CPU, if it is
/// not there. Other values of the piece are added too; with an empty name only those, and nothing is returned.
at::Tensor place_for(StateByIndex& state, const StatePiece& described, const std::string& name,
                     const at::Tensor& parameter);

/// Bytes [begin, begin + bytes.numel()) of a piece's tensor `name`; `piece` is described.
using ChunkSink =
    std::function<void(const StatePiece& piece, const std::string& name, int64_t begin, const at::Tensor& bytes)>;

/// Brings every rank's pieces to `sink` on group rank `to`: piece by piece, tensor by tensor, bytes in order; pieces
/// without tensors are passed with an empty name. At most `max_bytes` at a time are held for this on any rank, beside
/// the descriptions, which all ranks get. Collective and blocking.
void stream_pieces(const std::vector<StatePiece>& own, int to, int64_t max_bytes, const GroupPtr& group,
                   c10::Device device, const ChunkSink& sink);

}  // namespace lockstep::detail
