// The settings of DistributedDataParallel, with Python's names and defaults.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/nn/mixed_precision.h"

namespace lockstep {

struct DdpOptions {
  /// The one device of a single-device module on an accelerator: inputs are moved there. None for CPU modules and for
  /// modules on several devices.
  std::optional<std::vector<c10::DeviceIndex>> device_ids = std::nullopt;
  /// Only recorded; device_ids[0] by default.
  std::optional<c10::DeviceIndex> output_device = std::nullopt;
  /// The batch dim of the wrapper's scatter() and gather().
  int64_t dim = 0;
  /// False: buffers are synced neither now nor before each forward. Deprecated: forward_sync_buffers rules the latter.
  std::optional<bool> broadcast_buffers = std::nullopt;
  /// Before each forward; buffers are then always synced at construction. Wins over broadcast_buffers.
  std::optional<bool> forward_sync_buffers = std::nullopt;
  /// False: nothing is compared and copied at construction. The ranks' models must then be the same already.
  bool init_sync = true;
  /// Not given: the default group. Null is refused: it is what new_group() gives to ranks that are not in it.
  std::optional<GroupPtr> process_group = std::nullopt;
  /// In place of a group: a mesh of one axis.
  std::optional<DeviceMesh> device_mesh = std::nullopt;
  /// In MiB. None: 25, with a first bucket of 1.
  std::optional<double> bucket_cap_mb = std::nullopt;
  /// One per bucket, the last one repeating.
  std::vector<double> bucket_cap_mb_list = {};
  bool find_unused_parameters = false;
  /// Ignored, and deprecated in Python too.
  bool check_reduction = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  bool skip_all_reduce_unused_params = false;
  bool batched_grad_copy = false;
  /// Parameters whose gradients are reduced together when the gradient of param_to_hook_all_reduce is there.
  std::vector<std::pair<std::string, at::Tensor>> delay_all_reduce_named_params = {};
  at::Tensor param_to_hook_all_reduce = {};
  std::optional<MixedPrecision> mixed_precision = std::nullopt;
  /// Dotted names of parameters and buffers to leave alone, besides those that were set for the module.
  std::set<std::string> params_and_buffers_to_ignore = {};
  /// The buckets to begin with, as BucketPlan::save() wrote them, the same on all ranks. Empty: learnt in the first
  /// step.
  std::string bucket_plan = "";
  /// No buckets: each gradient is reduced on its own when it is there.
  bool per_parameter = false;
  /// If a peer dies, the others may go on by recover(): ranks vote at the end of every reduction, and local gradients
  /// are kept until then.
  bool recoverable = false;
};

namespace detail {

/// The caps that the options ask for. Refuses negative ones.
BucketCaps caps_of(const DdpOptions& options);

/// What is wrong with the options whatever the module is. Throws.
void check_options(const DdpOptions& options);

/// The group to use: the one given, the mesh's, the default one. Refuses if this rank is not in it.
GroupPtr group_of(const DdpOptions& options);

}  // namespace detail
}  // namespace lockstep
