// Averages of parameters over ranks: Python's torch.distributed.algorithms.model_averaging.utils. For models whose
// ranks train apart for some steps. Everything is compared before it is averaged, so that ranks that list something
// else are told instead of mixed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "lockstep/comm/agreement.h"

namespace lockstep {

/// Gives the parameters their mean over the ranks of `process_group`, in place. They travel in flat buckets per dtype
/// and device; each is divided by the number of ranks and then summed, as in Python, so all ranks get the same bits.
/// Collective and blocking. Throws on all ranks, having changed nothing, unless all list as many parameters of the same
/// sizes and dtypes in the same order; refuses integers and parts of divided parameters.
void average_parameters(const std::vector<at::Tensor>& params, const GroupPtr& process_group = default_group());

/// Those that have a gradient. Local.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& params);
std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

/// Averages those that have a gradient, which must be the same ones on all ranks.
void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& params,
                                            const GroupPtr& process_group = default_group());
void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                                            const GroupPtr& process_group = default_group());

namespace detail {

/// Averages those of `params` that have a gradient. `facts` are compared too, before the parameters.
void average_trained(const std::vector<at::Tensor>& params, const GroupPtr& group, Facts facts);

}  // namespace detail
}  // namespace lockstep
