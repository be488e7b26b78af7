#include "lockstep/ddp/hook_registry.h"

#include <algorithm>
#include <array>

#include "lockstep/base/str.h"
#include "lockstep/ddp/ddp_base.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/ddp/power_sgd.h"
#include "lockstep/ddp/quantization_hooks.h"

namespace lockstep {
namespace {

using Type = DDPCommHookType;
using Factory = CommHook (*)(const GroupPtr& group);

std::shared_ptr<PowerSGDState> power_sgd_state(const GroupPtr& group, int64_t rank) {
  return std::make_shared<PowerSGDState>(PowerSGDOptions{.process_group = group, .matrix_approximation_rank = rank});
}

struct Entry {
  Type type;
  const char* name;
  Factory make;
};

constexpr std::array kEntries = {
    Entry{Type::kAllReduce, "ALLREDUCE", [](const GroupPtr& group) { return allreduce_hook(group); }},
    Entry{Type::kFp16Compress, "FP16_COMPRESS", [](const GroupPtr& group) { return fp16_compress_hook(group); }},
    Entry{Type::kBf16Compress, "BF16_COMPRESS", [](const GroupPtr& group) { return bf16_compress_hook(group); }},
    Entry{Type::kQuantizePerTensor, "QUANTIZE_PER_TENSOR",
          [](const GroupPtr& group) { return quantization_per_tensor_hook(group); }},
    Entry{Type::kQuantizePerChannel, "QUANTIZE_PER_CHANNEL",
          [](const GroupPtr& group) { return quantization_per_channel_hook(group); }},
    Entry{Type::kPowerSgd, "POWER_SGD",
          [](const GroupPtr& group) { return power_sgd_hook(power_sgd_state(group, 1)); }},
    Entry{Type::kPowerSgdRank2, "POWER_SGD_RANK2",
          [](const GroupPtr& group) { return power_sgd_hook(power_sgd_state(group, 2)); }},
    Entry{Type::kBatchedPowerSgd, "BATCHED_POWER_SGD",
          [](const GroupPtr& group) { return batched_power_sgd_hook(power_sgd_state(group, 1)); }},
    Entry{Type::kBatchedPowerSgdRank2, "BATCHED_POWER_SGD_RANK2",
          [](const GroupPtr& group) { return batched_power_sgd_hook(power_sgd_state(group, 2)); }},
    Entry{Type::kNoop, "NOOP", [](const GroupPtr&) { return noop_hook(); }},
};

const Entry& entry_of(Type type) {
  const auto found =
      std::find_if(kEntries.begin(), kEntries.end(), [&](const Entry& each) { return each.type == type; });
  TORCH_CHECK(found != kEntries.end(), "[lockstep/ddp] ", static_cast<int>(type), " is no DDPCommHookType");
  return *found;
}

}  // namespace

const std::vector<DDPCommHookType>& ddp_comm_hook_types() {
  static const auto all = [] {
    std::vector<Type> types;
    for (const auto& entry : kEntries) types.push_back(entry.type);
    return types;
  }();
  return all;
}

std::string name_of(DDPCommHookType type) {
  return entry_of(type).name;
}

DDPCommHookType ddp_comm_hook_type(const std::string& name) {
  std::vector<std::string> known;
  for (const auto& entry : kEntries) {
    if (entry.name == name) return entry.type;
    known.emplace_back(entry.name);
  }
  TORCH_CHECK(false, "[lockstep/ddp] there is no comm hook '", name, "'. There are ", join(known, ", "));
}

CommHook ddp_comm_hook(DDPCommHookType type, const GroupPtr& group) {
  return entry_of(type).make(group);
}

void register_ddp_comm_hook(DDPCommHookType type, DdpBase& ddp, const GroupPtr& group) {
  ddp.register_comm_hook(ddp_comm_hook(type, group));
}

void register_ddp_comm_hook(const std::string& name, DdpBase& ddp, const GroupPtr& group) {
  register_ddp_comm_hook(ddp_comm_hook_type(name), ddp, group);
}

}  // namespace lockstep
