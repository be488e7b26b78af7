// What the parts of a reducer have in common: parameters, options, group and plan, and how messages name them. Internal
// to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
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
  /// Gradients are reduced in this dtype instead of their parameters'.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// The buckets to begin with, if they are known; see BucketPlan::load(). They stay as they are.
  std::optional<BucketPlan> plan = std::nullopt;
  /// Of buckets' collectives; see CallLabel.
  const char* label = "DDP bucket";
};

namespace detail {

/// The reducer's, which changes group and plan between steps; its parts read it.
struct ReducerSetup {
  const std::vector<at::Tensor> parameters;
  const ReducerOptions options;
  GroupPtr group;
  BucketPlan plan = {};
  /// Told every error before it is thrown.
  std::function<void(const std::string&)> on_error = nullptr;

  std::string who() const;
  const std::string& name_of(std::size_t parameter) const { return plan.parameters()[parameter].name; }
  /// A few names tell as much as all.
  std::string names_of(const std::vector<std::size_t>& parameters) const;
  std::string bucket_text(std::size_t bucket) const;
  [[noreturn]] void fail(const std::string& message) const;
};

}  // namespace detail
}  // namespace lockstep
