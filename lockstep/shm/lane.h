// What one rank shows to the others, and where it lies in its memory.
//
//   | Lane | ring of slots: what I give, chunk by chunk | channels: what I send, per receiver |
//
// Every team has such memory of its own; pools for zero-copy tensors belong to processes (pool.h).
// Ranks that are processes map each other's memory; ranks that are threads share it. Only the owner writes to its lane,
// ring and channels (a channel's `taken` is the receiver's), so every word has one writer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lockstep/shm/signal.h"
#include "lockstep/shm/types.h"

namespace lockstep::shm {

// Steps that can be under way at once: how far a rank can be ahead of the slowest.
inline constexpr std::uint32_t kSlots = 4;
// Bytes of one step: a few of them from every rank stay in the caches.
inline constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
// One step of one message from one rank to another, and how many can be under way.
inline constexpr std::size_t kMessageChunkBytes = std::size_t{64} << 10;
inline constexpr std::uint32_t kMessageSlots = 4;

/// What a rank asks for, shown to the others in the first step of every collective.
struct alignas(64) Header {
  std::uint64_t sequence = 0;
  std::uint8_t kind = 0;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat;
  bool is_exposed = false;  // the others can read my tensors where they are
  std::int32_t root = 0;
  std::uint64_t bytes = 0;    // all I give or, if nothing, all I expect
  std::uint64_t largest = 0;  // of my pieces
  std::uint64_t layout = 0;   // hash of what has to be alike on all ranks
  std::uint64_t element_bytes = 1;
  double factor = 1;  // of a premultiplied sum
  std::int32_t label_index = -1;
  std::uint8_t label_bytes = 0;  // of the label's text, which follows the header
  bool is_label_compared = false;
};
static_assert(sizeof(Header) == 64);
// Room for that text; longer ones are cut.
inline constexpr std::size_t kLabelBytes = 64;

enum class Failure : std::uint32_t { kNone, kBeingWritten, kWritten };

/// First page of a rank's memory in a team.
struct Lane {
  Signal ready;     // steps I have published
  Signal reduced;   // steps whose share of mine is reduced (all_reduce in two phases)
  Signal finished;  // steps of the others I no longer read
  Signal bell;      // counts changes in channels to or from me
  /// Why this rank gave up, once it is written. Collectives and messages may fail at the same time.
  char failure[512] = {};
  std::atomic<Failure> failure_state = Failure::kNone;
  /// Set when the rank leaves in good order, so that leaving is not taken for dying.
  std::atomic<std::uint32_t> has_left = 0;
};
inline constexpr std::size_t kLaneBytes = 4096;
static_assert(sizeof(Lane) <= kLaneBytes);

/// Messages from the owner to one receiver.
struct Channel {
  Signal sent;   // chunks the owner has written
  Signal taken;  // chunks the receiver has read; the only word it writes
  struct alignas(64) Slot {
    std::uint64_t message_bytes = 0;  // of the whole message; each message begins with a slot of its own
    std::uint64_t offset = 0;         // of this chunk in it
    std::int64_t tag = 0;
    DType dtype = DType::kFloat;
  };
  Slot slots[kMessageSlots];
};

/// Offsets within a rank's memory, the same on all ranks of a group.
struct Layout {
  explicit Layout(int ranks);

  const std::size_t header_bytes;  // of a slot: Header, label, sizes, locations
  const std::size_t locations;     // that fit a slot
  const std::size_t slot_bytes;
  const std::size_t channel_bytes;
  const std::size_t ring;
  const std::size_t channels;
  const std::size_t bytes;  // all of it

 private:
  static std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }
};

inline Layout::Layout(int ranks)
    : header_bytes(round_up(sizeof(Header) + kLabelBytes + static_cast<std::size_t>(ranks) * 16 +
                                std::max<std::size_t>(256, static_cast<std::size_t>(ranks)) * 8,
                            64)),
      locations(std::max<std::size_t>(256, static_cast<std::size_t>(ranks))),
      slot_bytes(header_bytes + kChunkBytes),
      channel_bytes(round_up(sizeof(Channel), 64) + kMessageSlots * kMessageChunkBytes),
      ring(kLaneBytes),
      channels(round_up(ring + kSlots * slot_bytes, 4096)),
      bytes(round_up(channels + static_cast<std::size_t>(ranks) * channel_bytes, 4096)) {}

}  // namespace lockstep::shm
