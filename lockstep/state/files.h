// Optimizer state on disk: parts with the bytes of tensors, and an index of what lies where. Internal to state and
// zero.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "lockstep/state/stream.h"

namespace lockstep::detail {

/// Where a piece's tensors begin in a part: by name, offsets in bytes.
struct PlacedPiece {
  StatePiece piece = {};  // described
  int64_t part = 0;
  std::map<std::string, int64_t> offsets = {};
};

std::string part_path(const std::string& path, int64_t part);

/// Writes one part. Throws, naming the file, if it cannot.
class PartWriter {
 public:
  PartWriter(const std::string& path, int64_t part, int64_t save_id);
  /// As a ChunkSink; bytes of a tensor in order.
  void take(const StatePiece& piece, const std::string& name, int64_t begin, const at::Tensor& bytes);
  /// Flushes; what was written where.
  std::vector<PlacedPiece> finish();

 private:
  void check() const;

  const std::string file_;
  const int64_t part_;
  std::ofstream out_;
  int64_t offset_ = 0;
  std::vector<PlacedPiece> placed_;
};

/// What an index holds.
struct StateIndex {
  int64_t save_id = 0;
  OptimizerStateDict groups = {};  // without state
  std::vector<PlacedPiece> pieces = {};
  std::vector<std::vector<int64_t>> sizes = {};    // of parameters, by index
  std::vector<std::vector<int64_t>> strides = {};  // in which elements were counted
};

c10::IValue to_ivalue(const std::vector<PlacedPiece>& placed);
std::vector<PlacedPiece> placed_from(const c10::IValue& value);

void write_index(const std::string& path, const StateIndex& index);
StateIndex read_index(const std::string& path);

/// Reads pieces of the parameters from the parts. Refers to all arguments.
StateSource source_of(const std::string& path, const StateIndex& index, const std::vector<at::Tensor>& parameters);

}  // namespace lockstep::detail
