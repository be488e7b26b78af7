// The control message of a Join scope: at the start of every iteration each rank says whether it is live and what it is
// about to do, and one small all-reduce tells everybody. A message is a few sets of ranks, as bits: since no two ranks
// set the same bit, the sum is the union. One number more says what a rank has done so far. See docs/join.md.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep {

class JoinTally;

/// What a live rank says of the iteration it begins.
struct JoinVote {
  /// Whether this iteration's backward reduces gradients: not under no_sync(), and not with grad mode off.
  bool will_reduce = true;
  /// A joined rank has gradients of backwards that were not reduced: it gives them to the next reduction.
  bool gives_leftovers = false;
  /// What is reduced goes elsewhere than to .grad: ranks that mirror the iteration leave theirs alone.
  bool leaves_grad = false;
};

namespace detail {

/// What a rank says in the control message; nothing is true on a joined one that goes on.
struct ControlFlags {
  bool is_live = false;
  bool will_reduce = false;
  bool gives_leftovers = false;
  bool leaves_grad = false;
  bool wants_stop = false;
  /// This rank's scope reads every message before the iteration goes on. Same on all ranks.
  bool is_attentive = false;
  /// What the joinables have done, the same number on all ranks; of kProgressBits.
  int64_t progress = 0;
  /// For messages: this rank's last iteration reduced no gradients.
  bool was_local = false;
};

/// So that neither the sum over all ranks nor its comparison overflows.
constexpr int kProgressBits = 40;

enum class Sending { kBlocking, kAsync };

/// Sends this rank's flags. Collective over `group`.
JoinTally send_flags(const ControlFlags& flags, const GroupPtr& group, c10::Device device, Sending sending);

}  // namespace detail

/// The reduced message of one iteration. Nothing waits for it until somebody asks; then asking blocks, and throws
/// c10::DistBackendError if a rank failed. Copies share the message. May be read by any thread. All ranks are ranks of
/// the group, in ascending order.
class JoinTally {
 public:
  /// No message: outside a scope, or from a joinable that is not first. Only is_open() may be asked.
  JoinTally() = default;

  bool is_open() const { return state_ != nullptr; }
  int live_count() const { return static_cast<int>(live_ranks().size()); }
  /// Live ranks whose backward reduces gradients.
  int reducing_count() const { return static_cast<int>(reducing_ranks().size()); }
  /// Ranks that have something to give: live ones, and joined ones with gradients that were not reduced. What the sum
  /// of gradients is divided by if not by the world size.
  int giving_count() const { return live_count() + static_cast<int>(ranks_in(kLeftovers).size()); }
  /// Live ranks whose gradients go elsewhere than to .grad.
  int leaving_grad_count() const { return static_cast<int>(ranks_in(kLeavingGrad).size()); }
  std::vector<int> live_ranks() const { return ranks_in(kLive); }
  std::vector<int> reducing_ranks() const { return ranks_in(kReducing); }

 private:
  friend class Join;
  friend JoinTally detail::send_flags(const detail::ControlFlags&, const GroupPtr&, c10::Device, detail::Sending);
  enum Set { kLive, kReducing, kLeftovers, kLeavingGrad, kStopping, kAttentive, kSets };
  struct State;

  std::vector<int> ranks_in(Set set) const;
  /// All ranks sent the same progress. False is certain; true is as good as certain.
  bool has_same_progress() const;
  /// True if reading neither blocks nor waits for a device.
  bool is_ready() const;

  std::shared_ptr<State> state_;
};

}  // namespace lockstep
