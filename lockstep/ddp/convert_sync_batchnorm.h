// convert_sync_batchnorm(): the BatchNorm layers of a model as SyncBatchNorm. Python's
// torch.nn.SyncBatchNorm.convert_sync_batchnorm().
//
//   torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8), torch::nn::ReLU());
//   lockstep::convert_sync_batchnorm(*net);            // before it is wrapped
//
// A layer in a Sequential, ModuleList or ModuleDict is replaced there. A member of a module's class, as in
// `torch::nn::BatchNorm2d norm`, cannot be: its type is fixed, and BatchNorm's forward is neither virtual nor asks
// anybody. Such layers are refused by name, never left as they are; declare them as `lockstep::SyncBatchNorm norm`,
// which in evaluation and on one rank is a BatchNorm.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "lockstep/comm/group.h"

namespace lockstep {

/// Replaces every BatchNorm1d, 2d and 3d below `module` by a SyncBatchNorm over `process_group`; null means the default
/// group, asked for in forward. The new layers have the old ones' tensors, not copies, so optimizers stay right, and
/// their options and mode; what is a SyncBatchNorm already stays, and is given the group. A layer that is in several
/// places is one afterwards. Local. Refuses, having changed nothing: a layer that is a member of a class, one whose
/// class is derived from BatchNorm, and `module` itself being one. Warns of layers that somebody else holds as well.
void convert_sync_batchnorm(torch::nn::Module& module, const GroupPtr& process_group = nullptr);

/// The same; returns `module`, or what takes its place if it is a BatchNorm itself.
std::shared_ptr<torch::nn::Module> convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& module,
                                                          const GroupPtr& process_group = nullptr);

}  // namespace lockstep
