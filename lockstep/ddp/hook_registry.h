// The ready hooks by name: Python's DDPCommHookType and register_ddp_comm_hook().
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"

namespace lockstep {

class DdpBase;

enum class DDPCommHookType {
  kAllReduce,
  kFp16Compress,
  kBf16Compress,
  kQuantizePerTensor,
  kQuantizePerChannel,
  kPowerSgd,
  kPowerSgdRank2,
  kBatchedPowerSgd,
  kBatchedPowerSgdRank2,
  kNoop,
};

/// All of them, in order.
const std::vector<DDPCommHookType>& ddp_comm_hook_types();
/// Python's name: "ALLREDUCE", "POWER_SGD_RANK2", … Refuses values that are no type.
std::string name_of(DDPCommHookType type);
/// Refuses unknown names with a list of the known.
DDPCommHookType ddp_comm_hook_type(const std::string& name);

/// A hook of that type; PowerSGD's get a state of their own with Python's defaults. Null: the default group.
CommHook ddp_comm_hook(DDPCommHookType type, const GroupPtr& group = nullptr);

void register_ddp_comm_hook(DDPCommHookType type, DdpBase& ddp, const GroupPtr& group = nullptr);
void register_ddp_comm_hook(const std::string& name, DdpBase& ddp, const GroupPtr& group = nullptr);

}  // namespace lockstep
