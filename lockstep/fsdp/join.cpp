#include "lockstep/fsdp/join.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/failure_notice.h"
#include "lockstep/fsdp/unit_tree.h"
#include "lockstep/join/join.h"

namespace lockstep {

/// Lives as long as the scope: steps tell it, and it mirrors them.
class FsdpJoinable::Hook final : public JoinHook, public detail::StepListener {
 public:
  Hook(FsdpJoinable& joinable, const JoinOptions& options)
      : joinable_(joinable), root_(joinable.root_), divides_by_live_(!options.divide_by_initial_world_size) {
    joinable_.steps_ = 0;
    joinable_.is_step_open_ = false;
    root_->tree().set_step_listener(this);
  }
  ~Hook() override { root_->tree().set_step_listener(nullptr); }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  void on_step(bool is_recorded) override {
    try {
      TORCH_CHECK(is_recorded, root_->who(),
                  ": a forward without gradients inside of a Join scope, in which ranks that ",
                  "ran out of inputs do not take part. Evaluate outside of it.");
      check_update();
    } catch (...) {
      announce_refusal(root_->mesh().get_group(), std::current_exception());
      throw;
    }
    end_step();
    tally_ = Join::notify(joinable_, {.will_reduce = true});
    if (!tally_.is_open()) tally_ = Join::own_tally(joinable_, {.will_reduce = true});
    joinable_.is_step_open_ = true;
  }

  double divisor() const override {
    return divides_by_live_ && tally_.is_open() ? static_cast<double>(tally_.giving_count()) : 0;
  }

  void main_hook() override {
    check_update();
    end_step();
    tally_ = Join::current_tally(joinable_);
    if (!joinable_.join_config().is_first_joinable) tally_ = Join::own_tally(joinable_, {.will_reduce = false});
    TORCH_CHECK(root_->tree().mirror_step(), root_->who(), ": this rank has no inputs at all, so it has no step to ",
                "mirror. Give every rank at least one in the scope.");
    joinable_.is_step_open_ = true;
  }

 private:
  /// What follows belongs to the next one.
  void end_step() {
    joinable_.steps_ = joinable_.join_progress().steps;
    joinable_.is_step_open_ = false;
  }

  void check_update() const {
    const auto* scope = Join::scope_of(joinable_);
    TORCH_CHECK(scope == nullptr || scope->is_update_mirrored() || joinable_.join_config().throw_on_early_termination,
                root_->who(),
                ": in this Join scope ranks that ran out of inputs would not step their shards. Say what ",
                "a step is: Join({&joinable}).mirror(update).run(…).");
  }

  FsdpJoinable& joinable_;
  const std::shared_ptr<detail::Unit> root_;
  const bool divides_by_live_;
  JoinTally tally_;
};

FsdpJoinable::FsdpJoinable(const FsdpUnit& root) : root_(root.unit_) {
  TORCH_CHECK(root.is_root(), root_->who(), ": FsdpJoinable is for the root");
  TORCH_CHECK(root_->mesh().ndim() == 1, root_->who(), ": FsdpJoinable on a mesh with replicas");
}

FsdpJoinable::~FsdpJoinable() = default;

std::unique_ptr<JoinHook> FsdpJoinable::join_hook(const JoinOptions& options) {
  return std::make_unique<Hook>(*this, options);
}

JoinProgress FsdpJoinable::join_progress() const {
  const auto steps = steps_ + (is_step_open_ && root_->tree().has_written_shards() ? 1 : 0);
  return {.steps = steps, .history = static_cast<uint64_t>(steps)};
}

c10::Device FsdpJoinable::join_device() const {
  return root_->groups().empty() ? c10::Device(at::kCPU) : root_->groups().front()->device();
}

GroupPtr FsdpJoinable::join_process_group() const {
  return root_->mesh().get_group();
}

std::string FsdpJoinable::join_name() const {
  return str("FSDP unit '", root_->name(), "'");
}

}  // namespace lockstep
