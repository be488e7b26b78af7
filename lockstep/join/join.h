// Join: training when ranks have different numbers of inputs. Ranks that run out keep answering the collectives of
// those still training, so nothing hangs, and all ranks end with one model.
//
//   lockstep::Join({&ddp, &zero}).run([&] {
//     for (auto& batch : my_batches) step(batch);
//   });
//
// or, as a guard:   Join scope({&ddp});  …train…  scope.finish();
//
// A scope borrows its joinables: they outlive it. It is used by the thread that trains. See docs/join.md.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/join/joinable.h"
#include "lockstep/join/options.h"
#include "lockstep/join/tally.h"

namespace lockstep {

/// What this rank did in a scope. Empty if the scope was not enabled.
struct JoinReport {
  int64_t own_iterations = 0;
  int64_t mirrored_iterations = 0;
  /// Live ranks of every iteration, own ones first, then mirrored ones.
  std::vector<int> live_counts = {};
  /// The highest rank of the group among those that joined last, whose model counts. None if all ranks stopped early.
  std::optional<int> authoritative_rank = std::nullopt;
};

class Join {
 public:
  /// Opens a scope on this rank; local. `joinables` stand in the order in which an iteration uses them, and the first
  /// one's Join::notify() begins an iteration. Refuses, before anything changes: an empty list, null entries,
  /// different groups, a joinable that is listed twice or in another open scope, a kStep before a kGradients, and
  /// whatever a joinable's join_hook() refuses.
  explicit Join(std::vector<Joinable*> joinables, JoinSettings settings = {});

  /// If finish() was not called: while an exception unwinds, as run() does for one; else finishes, and errors become
  /// warnings. Never throws.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// body(), then finish(). An exception of the body passes through unchanged: this rank runs no hook and no
  /// collective, and tells the others, whose collectives on the group throw naming it (announce_failure()).
  JoinReport run(const std::function<void()>& body);

  /// `update` is all that a live rank does with the averaged gradients: clip, step(), learning rate. Joined ranks run
  /// it in each mirrored iteration in which gradients are reduced, after the hooks. For optimizers that do not
  /// communicate: without it what they keep (momentum, step counts, learning rate) stays behind on ranks that ran out,
  /// and the next epoch's replicas differ, which DDP notices. Before finish(), alike on all ranks:
  ///   lockstep::Join({&ddp}).mirror(update).run(train);
  Join& mirror(std::function<void()> update);
  bool is_update_mirrored() const { return update_ != nullptr; }

  /// This rank has no more inputs: mirrors the others until none is live, then runs the post hooks. Collective. Throws
  /// if all ranks stop early (JoinSettings), after which the group stays usable; the same if the scope has ended.
  JoinReport finish();

  /// So far, or of the whole scope once it has ended.
  const JoinReport& report() const { return report_; }

  /// A live rank begins an iteration; called by the joinable, before its own collectives. The first joinable of an
  /// enabled scope starts the control message and gets its tally; all others get an empty one, and nothing is sent.
  /// Throws if all ranks stop early, and if a joinable begins an iteration before the first one did.
  static JoinTally notify(Joinable& joinable, const JoinVote& vote = {});

  /// The tally of the iteration under way, which the first joinable began; on a joined rank, the one being mirrored.
  /// Empty outside an enabled scope and before the first iteration. Local.
  static JoinTally current_tally(const Joinable& joinable);

  /// A message beside the control message, for a joinable that is not the first and whose mirror must know its vote: in
  /// forward on live ranks, which do not wait, and in main_hook() on joined ones. For a joinable of
  /// JoinPhase::kGradients it also says whether a step follows. Collective. Empty outside an enabled scope.
  static JoinTally own_tally(Joinable& joinable, const JoinVote& vote = {});

  /// Whether joined ranks do what live ones do between backward and step(): JoinSettings::before_mirrored_step, or the
  /// joinable's own in mirrored_steps, is given, nothing is mirrored, or there is no scope. For joinables that
  /// communicate there. Local.
  static bool is_preparation_mirrored(const Joinable& joinable);

  /// The open scope that a joinable is in; null if there is none. Local.
  static const Join* scope_of(const Joinable& joinable) { return joinable.scope_; }

  /// Throws if `joinable`, which is about to communicate, is in no scope while this rank trains in one over the same
  /// group: ranks that run out would not take part. Local.
  static void check_listed(const Joinable& joinable);

  /// The rank of the group whose model counts: the highest of the last joiners. Same on all ranks, known from the last
  /// iteration's tally without communication. In post_hook() only.
  static int authoritative_rank(const Joinable& joinable);

 private:
  enum class Stage { kOpen, kMirroring, kPost, kEnded };

  void check_list() const;
  void check_callbacks() const;
  void check_same_settings(const JoinTally& tally) const;
  std::size_t position_of(const Joinable& joinable) const;
  void check_begun(const Joinable& joinable);
  /// What the joinables say of themselves, as one number.
  int64_t progress() const;
  void check_same_progress(const JoinTally& tally) const;
  void check_same_votes(const JoinTally& tally) const;
  JoinTally begin_iteration(Joinable& joinable, const JoinVote& vote);
  JoinTally send(const detail::ControlFlags& flags, detail::Sending sending) const;
  bool is_attentive() const;
  void mirror_others();
  void mirror_iteration();
  /// Positions of the joinables whose gradients the joinable at `position` steps with.
  std::vector<std::size_t> gradients_before(std::size_t position) const;
  /// Whether one of these joinables, all if there is none, reduces gradients in the iteration that is mirrored. Local
  /// backwards, as under no_sync(), and evaluations are followed by no step. Known when their hooks have run.
  bool has_step(const std::vector<std::size_t>& positions) const;
  void warn_of_skew();
  void run_post_hooks();
  /// Reads tallies of own iterations: all of them, or those that cost no wait.
  void read_own(bool all);
  void record(const JoinTally& tally);
  [[noreturn]] void stop_all(const JoinTally& tally);
  /// Runs `action`; if it throws, leaves the scope and passes the exception on.
  void run_or_leave(const std::function<void()>& action);
  void leave_by(const std::exception_ptr& cause) noexcept;
  void end() noexcept;
  std::string who() const;

  // Fixed after construction.
  const std::vector<Joinable*> joinables_;
  const JoinSettings settings_;
  const int exceptions_at_start_;
  GroupPtr group_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;  // empty if not enabled
  std::function<void()> update_;

  Stage stage_ = Stage::kOpen;
  std::string stop_reason_;  // not empty once all ranks have stopped early
  JoinTally tally_;
  std::vector<JoinTally> own_tallies_;  // in a mirrored iteration, of those joinables whose hooks asked for one
  std::deque<JoinTally> unread_;        // of own iterations, oldest first
  std::vector<int64_t> begun_;          // iterations by joinable
  std::vector<int64_t> last_begun_;     // by joinable, counted from 1
  bool was_local_ = false;              // this rank's last iteration reduced nothing
  std::optional<int> last_live_;        // highest live rank of the last iteration read
  JoinReport report_;
};

}  // namespace lockstep
