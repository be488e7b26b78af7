// State on disk: parts with the bytes of tensors, and an index of what lies where. Optimizer state and weights may be
// in one save, under one numbering of tensors: first the optimizer's parameters, if there is one, then any others.
// Parts have the save's number in their names, so that a save never touches the one before it: that one is read until
// the new index has taken the old one's place. Internal to state and the layers above it.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "lockstep/state/optimizer_state.h"
#include "lockstep/state/stream.h"

namespace lockstep::detail {

/// Where a piece's tensors begin in a part: by name, offsets in bytes.
struct PlacedPiece {
  StatePiece piece = {};  // described
  int64_t part = 0;
  std::map<std::string, int64_t> offsets = {};
};

std::string part_path(const std::string& path, int64_t part, int64_t save_id);

/// Writes one part. Throws, naming the file, if it cannot; whoever gives the save up removes the part.
class PartWriter {
 public:
  PartWriter(const std::string& path, int64_t part, int64_t save_id);
  /// As a ChunkSink; bytes of a tensor in order.
  void take(const StatePiece& piece, const std::string& name, int64_t begin, const at::Tensor& bytes);
  /// Flushes to disk; what was written where.
  std::vector<PlacedPiece> finish();

 private:
  void check() const;

  const std::string file_;
  const int64_t part_;
  std::ofstream out_;
  int64_t offset_ = 0;
  std::vector<PlacedPiece> placed_;
};

/// A tensor whose state was saved, or that was saved itself.
struct SavedTensor {
  std::string name = "";  // empty if it was not known, as in saves of the first format
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};  // in which elements were counted
};

/// What an index holds. Pieces say by their index which of `tensors` they belong to.
struct StateIndex {
  int64_t save_id = 0;
  int64_t parts = 1;               // how many were written, some of which may hold nothing
  bool has_named_parts = true;     // by the save, since the third format
  OptimizerStateDict groups = {};  // without state
  std::vector<SavedTensor> tensors = {};
  std::vector<PlacedPiece> pieces = {};

  std::vector<std::string> names() const;
};

c10::IValue to_ivalue(const std::vector<PlacedPiece>& placed);
std::vector<PlacedPiece> placed_from(const c10::IValue& value);

/// In place of the index that was there, whose parts are removed then.
void write_index(const std::string& path, const StateIndex& index);
/// Also one of the formats before: the first knew parameters of an optimizer by index only, and parts of both had names
/// that the next save took.
StateIndex read_index(const std::string& path);

/// Reads from the parts what a tensor of the index has. `tensors`, by the index's numbering, say in which order
/// elements are wanted; those that are not asked for may be undefined. Refers to the index and to the tensors.
StateSource source_of(const std::string& path, const StateIndex& index, const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::detail
