// ZeroOptimizer: all of ZeroRedundancyOptimizer that does not depend on the type of the local optimizer.
//
// Every rank has all parameters and, in the first stage, all gradients, and optimizer state for its shard only. A step
// updates the shard and then sends it to the others. Exposed param_groups() hold all parameters; the local optimizer
// holds the shard, under the same options. For the thread that trains. See docs/zero.md.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/join/joinable.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/sharded_gradients.h"
#include "lockstep/state/optimizer_state.h"
#include "lockstep/state/piece.h"
#include "lockstep/zero/local_optimizer.h"
#include "lockstep/zero/memory_report.h"
#include "lockstep/zero/options.h"
#include "lockstep/zero/partition_cache.h"

namespace lockstep {

namespace detail {
class ArrivingParameters;
class Division;
class Sharding;
class StateAccess;
class ZeroOverlap;
}  // namespace detail

struct OverlapInfo;

class ZeroOptimizer : public torch::optim::Optimizer, public Joinable, public ShardedGradients {
 public:
  ~ZeroOptimizer() override;

  /// Updates this rank's shard and gives all ranks all parameters. Collective and blocking. A closure runs once on each
  /// rank, and its loss is returned. If the local step throws, the others are told: their step throws naming this rank,
  /// and the group cannot be used any more. With overlap_with_ddp backwards do the work, and this warns. With
  /// overlap_parameter_sync it does not wait for parameters of other ranks; whoever touches them does, and throws if
  /// they fail to come.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Blocks until the last step's parameters are here, for what reads them without an operator. Throws if they fail to
  /// come. Local. Does nothing without overlap_parameter_sync.
  void wait_for_parameters();

  /// Appends a group; must be called on all ranks alike. Parameters that were there keep their ranks and their state.
  /// Refuses what construction refuses, having changed nothing. A call through a reference to the base class is
  /// noticed by the next step.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Collects the state of all ranks on group rank `to`, as copies on the CPU; the others drop what they had collected.
  /// Collective and blocking. See streaming.h for state that is too large to be sent at once.
  void consolidate_state_dict(int to = 0);

  /// The state as of the last consolidation, in the form of an optimizer that is not sharded. Throws where it was not
  /// consolidated to.
  const OptimizerStateDict& state_dict() const;

  /// Takes this rank's shard of a whole state, and all options; copies it. Local, but must be called on all ranks.
  /// Throws if groups or indices do not fit, having changed nothing. state_dict() needs a consolidation afterwards.
  void load_state_dict(const OptimizerStateDict& dict);

  /// libtorch's format, for torch::save() and torch::load(): state_dict() and load_state_dict(). Files are
  /// interchangeable with those of the local optimizer's type. Saving warns if there were steps since the
  /// consolidation.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// lockstep::clip_grad_norm_(*this, …): clips all gradients by the norm of the whole, of which every rank computes
  /// the part of its shard. Gradients must be the same on all ranks, as they are after DDP's backward, or sharded.
  /// Returns the norm. Collective and blocking.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Python's. That of the base class and those of modules do the same, in all stages.
  void zero_grad(bool set_to_none = true);

  /// The gradients of all parameters, which every rank has, or this rank's shard of them in the second stage.
  std::vector<GradientShard> own_gradients() override;
  /// Those of this rank's shard; in stage 0 all.
  std::vector<GradientShard> gradients_for_norm() override;
  std::vector<GroupPtr> stepping_groups() const override;
  void discard_gradients() override;
  c10::Device gradient_device() const override { return default_device_; }

  /// Bytes on this rank. Local.
  ZeroMemoryReport memory_report() const;

  /// Goes on with `group`, which surviving_group() has made: after recover() of the DistributedDataParallel, and before
  /// the step is repeated or taken. A step that failed when this rank had stepped its shard is finished; the program's
  /// next step() then does nothing more. State is divided anew. Returns the parameters whose state, or a part of it,
  /// has died with the rank that held it and begins anew, or that lack what it has not sent of the last step.
  /// A rank that is one step behind the others takes it here, before state is divided: `before_step` is what the
  /// program does to gradients before every step, such as clipping those that every rank has whole.
  /// Collective over `group`.
  std::vector<std::string> recover(const GroupPtr& group, const std::function<void()>& before_step = nullptr);

  /// Throws on all ranks, naming those that differ, unless all have the same parameter groups: count, shapes, dtypes.
  /// Collective and blocking.
  void check_same_on_all_ranks();

  /// Who updates what. Whole parameters only.
  PartitionCache& partition();
  /// As of PartitionCache; bucket views only.
  const std::vector<std::pair<c10::Device, std::vector<std::vector<at::Tensor>>>>& device_to_params_per_rank();

  /// Where the overlap with DDP stands. overlap_with_ddp only.
  const OverlapInfo& overlap_info() const;
  /// For the hooks of overlap_hooks.h; throws, naming `what` needs it, without overlap_with_ddp.
  detail::ZeroOverlap& overlap_for(const char* what) const;

  const GroupPtr& process_group() const { return group_; }
  const ZeroOptions& options() const { return options_; }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override { return default_device_; }
  GroupPtr join_process_group() const override { return group_; }
  std::string join_name() const override { return "zero"; }
  JoinPhase join_phase() const override { return JoinPhase::kStep; }
  JoinProgress join_progress() const override { return join_progress_; }

 protected:
  using LocalStep = std::function<at::Tensor(torch::optim::Optimizer& local, const LossClosure& closure)>;

  /// Local: runs no collective.
  ZeroOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, LocalOptimizerType type,
                ZeroOptions options);

  /// step() with something else in place of the local optimizer's step().
  at::Tensor step_with(const LocalStep& local_step, LossClosure closure);
  torch::optim::Optimizer& local();

 private:
  friend class detail::StateAccess;
  friend class detail::ZeroOverlap;

  std::string who() const;
  std::vector<std::vector<at::Tensor>> parameter_groups() const;
  std::vector<at::Tensor> all_parameters() const;
  void check_arguments(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  void check_overlap(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  void append_group(const torch::optim::OptimizerParamGroup& group);
  void check_stage() const;
  void check_state_can_be_loaded() const;
  void check_dtypes() const;
  void check_names(const std::vector<std::vector<at::Tensor>>& groups) const;
  bool has_sharded_gradients() const { return options_.stage == ZeroStage::kGradients; }
  /// The option by which groups stay as they are, and parameters as trainable as they are; null if they may change.
  const char* option_that_fixes_groups() const;
  /// Whether parameters are on their way when step() returns.
  bool overlaps_forwards() const;
  /// Lets views that are made of parameters from now on wait for them too.
  void mark_parameters() const;
  std::shared_ptr<detail::Sharding> made_sharding();
  std::unique_ptr<detail::Division> made_division();
  /// Makes DDP's backwards give their gradients to a division, which is returned.
  std::unique_ptr<detail::Division> shard_gradients();
  /// DDP averages again, as without this optimizer.
  void give_gradients_back() noexcept;
  /// Makes the last groups known to the sharding.
  void take_in_groups();
  void notice_new_groups();
  void notice_trainability();
  /// Parameters that torch::load(), to() or set_data() took out of the buffers they lie in are taken back; those of
  /// another dtype are refused.
  void notice_moved_parameters();
  /// What programs may have done since the last step to groups and to the parameters' memory.
  void notice_changes();
  void check_parameters(const std::vector<std::vector<at::Tensor>>& groups) const;
  void prepare_step();
  void send_parameters();
  /// Brings options and groups up to date; throws if `what`, which reads or replaces state, is not possible yet.
  void prepare_for_state(const char* what);
  void set_consolidated(std::optional<OptimizerStateDict> dict);
  /// By index over all groups; empty where a name is not known.
  std::vector<std::string> parameter_names() const;
  /// What this rank has of the state, with names; of replicas only the first rank's.
  std::vector<detail::StatePiece> own_pieces() const;
  /// Options of all groups, with indices, without state.
  OptimizerStateDict exposed_groups() const;
  /// Takes options from `groups` and this rank's shard from `source`. Changes nothing if it throws.
  /// `description` is what ranks compare afterwards.
  void load_from(const OptimizerStateDict& groups, const detail::StateSource& source, const std::string& description);
  /// Throws if a local optimizer could not load the dictionary's state.
  void check_kind(const OptimizerStateDict& dict) const;
  /// Runs `action`; if it throws, announces that to the others before passing the exception on, so that they do not
  /// wait for this rank.
  void announce_if_throws(const std::function<void()>& action) const;
  /// This iteration's first collective is about to come: that of clipping, or of the step.
  void begin_join_iteration();
  void note_join_step();
  /// Of all groups: what ranks must step with alike.
  std::vector<std::pair<const char*, double>> step_options() const;
  /// Throws, naming the remedy, if ranks that ran out of inputs would not do what is about to be done to gradients.
  void check_preparation_is_mirrored() const;
  /// Runs `check`; if it throws, on this rank alone, the others are told.
  void refuse_aloud(const std::function<void()>& check) const;
  std::vector<GradientShard> divided_gradients() const;
  /// In the first step, and in the first one after groups or state have changed: throws on all ranks if they list
  /// parameters in another order, or if not all have loaded the same state. Collective then.
  void compare_once();
  /// What survivors have of the state, together: on every rank, until it is divided.
  struct Collected {
    GroupPtr group;
    OptimizerStateDict state;
    at::Tensor owned = {};         // by index: how many elements of a parameter survivors had to step
    bool lacks_an_update = false;  // what the dead had to step may not have come to anybody
  };
  /// Collective over `group`.
  void collect_state(const GroupPtr& group, bool lacks_an_update);
  /// Divides parameters and the collected state among the group's ranks. Returns what is lost. Local.
  std::vector<std::string> take_collected();

  // Fixed after construction.
  const LocalOptimizerType type_;
  const ZeroOptions options_;  // partition is given
  GroupPtr group_;             // until recover() gives another
  c10::Device default_device_ = at::kCPU;

  std::optional<PartitionCache> partition_;
  std::shared_ptr<detail::Sharding> sharding_;
  std::unique_ptr<detail::ArrivingParameters> arriving_;  // if nobody has waited for all of the last step's yet
  std::vector<std::vector<const void*>> known_;           // parameters by group, as of the last step
  std::vector<bool> is_trainable_;                        // by index
  std::vector<at::ScalarType> dtypes_;                    // by index
  std::optional<OptimizerStateDict> consolidated_;
  int64_t steps_since_consolidation_ = 0;

  // See recover().
  int64_t steps_taken_ = 0;
  int64_t steps_ended_ = 0;     // for the program: step() has returned
  int64_t steps_synced_ = 0;    // parameters have arrived
  bool is_step_taken_ = false;  // the next step()'s, already
  int64_t divisions_ = 0;       // after failures
  std::optional<Collected> collected_;

  // Of the Join scope it is in, or was in last.
  bool has_begun_join_iteration_ = false;
  JoinProgress join_progress_;
  bool is_scatter_set_ = false;  // with sharded gradients
  bool must_compare_;
  bool has_compared_ = false;
  int64_t loads_ = 0;            // of state
  std::string loaded_ = "none";  // the last one, for comparison
};

}  // namespace lockstep
