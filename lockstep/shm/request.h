// One collective as bytes: what a rank gives and what it gets. Also what ranks compare before anything moves.
//
// A *stream* is a list of spans read one after the other. A rank gives one stream to everybody, or one stream per
// receiver; it gets one stream, or one per giver:
//
//   kind            gives              gets
//   all_reduce      1                  1, in place
//   reduce          1                  1 on the root, in place
//   broadcast       1 on the root      1 elsewhere
//   all_gather      1                  1 per giver
//   gather          1                  1 per giver, on the root
//   scatter         1 per receiver     1                     (given on the root)
//   reduce_scatter  1 per receiver     1
//   all_to_all      1 per receiver     1 per giver
//   barrier
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

#include "lockstep/shm/lane.h"
#include "lockstep/shm/types.h"

namespace lockstep::shm {

class Team;

enum class Kind : std::uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
};

const char* name_of(Kind kind);

struct Span {
  std::byte* at = nullptr;
  std::size_t bytes = 0;
};

using Stream = std::span<const Span>;

/// Total bytes.
std::size_t length_of(Stream stream);

struct Request {
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat;
  std::size_t element_bytes = 1;
  int root = 0;
  double factor = 1;  // of premul_sum
  /// What the call is for, shown in messages of all ranks: "DDP bucket" and 3. Null: nothing is shown.
  const char* label = nullptr;
  int label_index = -1;  // negative: not shown
  bool is_label_compared = false;
  /// Nobody's call ends before all ranks have what they get.
  bool ends_together = false;
  /// All streams one after the other, each of the same number of spans.
  Stream gives = {};
  Stream gets = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// What is fixed by the kind.
struct Shape {
  explicit Shape(Kind kind);

  bool gives_per_receiver = false;
  bool gets_per_giver = false;
  bool reduces = false;
  bool only_root_gives = false;
  bool only_root_gets = false;
  /// Giver and receiver may differ in how much they think travels, so sizes are compared pair by pair.
  bool has_sizes = false;
};

/// The stream given to `receiver`, or received from `giver`; empty if there is none.
Stream given_to(const Request& request, const Shape& shape, int receiver, int ranks);
Stream received_from(const Request& request, const Shape& shape, int giver, int ranks);

/// Fills the first part of a slot.
void write_header(const Request& request, const Shape& shape, const Team& team, std::uint64_t sequence,
                  std::byte* slot);

/// Throws MismatchError with both sides if the headers of step `step`, which all ranks have published, do not agree.
void check_headers(const Request& request, const Shape& shape, const Team& team, std::uint32_t step);

/// Where `rank` says its span `index` is.
std::uint64_t location_in(const std::byte* slot, const Team& team, std::size_t index);

/// "all_reduce(sum, float[1024])".
std::string describe(const Header& header);
std::string describe(const Request& request);
/// With its number, and its label if it has one: "all_reduce(sum, float[1024]) #12 of DDP bucket 3".
std::string describe(const Request& request, std::uint64_t sequence);

}  // namespace lockstep::shm
