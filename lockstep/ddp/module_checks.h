// What must hold for a module that is wrapped, at construction and afterwards. Internal to ddp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.h"
#include "lockstep/ddp/options.h"
#include "lockstep/nn/module_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

/// What construction has to know of a module.
struct ModuleTraits {
  c10::Device device = c10::Device(c10::kCPU);
  bool is_multi_device = false;
  /// Path of the first SyncBatchNorm; empty if there is none.
  std::string sync_batch_norm = "";
};

/// Throws if a module with these parameters cannot be wrapped with these options. `all` are those not ignored,
/// `reduced` those of them that are not delayed, `group` the one that averages them.
ModuleTraits check_module(const torch::nn::Module& module, const DdpOptions& options, const NamedTensors& all,
                          const NamedTensors& reduced, bool has_managed, const GroupPtr& group);

/// How the managed parameters differ from what they were; empty if they do not.
std::string changes_since(const ManagedParameters& before, const ManagedParameters& now);

/// The names of those that were not managed before, as tensors; empty if there are none.
std::string names_of_new(const ManagedParameters& before, const ManagedParameters& now);

/// What all ranks throw, in the same words, if some have a problem; empty if none has.
std::string common_problem(const std::vector<std::string>& problems);

/// What decides which collectives a step makes: the ranks must agree.
Facts shared_facts(const DdpOptions& options, bool has_forward_buffers);

std::string device_ids_text(const DdpOptions& options);

}  // namespace lockstep::detail
