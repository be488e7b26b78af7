// Averages gradients over the ranks while backward still computes others: the state machine of a backward. Internal to
// ddp; see docs/ddp.md for one step in order.
//
// What always holds: buckets are launched strictly in plan order, so all ranks issue the same collectives; gradients
// are written when all buckets have arrived, so a step that failed before can be repeated; nothing of a step is left
// when the next one is armed. Which backwards are reduced is decided by the forwards they go through. Gradient hooks
// come from the threads of the autograd engine, which may be several; one lock guards everything.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/added_gradients.h"
#include "lockstep/ddp/all_reduce_sink.h"
#include "lockstep/ddp/bucket.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/failed_step.h"
#include "lockstep/ddp/forward_pass.h"
#include "lockstep/ddp/gradient_intake.h"
#include "lockstep/ddp/gradient_scatter.h"
#include "lockstep/ddp/local_gradients.h"
#include "lockstep/ddp/ready_order.h"
#include "lockstep/ddp/reducer_setup.h"
#include "lockstep/ddp/scatter_sink.h"
#include "lockstep/ddp/static_graph.h"
#include "lockstep/ddp/step_recovery.h"
#include "lockstep/ddp/step_times.h"
#include "lockstep/ddp/unused_parameters.h"
#include "lockstep/nn/gradient_hooks.h"

namespace lockstep {

/// What is known of the last reduced backward.
struct StepRecord {
  /// The order gradients came in; parameters without one are left out.
  std::vector<std::size_t> ready_order = {};
  /// When each gradient came, in nanoseconds since the end of forward; -1 if it never did.
  std::vector<int64_t> ready_times_ns = {};
  int64_t buckets_reduced = 0;
  /// Which one it is, counted from 1, also if it was given up; 0 if there was none.
  int64_t iteration = 0;
  std::vector<std::size_t> unused_parameters = {};
  /// The set of unused parameters has been the same in all steps.
  bool is_graph_static = true;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Local. `parameters` require gradients, `infos` belong to them. Made by make_shared.
  Reducer(std::vector<at::Tensor> parameters, std::vector<ParameterInfo> infos, GroupPtr group,
          const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- one step ----

  /// Before every forward: hooks follow parameters that torch::load() or set_() gave another accumulator, and what a
  /// backward that threw has left is forgotten.
  void refresh_hooks();
  /// A step begins: notes the time.
  void prepare_for_forward();
  /// Lays the buckets out in the order gradients came, once, as rank 0 saw it. Returns whether it did; then it was
  /// collective. Refuses if the last reduction is unfinished.
  bool rebuild_buckets();
  /// Backwards through `pass`, which is synced, are to be reduced, and so is the next one that comes to no pass at all.
  /// `outputs` are searched for unused parameters, if that was asked for. Refuses if the last reduction is unfinished.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs, const detail::PassPtr& pass);
  /// Backwards through `pass` stay local: gradients add up. Others are what they were to be.
  void expect_local_backward(const detail::PassPtr& pass);
  /// The backward that runs on this thread has come to the outputs of `pass`.
  void reach(const detail::PassPtr& pass);
  /// Whether the backward that runs goes through a synced pass; nothing if it has come to no pass.
  std::optional<bool> is_backward_synced() const;
  /// A gradient is there. Called by hooks on accumulators.
  void autograd_hook(std::size_t index);
  /// Takes part in the reduction of a backward without one of its own: the same collectives in the same order, with
  /// zeros, or with the gradients of earlier backwards that were not reduced. Afterwards the averaged gradients are in
  /// .grad, as on the other ranks, unless these have them elsewhere. Collective; waits.
  void mirror_backward(bool leaves_grad);
  /// There are gradients that were added up by backwards under no_sync() since the last reduction, and not zeroed.
  bool has_leftovers() const;
  /// Nobody waits for them any more: they stay in .grad.
  void forget_leftovers();
  /// Before a synced forward: throws if some parameters require no gradient any more, whose part of the reduction would
  /// never come. If none does, none begins: a model that another one is trained through.
  void check_none_frozen() const;
  /// Throws, with the parameters' names and the remedy, if a reduction was begun and not finished.
  void check_finalized();
  /// Throws if gradients of a context of distributed autograd could not be averaged there.
  void check_context() const;
  /// Forgets a step that did not finish. Local.
  void reset_state();

  // ---- asked of the next reduction ----

  /// Waited for at the end of it; several calls add up.
  void install_futures(const std::vector<FuturePtr>& futures);
  /// The rows, sorted, that a sparse gradient has on all ranks together, by the parameter's name.
  void set_sparse_metadata(std::map<std::string, at::Tensor> rows);
  /// What the gradients' sum is divided by, instead of the number of ranks: asked for when the first gradient is there.
  void set_divisor_source(std::function<double()> source);
  /// The divisor is taken back, unless a reduction has begun with it.
  void forget_divisor();

  // ---- settings, between steps ----

  /// Must be called before the first step.
  void set_static_graph();
  /// The plan's buckets for this reducer's parameters. Throws if they are others, or if it is too late for a plan.
  BucketPlan checked_plan(const BucketPlan& plan) const;
  /// These buckets, for good. checked_plan() made it. Local.
  void use_plan(BucketPlan plan);
  /// One hook. Refuses a second one.
  void register_comm_hook(CommHook hook);
  /// The hook slot is taken by the wrapper itself; a user's hook is refused with this reason.
  void reserve_hook_slot(std::string reason) { averages_.reserve_hook_slot(std::move(reason)); }
  /// By the wrapper or an optimizer; empty if by nobody.
  const std::string& hook_slot_taken_by() const { return averages_.hook_slot_taken_by(); }
  void set_consumer(GradientConsumer consumer);
  /// See ReductionListeners.
  void set_begin_listener(std::function<void()> listener);
  void set_finish_listener(std::function<void()> listener);
  void set_error_listener(std::function<void(const std::string&)> listener, std::function<std::string()> advice);
  /// Whether to warn of gradients that are added to averages.
  void watch_added_gradients(bool is_watched);
  /// From the next backward on gradients go to what `make` makes, and are freed; buckets have buffers only while they
  /// need them. Buckets are laid out for good now: in reverse order of parameters, unless gradients have shown one.
  /// Takes the place of a comm hook. `reason` is what refusals name; nothing is changed by one.
  using ScatterFactory = std::function<std::shared_ptr<GradientScatter>(const BucketPlan& plan)>;
  void set_scatter(const ScatterFactory& make, const std::string& reason);
  /// Averages gradients in .grad again. Between backwards; of one that did not finish nothing is left.
  void clear_scatter();
  /// Another group, whose members have this model as it is. Forgets the order gradients came in. Local.
  void update_process_group(GroupPtr group);

  // ---- after a peer died; see step_recovery.h ----

  bool is_recoverable() const { return recovery_.has_value(); }
  /// A forward with gradients begins.
  void begin_recoverable_forward();
  /// What this rank's gradients count in the average that is reduced next, if the survivors have to begin it again.
  void set_recovery_weight(double weight);
  detail::FailedReduction failed_reduction() const;
  /// Goes on with `group`, the survivors, and the buckets of its rank 0; what the failed step has left is kept.
  /// Collective.
  void move_to_survivors(GroupPtr group);
  /// Finishes the failed step with the sums that arrived. Local.
  void write_arrived_sums();
  /// Averages the gradients this rank has, or zeros if it had none to give, divided by `divisor`. Collective.
  void reduce_again(double divisor);
  /// The step is begun anew: gradients are dropped. Local.
  void drop_failed_step();
  /// The wrapper is gone: hooks are removed, and nobody is told anything any more.
  void detach();

  // ---- for those who ask ----

  /// Is another one once a forward has rebuilt it: to be read between steps.
  const BucketPlan& plan() const { return setup_.plan; }
  const std::vector<at::Tensor>& parameters() const { return setup_.parameters; }
  const GroupPtr& group() const { return setup_.group; }
  /// They were laid out by the order of gradients, or were given.
  bool has_rebuilt_buckets() const { return !order_.is_wanted(); }
  bool should_rebuild_buckets() const;
  bool is_static_graph() const { return static_graph_.is_on(); }
  /// Has counted, in a first backward, how often each gradient comes.
  bool has_counted_static_graph() const { return static_graph_.has_counted(); }
  /// A reduction is to come from the next backward, or under way.
  bool is_armed() const;
  /// Armed, or a synced forward is still to have its backward.
  bool may_reduce() const;
  /// Of reduced backwards, also those given up. Any thread may ask, at any time.
  int64_t iterations() const { return iterations_; }
  StepRecord last_step() const;
  const detail::StepTimes& times() const { return times_; }
  /// Bytes of the buffers that buckets share; 0 without a scatter.
  int64_t pool_bytes() const;

  bool has_comm_hook() const { return averages_.has_hook(); }
  const std::string& comm_hook_name() const { return averages_.hook_name(); }
  /// What the reducer does with a bucket: the hook, or the sum. For ranks that take part without gradients.
  FuturePtr run_comm_hook(GradBucket& bucket) { return averages_.run_hook(bucket); }
  /// The plain sum over the ranks.
  FuturePtr run_allreduce_hook(GradBucket& bucket) { return averages_.run_plain_sum(bucket); }
  /// The buckets in order, with their real buffers or with zeros.
  std::vector<GradBucket> get_grad_buckets(bool return_zero_tensors = true);

 private:
  using Mark = detail::StepTimes::Mark;

  /// Everything that belongs to one step. Replaced as a whole.
  struct Step {
    bool is_armed = false;    // hooks lead to a reduction
    bool is_visible = false;  // the forward that armed it has outputs by which a backward is recognized
    bool is_local = false;
    bool is_mirrored = false;
    bool gives_zeros = false;  // in a mirrored step
    bool has_begun = false;    // some gradient is in a bucket, the reduction is unfinished
    bool has_marked_unused = false;
    bool marks_unused_at_end = false;          // of backward
    std::vector<detail::PassPtr> passes = {};  // whose gradients are in it; none if they are not known
    std::size_t next_bucket = 0;               // to be launched
    std::vector<bool> is_ready = {};
    std::chrono::steady_clock::time_point armed_at = {};
    detail::StepTerms terms = {};
    std::function<double()> divisor_source = nullptr;
    double divisor = 1;
    std::vector<FuturePtr> installed_futures = {};
  };

  void set_comm_hook(CommHook hook);

  /// The backward that runs, with those inside of it: begun by the first output or gradient it comes to.
  struct Run {
    bool is_open = false;                     // its end has not come
    std::weak_ptr<const bool> is_alive = {};  // autograd lets go of it when backward returns or throws
    bool is_mine = false;                     // it goes through a synced pass
    std::vector<detail::PassPtr> passes = {};
    std::size_t passes_in_step = 0;
    std::vector<std::size_t> held = {};  // gradients that came while it went through no synced pass
    std::optional<detail::GradientAccess> access = std::nullopt;  // from its first gradient on
    int task = -1;                                                // autograd's number of it
    int abandoned = -1;  // that of an earlier one, which a step of another thread has ended
  };

  // All with the lock held. See reducer_runs.cpp.
  void begin_run();
  void end_run();
  /// A gradient of the run has come: tells where it is.
  void enter_place();
  void forget_failed_run();
  /// The gradient belongs to a forward that is not synced, or to another wrapper's.
  bool is_anothers(std::size_t index) const;
  bool is_of_another_wrapper(std::size_t index) const;
  void warn_of_local_gradient(std::size_t index);
  void add_open(const detail::PassPtr& pass);
  /// Passes that the backward goes through have gradients in the step.
  void join_step();
  /// The backward goes through local forwards too, or may come to forwards that have had no backward yet.
  bool others_may_add_gradients() const;
  /// What no pass of the step uses is ready as it is.
  void mark_unused();
  /// At the end of the first backward of a static graph: reduces everything.
  void reduce_counted(const Run& run);

  // All with the lock held.
  /// The one in use.
  detail::GradientSink& sink() { return scatter_ ? static_cast<detail::GradientSink&>(*scatter_) : averages_; }
  void make_buckets();
  /// Buckets as rank 0 has them in `mine`. Collective.
  void take_plan_of_first_rank(const BucketPlan& mine);
  void arm();
  /// A gradient that is to be reduced.
  void take(std::size_t index);
  void mark_used(std::size_t index);
  /// The first gradient is there.
  void begin_reduction();
  bool searches_unused() const { return setup_.options.find_unused_parameters && !static_graph_.is_on(); }
  /// Null if no parameter can be unused.
  detail::UsedMap* used_map();
  void mark_ready(std::size_t index);
  void check_not_ready_twice(std::size_t index);
  /// Marks of local backwards whose gradients the program has dropped since.
  void forget_abandoned_marks();
  void launch_ready_buckets();
  /// Of a step without a backward of its own: zeros, or what there is of gradients.
  void launch_all_buckets();
  void launch(detail::Bucket& bucket);
  void attach_buffer(detail::Bucket& bucket);
  void queue_finish();
  void finish_backward();
  /// In a mirrored step: parameters that nobody used have a gradient if they have one on the ranks with inputs.
  void write_kept_gradients();
  void wait_for_all();
  /// The last point where a recoverable step can fail. Collective.
  void vote_to_end();
  detail::FailedReduction::Left left_if_it_fails() const;
  /// Runs `action`; if it throws, the step is given up.
  template <class Action>
  void or_give_up(const Action& action);
  /// The same, but in a recoverable step the loss of a peer is thrown at the end of backward only.
  template <class Action>
  void or_put_off(const Action& action);
  void give_up();
  void end_step();
  void check_prior_reduction_finished();

  mutable std::mutex mutex_;  // guards all of the following: engine threads may race
  detail::ReducerSetup setup_;
  std::vector<detail::Bucket> buckets_;
  detail::AllReduceSink averages_;
  std::unique_ptr<detail::ScatterSink> scatter_;  // in place of the averages
  detail::GradientIntake intake_;
  detail::GradientHooks hooks_;

  Step step_;
  Run run_;
  std::vector<std::weak_ptr<detail::ForwardPass>> open_;  // passes that may still have their backward
  StepRecord record_;
  detail::StepTimes times_;

  // From step to step.
  detail::UnusedParameters unused_;
  detail::StaticGraph static_graph_;
  detail::ReadyOrder order_;
  detail::AddedGradients added_;
  detail::FailedStep failed_;
  std::optional<detail::StepRecovery> recovery_;  // if that was asked for
  detail::LocalGradients local_;                  // since the last reduction
  bool has_warned_of_local_backward_ = false;

  std::atomic<int64_t> iterations_ = 0;  // not guarded: asked for by listeners too, with the lock held
};

}  // namespace lockstep
