// Uneven inputs for sharded models: ranks that ran out take part in the gathers and reductions of the others, with
// gradients of zero, and step their own shards.
//
//   lockstep::FsdpJoinable joinable(root);
//   lockstep::Join({&joinable}).mirror(update).run([&] {
//     for (auto& batch : my_batches) { optimizer.zero_grad(); loss_of(batch).backward(); update(); }
//   });
//
// In such a scope every iteration is the same: a forward, or several, one backward that is reduced, one update. What a
// rank mirrors is the step it made last, so each makes at least one.
#pragma once

#include <memory>
#include <string>

#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/join/joinable.h"

namespace lockstep {

class FsdpJoinable final : public Joinable {
 public:
  /// Of a root on a mesh of one axis.
  explicit FsdpJoinable(const FsdpUnit& root);
  ~FsdpJoinable() override;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  c10::Device join_device() const override;
  GroupPtr join_process_group() const override;
  std::string join_name() const override;
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }
  /// Iterations after which shards were written: ranks that ran out must not step when the others leave a step out.
  JoinProgress join_progress() const override;

 private:
  class Hook;
  std::shared_ptr<detail::Unit> root_;
  int64_t steps_ = 0;
  bool is_step_open_ = false;  // its backward has run, or will
};

}  // namespace lockstep
