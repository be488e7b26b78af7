// Averages gradients over the ranks while backward still computes others. See docs/ddp.md for one step in order.
//
// What always holds: buckets are launched strictly in plan order, so all ranks issue the same collectives; gradients
// are read and written through GradientAccess only; nothing of a step is left when the next one is armed.
// Gradient hooks come from the threads of the autograd engine, which may be several; one lock guards everything.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/gradient_scatter.h"
#include "lockstep/ddp/step_times.h"
#include "lockstep/ddp/unused_parameters.h"
#include "lockstep/nn/gradient_access.h"
#include "lockstep/nn/gradient_hooks.h"
#include "lockstep/shard/buffer_pool.h"

namespace lockstep {

struct ReducerOptions {
  BucketCaps caps = {};
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool skip_all_reduce_unused_params = false;
  bool batched_grad_copy = false;
  /// Gradients have this dtype instead of their parameters'.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
  /// The buckets to begin with, if they are known; see BucketPlan::load().
  std::optional<BucketPlan> plan = std::nullopt;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Local. `parameters` require gradients, `infos` belong to them. Made by make_shared.
  Reducer(std::vector<at::Tensor> parameters, std::vector<ParameterInfo> infos, GroupPtr group,
          const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Before every forward: hooks follow parameters that torch::load() or set_() gave another accumulator.
  void refresh_hooks();
  /// A step begins: notes the time.
  void prepare_for_forward();
  /// Lays the buckets out in the order gradients came, once, as rank 0 saw it. Returns whether it did; then it was
  /// collective. Refuses if the last reduction is unfinished.
  bool rebuild_buckets();
  /// The next backward is to be reduced. `outputs` are searched for unused parameters, if that was asked for. Refuses
  /// if the last reduction is unfinished.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// The next backward stays local: gradients add up.
  void expect_local_backward();
  /// Throws, with the parameters' names and the remedy, if a reduction was begun and not finished.
  void check_finalized();

  /// At the end of the first backward of a static graph: reduces everything. Called by the engine.
  void delay_all_reduce();
  /// Must be called before the first step.
  void set_static_graph();
  bool is_static_graph() const { return is_static_graph_; }
  /// Has counted, in a first backward, how often each gradient comes.
  bool has_counted_static_graph() const { return has_counted_; }

  /// One hook, between steps. Refuses a second one.
  void register_comm_hook(CommHook hook);
  bool has_comm_hook() const { return hook_.has_value(); }
  const std::string& comm_hook_name() const;
  /// What the reducer does with a bucket: the hook, or the sum. For ranks that take part without gradients.
  FuturePtr run_comm_hook(GradBucket& bucket);
  /// The plain sum over the ranks.
  FuturePtr run_allreduce_hook(GradBucket& bucket);
  /// The buckets in order, with their real buffers or with zeros.
  std::vector<GradBucket> get_grad_buckets(bool return_zero_tensors = true) const;

  /// Waited for at the end of the next backward; several calls add up.
  void install_futures(const std::vector<FuturePtr>& futures);
  /// For one backward: the rows, sorted, that a sparse gradient has on all ranks together, by the parameter's name.
  void set_sparse_metadata(std::map<std::string, at::Tensor> rows);
  /// What the gradients' sum is divided by in the next reduction, instead of the number of ranks.
  void set_divisor(double divisor);
  /// As set_divisor, with a number that is known later: asked for when the first gradient is there.
  void set_divisor_source(std::function<double()> source);
  /// In the next reduction this rank's gradients count as zeros, whatever backward computes: NaN too.
  void leave_out_own_gradients();
  /// Offered every reduced gradient before it is written: if it returns true, it has used it up and .grad is left
  /// alone. Called in plan order at the end of backward, while later buckets may still be on their way.
  using Consumer = std::function<bool(std::size_t index, const at::Tensor& gradient)>;
  void set_consumer(Consumer consumer);
  /// Told when a backward's gradients are all written.
  void set_finish_listener(std::function<void()> listener);
  /// From the next backward on gradients go to what `make` makes, and are freed; buckets have buffers only while they
  /// need them. Buckets are laid out for good now: in reverse order of parameters, unless gradients have shown one.
  /// Takes the place of a comm hook. `reason` is what refusals name; nothing is changed by one.
  using ScatterFactory = std::function<std::shared_ptr<GradientScatter>(const BucketPlan& plan)>;
  void set_scatter(const ScatterFactory& make, const std::string& reason);
  /// Averages gradients in .grad again. Between backwards; of one that did not finish nothing is left.
  void clear_scatter();
  /// Bytes of the buffers that buckets share; 0 without a scatter.
  int64_t pool_bytes() const;
  /// The hook slot is taken by the wrapper itself; a user's hook is refused with this reason.
  void reserve_hook_slot(std::string reason) { hook_slot_taken_by_ = std::move(reason); }
  /// A reduction is to come from the next backward, or under way.
  bool is_armed() const;

  /// Whose hooks call autograd_hook() instead of the reducer's own; must outlive it.
  void use_accumulators_of(const detail::GradientHooks& hooks) { accumulators_ = &hooks; }
  /// Calls the hook of a gradient; for parameters whose accumulator changes from step to step.
  void autograd_hook(std::size_t index);
  void remove_autograd_hooks();
  /// Another group, whose members have this model as it is. Forgets the order gradients came in. Local.
  void update_process_group(GroupPtr group);
  /// Forgets a step that did not finish. Local.
  void reset_state();

  const BucketPlan& plan() const { return plan_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const GroupPtr& group() const { return group_; }
  bool has_rebuilt_buckets() const { return has_rebuilt_; }
  int64_t iterations() const { return iterations_; }
  /// In the last reduced backward.
  int64_t buckets_reduced() const { return buckets_reduced_; }
  /// The set of unused parameters has been the same in all steps.
  bool is_graph_static() const { return is_graph_static_; }
  std::vector<std::size_t> unused_parameters() const;
  /// Bytes of parameters unused in the last step.
  std::size_t unused_parameter_bytes() const;
  /// The order gradients came in in the last reduced backward; parameters without one are left out.
  std::vector<std::size_t> ready_order() const;
  /// When each gradient came, in nanoseconds since the end of forward.
  std::vector<int64_t> backward_stats() const;
  const detail::StepTimes& times() const { return times_; }
  /// Takes part in the reduction of a backward without one of its own: the same collectives in the same order, with
  /// zeros. Afterwards the averaged gradients are in .grad, as on the other ranks. Collective; waits.
  void mirror_backward();
  /// Told every error before it is thrown.
  void set_error_listener(std::function<void(const std::string&)> listener) { on_error_ = std::move(listener); }
  bool should_rebuild_buckets() const;

 private:
  using Mark = detail::StepTimes::Mark;

  // All with the lock held.
  void make_buckets();
  void arm();
  bool searches_unused() const { return options_.find_unused_parameters && !is_static_graph_; }
  bool is_counting() const { return is_static_graph_ && !has_counted_; }
  void mark_ready(std::size_t index);
  void check_not_ready_twice(std::size_t index);
  void take_dense_gradient(detail::Bucket& bucket, std::size_t place);
  void take_sparse_gradient(detail::Bucket& bucket);
  void copy_in(const detail::Bucket& bucket, std::size_t place, const at::Tensor& grad);
  void copy_deferred(detail::Bucket& bucket);
  void check_gradient(const detail::Bucket& bucket, std::size_t place, const at::Tensor& grad);
  void launch_ready_buckets();
  void launch(detail::Bucket& bucket);
  void note_bucket(const detail::Bucket& bucket, const char* state, std::size_t bytes = 0) const;
  bool is_all_unused(const detail::Bucket& bucket) const;
  void finalize_backward();
  void take_zeros(detail::Bucket& bucket);
  // With a scatter; see reducer_scatter.cpp.
  void lend_buffer(detail::Bucket& bucket);
  /// False if none is under way.
  bool finish_oldest_scatter();
  void end_scatter();
  void forget_scatter();
  at::Tensor wait_for(detail::Bucket& bucket);
  void write_dense_gradients(detail::Bucket& bucket, const at::Tensor& result);
  void write_sparse_gradient(detail::Bucket& bucket, const at::Tensor& result);
  void forget_reduction();
  void fix_divisor();
  /// What copies into buckets multiply by.
  double scale() const;
  /// Nobody to average with: gradients are right as they are.
  bool is_identity() const;
  void check_prior_reduction_finished();

  std::string who() const;
  const std::string& name_of(std::size_t index) const { return plan_.parameters()[index].name; }
  std::string names_of(const std::vector<std::size_t>& indices) const;
  std::string bucket_text(const detail::Bucket& bucket) const;
  [[noreturn]] void fail(const std::string& message);

  // Fixed after construction.
  const std::vector<at::Tensor> parameters_;
  const ReducerOptions options_;

  // Guarded by mutex_: engine threads may race.
  mutable std::mutex mutex_;
  GroupPtr group_;
  BucketPlan plan_;
  std::vector<detail::Bucket> buckets_;
  detail::GradientHooks hooks_;
  const detail::GradientHooks* accumulators_ = &hooks_;
  std::optional<CommHook> hook_;
  std::string hook_slot_taken_by_;
  Consumer consumer_;
  std::function<void()> on_finish_;
  std::function<void(const std::string&)> on_error_;
  std::shared_ptr<GradientScatter> scatter_;
  std::optional<detail::BufferPool> pool_;  // with a scatter
  bool is_static_graph_ = false;

  // One step.
  detail::GradientAccess access_;
  bool expects_hooks_ = false;  // armed: hooks lead to a reduction
  bool is_local_backward_expected_ = false;
  bool has_begun_ = false;  // some gradient is in a bucket, the reduction is unfinished
  bool has_marked_unused_ = false;
  std::size_t next_bucket_ = 0;
  int64_t buckets_reduced_ = 0;
  std::vector<bool> is_ready_;
  std::vector<std::size_t> ready_order_;
  std::vector<int64_t> ready_times_ns_;
  std::optional<double> divisor_;
  std::function<double()> divisor_source_;
  bool leaves_out_own_ = false;
  std::vector<FuturePtr> installed_futures_;
  std::deque<std::size_t> scattering_;  // buckets whose reductions are under way, in plan order
  std::map<std::string, at::Tensor> sparse_metadata_;
  std::chrono::steady_clock::time_point armed_at_;

  // Unused parameters and static graphs.
  std::vector<std::size_t> unused_;
  std::vector<std::size_t> last_unused_;
  detail::UsedMap used_;
  bool is_graph_static_ = true;
  bool has_counted_ = false;
  bool has_reduced_static_map_ = false;  // by a count on any rank
  std::vector<int> firings_;             // of each gradient in a backward of a static graph
  std::vector<int> firings_left_;

  // Over all steps.
  bool has_rebuilt_ = false;
  std::vector<std::size_t> rebuild_order_;
  std::vector<bool> is_in_rebuild_order_;
  int64_t iterations_ = 0;
  detail::StepTimes times_;
  bool has_warned_of_local_backward_ = false;
  bool has_warned_of_strides_ = false;
  bool has_warned_of_needless_search_ = false;
};

}  // namespace lockstep
