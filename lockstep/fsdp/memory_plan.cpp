#include "lockstep/fsdp/memory_plan.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/fsdp/unit_tree.h"

namespace lockstep {
namespace {

using detail::UnitPtr;

int64_t whole_gradient_bytes(const detail::ParameterGroup& group) {
  int64_t bytes = 0;
  for (const auto& member : group.members()) {
    if (!member.shard.requires_grad()) continue;
    for (const auto& handle : member.handles) {
      const auto tensor = handle.tensor();
      if (tensor.defined()) bytes += tensor.numel() * static_cast<int64_t>(tensor.itemsize());
    }
  }
  return bytes;
}

UnitMemory memory_of(const detail::Unit& unit) {
  UnitMemory memory{.name = unit.name()};
  for (const auto& group : unit.groups()) {
    memory.shards += group->shard_bytes();
    memory.whole += group->whole_bytes();
    memory.whole_gradients += whole_gradient_bytes(*group);
    memory.reduction += group->gradients().buffer_bytes();
  }
  return memory;
}

/// The most that is there at once while backward goes from the last unit to the first: the unit's whole parameters and
/// those gathered ahead, its gradients, the buffers of its reduction and of the one before, and what was reduced.
int64_t peak_of_backward(const std::vector<UnitMemory>& units, const std::vector<bool>& stays_whole,
                         const std::vector<int64_t>& reduced) {
  int64_t most = 0;
  int64_t done = 0;
  int64_t kept = 0;
  for (std::size_t i = 0; i < units.size(); ++i) kept += stays_whole[i] ? units[i].whole : 0;
  for (std::size_t i = units.size(); i-- > 0;) {
    int64_t now = kept + done + (stays_whole[i] ? 0 : units[i].whole);
    if (i > 0 && !stays_whole[i - 1]) now += units[i - 1].whole;
    if (i + 1 < units.size()) now += units[i + 1].reduction - reduced[i + 1];
    now += units[i].whole_gradients + units[i].reduction;
    most = std::max(most, now);
    done += reduced[i];
    if (stays_whole[i]) kept -= units[i].whole;
  }
  return most;
}

int64_t peak_of_forward(const std::vector<UnitMemory>& units, const std::vector<bool>& stays_whole) {
  int64_t most = 0;
  int64_t kept = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto next = i + 1 < units.size() ? units[i + 1].whole : 0;
    most = std::max(most, kept + units[i].whole + next);
    if (stays_whole[i]) kept += units[i].whole;
  }
  return most;
}

}  // namespace

MemoryPlan memory_plan(const torch::nn::Module& root) {
  const auto unit = detail::find_unit(root);
  TORCH_CHECK(unit, "[lockstep/fsdp] memory_plan(): ", root.name(), " is not sharded.");
  MemoryPlan plan;
  std::vector<bool> stays_whole;
  std::vector<int64_t> reduced;
  UnitMemory own;
  for (const auto& each : unit->tree().below(*unit, /*recurse=*/true)) {
    auto memory = memory_of(*each);
    plan.between_steps += memory.shards;
    if (each == unit) {
      own = memory;
    } else {
      const auto& reshard = each->options().reshard_after_forward;
      stays_whole.push_back(reshard && reshard->ranks() == 1);
      reduced.push_back(each->groups().empty() ? 0 : memory.reduction / (each->groups().front()->ranks() + 1));
    }
    plan.units.push_back(std::move(memory));
  }
  auto inner = plan.units;
  inner.pop_back();
  // The root's parameters are touched first and last; its gradients wait for the last of them.
  const auto& reshard = unit->options().reshard_after_forward;
  const auto own_whole = !reshard || reshard->ranks() == 1 ? own.whole : 0;
  const auto last_reduction = inner.empty() ? 0 : inner.front().reduction;
  int64_t all_reduced = 0;
  for (const auto bytes : reduced) all_reduced += bytes;
  const auto at_the_end = own.whole + own.whole_gradients + own.reduction + last_reduction + all_reduced -
                          (reduced.empty() ? 0 : reduced.front());
  const auto inside = std::max(own_whole + peak_of_forward(inner, stays_whole),
                               own_whole + own.whole_gradients + peak_of_backward(inner, stays_whole, reduced));
  plan.peak = plan.between_steps + std::max(inside, at_the_end);
  return plan;
}

std::string MemoryPlan::to_string() const {
  std::ostringstream out;
  const auto row = [&](const std::string& name, int64_t shards, int64_t whole, int64_t gradients, int64_t reduction) {
    const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    out << std::left << std::setw(32) << name << std::right << std::fixed << std::setprecision(2);
    for (const auto bytes : {shards, whole, gradients, reduction}) out << std::setw(12) << mib(bytes);
    out << '\n';
  };
  out << std::left << std::setw(32) << "unit (MiB on this rank)" << std::right << std::setw(12) << "shards"
      << std::setw(12) << "whole" << std::setw(12) << "gradients" << std::setw(12) << "reduction" << '\n';
  for (const auto& unit : units) row(unit.name, unit.shards, unit.whole, unit.whole_gradients, unit.reduction);
  out << "between steps " << std::fixed << std::setprecision(2) << static_cast<double>(between_steps) / (1 << 20)
      << " MiB, gradients of shards and optimizer state not counted; peak of a step "
      << static_cast<double>(peak) / (1 << 20) << " MiB, activations not counted\n";
  return out.str();
}

}  // namespace lockstep
