// What ZeroRedundancyOptimizer refuses in a list of parameters. Local: no rank asks another. Internal to zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/comm/agreement.h"
#include "lockstep/shard/flat_shard.h"

namespace lockstep::detail {

using ParameterGroups = std::vector<std::vector<at::Tensor>>;

/// Throws, naming groups and positions, unless all are defined dense leaves on one type of device, each listed once,
/// and there is at least one. `who` opens the message.
void check_parameters(const ParameterGroups& groups, const std::string& who);

/// Throws, naming both, if two parameters share memory: where they are divided, they would be updated apart.
void check_memory_is_apart(const ParameterGroups& groups, const std::string& who);

/// Makes parameters views of these buffers again that torch::load(), to() or set_data() gave other memory, with the
/// values they have now. Throws, naming it, before anything is changed if one has another form now or shares memory.
void take_back_moved(const std::vector<const FlatShard*>& buffers, const ParameterGroups& groups,
                     const std::string& who);

/// Count, shapes and dtypes, for comparison among ranks.
Facts facts_of(const ParameterGroups& groups);

/// "torch.FloatTensor"-like text: "dense Float on cpu".
std::string type_text(const at::Tensor& parameter);

}  // namespace lockstep::detail
