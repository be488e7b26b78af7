// The part of DdpEngine that knows Join: what ranks with inputs say before a forward, and what ranks without do in its
// place. The order of collectives is the same on both:
//
//   control message; rebuilt buckets, once; buffers; and if gradients are reduced: weights, buckets, used parameters.
#include "lockstep/base/str.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/ddp/logger.h"
#include "lockstep/ddp/low_precision.h"
#include "lockstep/join/join.h"

namespace lockstep {

namespace {

class DdpJoinHook : public JoinHook {
 public:
  DdpJoinHook(std::shared_ptr<DdpEngine> engine, const Joinable& joinable)
      : engine_(std::move(engine)), joinable_(joinable) {}
  void main_hook() override { engine_->mirror_iteration(); }
  void post_hook(bool /*is_last_joiner*/) override {
    engine_->take_state_of(Join::authoritative_rank(joinable_), engine_->has_forward_buffers());
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
  if (logger_) logger_->set_uneven_input_join();
  return std::make_unique<DdpJoinHook>(shared_from_this(), *joinable_);
}

JoinTally DdpEngine::begin_join_iteration(bool is_synced) {
  if (!is_joining()) return {};
  const JoinVote vote{.will_reduce = is_synced};
  auto tally = Join::notify(*joinable_, vote);
  // The message of another joinable cannot say whether this one reduces.
  if (!tally.is_open()) tally = Join::own_tally(*joinable_, vote);
  if (is_synced) set_join_divisor(tally);
  return tally;
}

void DdpEngine::set_join_divisor(const JoinTally& tally) {
  if (join_options_.weighted) {
    // For a backward without a weight; backward(loss, weight) adds the weights up itself.
    reducer_->set_divisor_source([this] { return weighted_->reduced_weight_with(1); });
  } else if (!join_options_.divide_by_initial_world_size && steps_in_backward_by_.empty()) {
    // Not for optimizers that step in backward: they have always had the full one.
    reducer_->set_divisor_source([tally] { return static_cast<double>(tally.live_count()); });
  }
}

void DdpEngine::mirror_iteration() {
  set_up_once();
  auto tally = Join::current_tally(*joinable_);
  if (!joinable_->join_config().is_first_joinable) tally = Join::own_tally(*joinable_, {.will_reduce = false});
  const bool is_reduced = tally.reducing_count() > 0;
  if (is_reduced) reducer_->rebuild_buckets();
  if (buffers_->will_sync_before_forward()) buffers_->before_forward(group_, tally.live_ranks().back());
  buffers_->set_required(is_reduced);
  if (!is_reduced) return;
  if (low_) low_->cast_down();
  if (join_options_.weighted) {
    reducer_->set_divisor_source([sum = weighted_->reduced_weight_without_own()] { return sum; });
  } else {
    set_join_divisor(tally);
  }
  reducer_->mirror_backward();
}

}  // namespace lockstep
