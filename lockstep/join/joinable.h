// What takes part in a Join scope: a Joinable communicates in every iteration, and its JoinHook does the same
// communication on ranks that have run out of inputs. Written by DDP, ZeRO and users; called by Join.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/join/options.h"

namespace lockstep {

class Join;

/// Made for one scope. Runs on ranks that have joined, and post_hook() on all; both do nothing by default.
class JoinHook {
 public:
  virtual ~JoinHook() = default;

  /// Once per iteration in which some rank is live: the collectives of that iteration, in a live rank's order. What
  /// the live ranks said is in Join::current_tally(). A call of Join::notify() in here does nothing.
  virtual void main_hook() {}

  /// Whether this rank, which has joined, has something left that main_hook() gives to the next reduction: gradients of
  /// backwards under no_sync(). Asked before every iteration if it is the first joinable's. Local.
  virtual bool has_leftovers() const { return false; }

  /// Once on every rank, after all have joined. `is_last_joiner` is true on the ranks that mirrored nothing: at least
  /// one, maybe several. Join::authoritative_rank() is one of them.
  virtual void post_hook(bool /*is_last_joiner*/) {}
};

/// How a joinable stands to the scope it is in. Outside a scope everything is false.
struct JoinConfig {
  bool enable = false;
  bool throw_on_early_termination = false;
  bool is_first_joinable = false;

  friend bool operator==(const JoinConfig&, const JoinConfig&) = default;
};

/// What must be the same on all ranks of a scope, of a joinable that steps. Ranks that differ throw.
struct JoinProgress {
  int64_t steps = 0;
  /// Of the last one: learning rate, momentum and what else schedules change, by parameter group.
  std::vector<std::pair<const char*, double>> options = {};
  uint64_t history = 0;  // a hash of all of them

  void add_step(std::vector<std::pair<const char*, double>> step_options);
};

/// When in an iteration a joinable communicates. A kStep uses the gradients of those of kGradients that stand before
/// it, since the last kStep before them: one after the other, [ddpG, zeroG, ddpD, zeroD], or together, [ddpG, ddpD,
/// zeroG, zeroD]. Their votes alone decide whether joined ranks run its hook. Scopes refuse lists in which a kStep
/// stands before all of kGradients: its collectives come later, and the ranks would never meet.
enum class JoinPhase { kAny, kGradients, kStep };

/// Calls Join::notify(*this) in every iteration before its own collectives. Belongs to one scope at a time and must
/// outlive it; used by the thread that trains.
class Joinable {
 public:
  virtual ~Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  /// Throws if it cannot be in such a scope. Called for every joinable of an enabled scope before any hook is made.
  virtual void check_join(const JoinSettings& /*settings*/) const {}
  /// A hook for a new scope, not null. Called when the scope is built, in list order, before it changes anything; throw
  /// to refuse it.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// Where the scope's control messages live if this joinable is the first of its list.
  virtual c10::Device join_device() const = 0;
  /// The same for all joinables of a scope.
  virtual GroupPtr join_process_group() const = 0;
  /// For messages.
  virtual std::string join_name() const { return "joinable"; }
  virtual JoinPhase join_phase() const { return JoinPhase::kAny; }
  /// The steps it has taken in the scope. Ranks compare it at every iteration and at the end, live or joined.
  virtual JoinProgress join_progress() const { return {}; }

  const JoinConfig& join_config() const { return config_; }

 protected:
  Joinable() = default;

 private:
  friend class Join;
  JoinConfig config_;
  Join* scope_ = nullptr;  // the open one; null if config_ is disabled
};

}  // namespace lockstep
