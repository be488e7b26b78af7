// Post-local SGD: gradients are averaged over all ranks at first, and then within small groups only, or not at all.
// From then on parameters have to be averaged over all ranks now and then, after the optimizer's step. That is the
// program's business.
#pragma once

#include <memory>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

/// Python's arguments of PostLocalSGDState.
struct PostLocalSGDOptions {
  /// Averages at first. Null: the default group.
  GroupPtr process_group = nullptr;
  /// Averages afterwards. Null: the ranks of process_group on this host; making it is collective over process_group, in
  /// the first step that needs it.
  GroupPtr subgroup = nullptr;
  /// start_localSGD_iter: steps that average over all ranks.
  int64_t start_local_sgd_iter = 0;
  /// False: afterwards gradients stay as each rank has them.
  bool post_local_gradient_allreduce = true;
};

/// One serves all buckets of one wrapper.
class PostLocalSGDState {
 public:
  explicit PostLocalSGDState(PostLocalSGDOptions options) : options_(std::move(options)) {}

  const PostLocalSGDOptions& options() const { return options_; }
  /// Steps seen so far that averaged over all ranks.
  int64_t iter() const { return iter_; }
  /// Where gradients of this bucket are averaged: null if nowhere. Counts the step at its last bucket. For the hook.
  GroupPtr next_group(const GradBucket& bucket);

 private:
  PostLocalSGDOptions options_;
  int64_t iter_ = 0;
};

/// Python's post_localSGD_hook.
CommHook post_local_sgd_hook(const std::shared_ptr<PostLocalSGDState>& state);

}  // namespace lockstep
