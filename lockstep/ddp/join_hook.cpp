// The part of DdpEngine that knows Join: what ranks with inputs say before a forward, and what ranks without do in its
// place. The order of collectives is the same on both:
//
//   control message; rebuilt buckets, once; buffers; and if gradients are reduced: weights, now and then a comparison
//   of replicas, buckets, used parameters.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/logger.h"
#include "lockstep/join/join.h"

namespace lockstep {

namespace {

class DdpJoinHook : public JoinHook {
 public:
  DdpJoinHook(std::shared_ptr<DdpEngine> engine, const Joinable& joinable)
      : engine_(std::move(engine)), joinable_(joinable) {}
  void main_hook() override { engine_->mirror_iteration(); }
  bool has_leftovers() const override { return engine_->reducer() && engine_->reducer()->has_leftovers(); }
  void post_hook(bool /*is_last_joiner*/) override {
    engine_->end_join(*Join::scope_of(joinable_), Join::authoritative_rank(joinable_));
  }

 private:
  const std::shared_ptr<DdpEngine> engine_;
  const Joinable& joinable_;
};

}  // namespace

void DdpEngine::check_join(const JoinSettings& settings) const {
  const auto refuse = [&](const std::string& what) {
    TORCH_CHECK(false, who(), ": DistributedDataParallel cannot be in a Join scope with ", what,
                ": ranks without inputs could not do the same");
  };
  if (settings.throw_on_early_termination) return;  // nothing is mirrored
  TORCH_CHECK(traits_.sync_batch_norm.empty(), who(), ": the module has a SyncBatchNorm, '", traits_.sync_batch_norm,
              "', which communicates in forward: open the Join scope ", "with throw_on_early_termination");
  if (options_.per_parameter) refuse("per_parameter");
  if (!reducer_ || !options_.delay_all_reduce_named_params.empty()) refuse("delay_all_reduce_named_params");
  if (options_.skip_all_reduce_unused_params) refuse("skip_all_reduce_unused_params");
  if (buffers_->is_enabled() && buffers_->has_hook()) refuse("a buffer comm hook");
}

std::unique_ptr<JoinHook> DdpEngine::join_hook(const JoinOptions& options) {
  join_options_ = options;
  join_progress_ = {};
  if (logger_) logger_->set_uneven_input_join();
  return std::make_unique<DdpJoinHook>(shared_from_this(), *joinable_);
}

void DdpEngine::end_join(const Join& scope, int source) {
  const auto before = scope.is_update_mirrored() ? detail::sample_of(managed_.tensors) : at::Tensor();
  take_state_of(source, has_forward_buffers_);
  if (before.defined()) {
    const auto difference = detail::difference_of(before, detail::sample_of(managed_.tensors), managed_);
    if (!difference.empty()) {
      tell_of_difference(str(who(), ": what was given to Join::mirror() is not what ranks with inputs did: ",
                             difference, ", the first here, the second on rank ", source,
                             ". Mirror all that a live rank does ", "between backward and the next forward."));
    }
  }
  if (reducer_) reducer_->forget_leftovers();
  const auto& live = scope.report().live_counts;
  const bool is_skewed = std::any_of(live.begin(), live.end(), [&](int count) { return count < group_->getSize(); });
  if (!is_skewed || !reducer_) return;
  replicas_.begin();
  is_after_join_ = true;
}

void DdpEngine::compare_replicas() {
  // A hook need not average: local SGD has replicas that differ.
  if (!is_after_join_ && reducer_->has_comm_hook()) return replicas_.stop();
  const auto difference = replicas_.on_reduction(managed_, !is_mirroring_, group_);
  if (difference.empty()) return;
  if (!is_after_join_) {
    tell_of_difference(str(who(), ": replicas differ though they were the same when the module was wrapped, and all ",
                           "have stepped with the same gradients: ", difference, ", the least and the most of all ",
                           "ranks. Have only some ranks loaded the optimizer's state, or set another learning rate? ",
                           "Load it on all ranks."));
    return;
  }
  tell_of_difference(str(who(), ": replicas differ since the last Join scope, in which some ranks ran out of inputs ",
                         "before others: ", difference, ", the least and the most of all ranks. What their optimizer ",
                         "keeps (momentum, step counts, learning rate) has stayed behind. Let ranks without inputs do ",
                         "the whole update: Join({&ddp}).mirror(update).run(…), or list a ZeroRedundancyOptimizer, ",
                         "of ZeroStage::kReplicated if nothing shall be divided."));
}

void DdpEngine::tell_of_difference(const std::string& message) {
  // A hook need not average: local SGD has replicas that differ.
  if (!reducer_ || !reducer_->has_comm_hook()) fail(message);
  TORCH_WARN(message);
}

JoinTally DdpEngine::begin_join_iteration(bool is_synced) {
  JoinTally tally;
  if (reducer_) {
    const bool is_mirrored = is_joining() && !joinable_->join_config().throw_on_early_termination;
    reducer_->watch_added_gradients(is_mirrored && group_->getSize() > 1);
  }
  if (is_joining()) {
    const JoinVote vote{.will_reduce = is_synced, .leaves_grad = detail::is_in_autograd_context()};
    tally = Join::notify(*joinable_, vote);
    // The message of another joinable cannot say whether this one reduces.
    if (!tally.is_open()) tally = Join::own_tally(*joinable_, vote);
    if (is_synced && reducer_) set_join_divisor(tally);
  }
  is_mirroring_ = false;
  if (c10::GradMode::is_enabled() && reducer_) replicas_.prepare(managed_, is_synced);
  return tally;
}

std::string DdpEngine::advice_on_uneven_inputs() const {
  if (is_joining()) return "";
  return "Has one of them ended its loop before the others, having fewer inputs? Then let all train in a Join scope, "
         "ddp.join().run([&] { … }), in which ranks without inputs take part.";
}

void DdpEngine::set_join_divisor(const JoinTally& tally) {
  if (join_options_.weighted) {
    // For a backward without a weight; backward(loss, weight) adds the weights up itself.
    reducer_->set_divisor_source([this] { return weighted_->reduced_weight_with(1); });
  } else if (!join_options_.divide_by_initial_world_size) {
    reducer_->set_divisor_source([tally] { return static_cast<double>(tally.giving_count()); });
  }
}

void DdpEngine::mirror_iteration() {
  is_mirroring_ = true;
  if (options_.recoverable) reducer_->begin_recoverable_forward();
  set_up_once();
  weighted_->forget_zeroed();
  auto tally = Join::current_tally(*joinable_);
  const bool gives_leftovers = reducer_->has_leftovers();
  if (!joinable_->join_config().is_first_joinable) {
    tally = Join::own_tally(*joinable_, {.will_reduce = false, .gives_leftovers = gives_leftovers});
  }
  const bool is_reduced = tally.reducing_count() > 0;
  if (is_reduced) reducer_->rebuild_buckets();
  if (const auto due = buffers_->due_before_forward(); !due.empty()) {
    buffers_->before_forward(due, group_, tally.live_ranks().back());
  }
  buffers_->set_required(is_reduced);
  if (!is_reduced) return;
  // What this rank gives counts if the survivors of a death begin the reduction again.
  const bool counts = gives_leftovers || join_options_.divide_by_initial_world_size;
  reducer_->set_recovery_weight(!join_options_.weighted ? (counts ? 1 : 0)
                                : gives_leftovers       ? weighted_->waiting_weight()
                                                        : 0);
  if (join_options_.weighted) {
    const auto sum = gives_leftovers ? weighted_->reduced_weight_with(0) : weighted_->reduced_weight_without_own();
    reducer_->set_divisor_source([sum] { return sum; });
  } else {
    set_join_divisor(tally);
  }
  reducer_->mirror_backward(tally.leaving_grad_count() > 0);
}

}  // namespace lockstep
