// The step of a ZeroOptimizer inside of DDP's backward: sets itself up when DDP's buckets are final, then steps this
// rank's shard of every bucket and sends it to the others. The form of Sharding that has no step of its own. Internal
// to zero; made by ZeroOptimizer, driven by the comm hooks of overlap_hooks.h, which keep it alive.
//
// What always holds: all ranks issue the collectives of a backward in the same order, whatever comes first on them, so
// every backend will do. Called on the thread that runs the reducer's hooks, one call at a time.
#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include "lockstep/ddp/engine.h"
#include "lockstep/optim/functional.h"
#include "lockstep/state/piece.h"
#include "lockstep/zero/overlap_info.h"
#include "lockstep/zero/sharding.h"

namespace lockstep {

class ZeroOptimizer;

namespace detail {

/// When a bucket is stepped. Both wait for nothing but reductions that were launched.
enum class OverlapForm {
  /// When the last bucket has been launched.
  kAfterLastBucket,
  /// When the next bucket has been launched.
  kInterleaved,
};

class ZeroOverlap final : public Sharding, public std::enable_shared_from_this<ZeroOverlap> {
 public:
  explicit ZeroOverlap(ZeroOptimizer& zero) : zero_(&zero) {}
  /// The optimizer is gone. Warns if it never had a hook.
  void detach() noexcept override;

  /// Throws if it cannot step in backwards of `ddp`, if it was attached to another one, or with another flag.
  void check_can_attach(DdpEngine& ddp, bool shard_buckets);
  /// Makes it step in backwards of `ddp`: the hook has been registered there.
  void attach(DdpEngine& ddp, bool shard_buckets);
  bool is_attached() const { return is_attached_; }

  /// A bucket is being reduced, by `future`.
  void on_bucket(const GradBucket& bucket, const FuturePtr& future, OverlapForm form);

  const OverlapInfo& info() const { return info_; }

  // Groups and trainability stay as they are; the optimizer refuses changes.
  void on_group_change() override {}
  void on_trainability_change() override {}
  // Backwards do the steps and send the results; options are taken when one begins.
  at::Tensor step(const LocalStep& /*local_step*/, torch::optim::Optimizer::LossClosure /*closure*/) override {
    return {};
  }
  std::vector<Arrival> launch_sync() override { return {}; }
  std::vector<const FlatShard*> flat_buffers() const override;
  void take_options() override {}
  // They are used up when backward ends.
  std::vector<at::Tensor> own_gradients() const override { return {}; }
  void drop_gradients() override {}
  /// There is state once backwards update parameters.
  void check_has_state(const char* what) const override;
  std::vector<StatePiece> pieces() const override;
  void load(const StateSource& source) override;
  ShardingBytes bytes() const override;
  ZeroOverlap* as_overlap() override { return this; }

 private:
  std::string who() const;
  std::shared_ptr<DdpEngine> ddp() const;
  /// Before there is a functional optimizer: notes buckets, and makes it when all are known.
  void set_up(const Reducer& reducer, const GradBucket& bucket);
  void initialize();
  void log_assignment() const;
  void begin_backward();
  void check_bucket(const GradBucket& bucket) const;
  /// What no rank has used is known only when the reducer is done.
  bool must_wait_for_used(const Reducer& reducer) const;
  bool can_be_unused(const Reducer& reducer) const;
  /// Steps this rank's shard of the bucket, if it has one, and launches the broadcasts of all shards.
  void step_and_send(std::size_t bucket_index, bool has_unused);
  void step_shard(std::size_t bucket_index, bool has_unused);
  void end_backward();
  /// The reducer has written all gradients.
  void on_reduced();

  ZeroOptimizer* zero_;  // null when it is gone
  bool is_attached_ = false;
  std::weak_ptr<DdpEngine> ddp_;
  GroupPtr ddp_group_;
  OverlapInfo info_;
  std::vector<FlatShard> flat_;  // one for each assignment
  std::unique_ptr<optim::FunctionalOptimizer> local_;
  std::vector<int64_t> own_indices_;  // of local_'s parameters, over the optimizer's
  std::optional<bool> was_final_at_start_;

  std::unordered_set<const void*> used_;  // by any rank: in this backward, or in all of a static graph
  bool has_reduced_once_ = false;
};

}  // namespace detail
}  // namespace lockstep
