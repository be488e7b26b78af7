// What the agent's files share. Internal to rpc.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>

#include "lockstep/rpc/shm_agent.h"

namespace lockstep::rpc {

/// A peer that cannot be spoken to any more, as a whole sentence.
class PeerIsOver : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class EnvelopeKind : std::uint32_t { kRequest, kResponse, kRelease, kRound, kRefusal };

/// What every piece of mail begins with. A message follows, or lies in a block.
struct ShmAgent::Envelope {
  EnvelopeKind kind = EnvelopeKind::kRequest;
  std::uint32_t unused = 0;
  uint64_t number = 0;  // of the call or the round
  int64_t count = 0;    // of a round
  Block block = {};
};

// How long a thread of the agent stays awake.
// Mostly by giving the core away between looks: where the peer wants the same core, that is the quickest way to it, and
// where it has another, giving away takes no longer than looking. Some 100 us in all.
inline constexpr shm::Patience kPatience{.spins = 100, .yields = 200};
// Of who has just woken a caller, who wants a core.
inline constexpr shm::Patience kPatienceWithCaller{.spins = 0, .yields = 100};

inline constexpr auto kNever = std::chrono::steady_clock::time_point::max();

inline std::size_t peer_place(int id) {
  return static_cast<std::size_t>(id);
}

/// The time after which a call or a join is over.
std::chrono::milliseconds limit_of(float seconds);

}  // namespace lockstep::rpc
