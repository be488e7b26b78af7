// What the parts of a reducer have in common: parameters, options, group and plan, and how messages name them. Internal
// to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/bucket_plan.h"

namespace lockstep {

struct ReducerOptions {
  BucketCaps caps = {};
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool skip_all_reduce_unused_params = false;
  bool batched_grad_copy = false;
  /// Ranks vote before gradients are written, so that survivors of a failure can go on.
  bool recoverable = false;
  /// Gradients are reduced in this dtype instead of their parameters'.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// The buckets to begin with, if they are known; see BucketPlan::load(). They stay as they are.
  std::optional<BucketPlan> plan = std::nullopt;
  /// Of buckets' collectives; see CallLabel.
  const char* label = "DDP bucket";
};

namespace detail {

/// Runs `action`, whose collectives fail if ranks do not meet in them: then what `advice` says is added to the message.
/// Errors of another kind pass unchanged.
void with_advice(const std::function<void()>& action, const std::function<std::string()>& advice);

std::unordered_set<const c10::TensorImpl*> impls_of(const std::vector<at::Tensor>& tensors);

/// Who is told of a reduction.
struct ReductionListeners {
  /// It begins: before its first bucket is launched. May communicate, on all ranks alike.
  std::function<void()> begin = nullptr;
  /// Its gradients are all written.
  std::function<void()> finish = nullptr;
  /// Every error, before it is thrown.
  std::function<void(const std::string&)> error = nullptr;
  /// Asked what a user might do about ranks that do not meet in a bucket; it is added to the error.
  std::function<std::string()> advice = nullptr;
};

/// The reducer's, which changes all but parameters and options between steps; its parts read it.
struct ReducerSetup {
  const std::vector<at::Tensor> parameters;
  const ReducerOptions options;
  GroupPtr group;
  BucketPlan plan = {};
  ReductionListeners listeners = {};
  const std::unordered_set<const c10::TensorImpl*> managed = impls_of(parameters);

  std::string who() const;
  const std::string& name_of(std::size_t parameter) const { return plan.parameters()[parameter].name; }
  /// A few names tell as much as all.
  std::string names_of(const std::vector<std::size_t>& parameters) const;
  std::string bucket_text(std::size_t bucket) const;
  [[noreturn]] void fail(const std::string& message) const;
};

}  // namespace detail
}  // namespace lockstep
