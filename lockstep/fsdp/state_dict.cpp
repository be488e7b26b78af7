#include "lockstep/fsdp/state_dict.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

/// Of the ranks that hold the other rows; null if the tensor is whole here.
GroupPtr cutting_group(const Layout& layout) {
  const auto axes = layout.dividing_axes();
  if (axes.empty()) return nullptr;
  const auto dim = sharded_dim(layout.placements()[static_cast<std::size_t>(axes.front())]);
  TORCH_CHECK(axes.size() == 1 && dim == 0, "[lockstep/fsdp] a full state dict of ", layout,
              ": only rows can be gathered.");
  return layout.mesh().get_group(axes.front());
}

at::Tensor gathered(const at::Tensor& shard, const Layout& layout) {
  const auto group = cutting_group(layout);
  if (!group) return shard.clone();
  auto sizes = layout.sizes();
  const auto rows = sizes[0];
  const auto ranks = static_cast<int64_t>(group->getSize());
  const auto chunk = (rows + ranks - 1) / ranks;
  sizes[0] = chunk;
  auto mine = at::zeros(sizes, shard.options());
  mine.narrow(0, 0, shard.size(0)).copy_(shard);
  sizes[0] = chunk * ranks;
  auto all = at::empty(sizes, shard.options());
  if (all.numel() > 0) all_gather_into_tensor(all.view({-1}), mine.view({-1}), group);
  return all.narrow(0, 0, rows);
}

struct Entry {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const Layout> layout;  // null for buffers and what is not sharded

  std::vector<int64_t> sizes() const { return layout ? layout->sizes() : tensor.sizes().vec(); }
};

std::vector<Entry> entries_of(const torch::nn::Module& module) {
  std::vector<Entry> entries;
  for (const auto& item : module.named_parameters()) {
    entries.push_back({item.key(), item.value().detach(), layout_of(item.value())});
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) entries.push_back({item.key(), item.value().detach(), nullptr});
  }
  return entries;
}

/// The group that all entries' meshes share; null if nothing is sharded.
GroupPtr group_of(const std::vector<Entry>& entries) {
  for (const auto& entry : entries) {
    if (!entry.layout) continue;
    if (auto group = cutting_group(*entry.layout)) return group;
  }
  return nullptr;
}

bool is_first_of_mesh(const std::vector<Entry>& entries) {
  for (const auto& entry : entries) {
    if (entry.layout) return entry.layout->mesh().get_rank() == entry.layout->mesh().ranks().front();
  }
  return true;
}

/// "a, b": names that are in one and not in the other.
std::string missing_names(const std::vector<Entry>& entries, const ModuleState& state) {
  std::vector<std::string> names;
  for (const auto& entry : entries) {
    if (!state.contains(entry.name)) names.push_back(entry.name);
  }
  return join(names, ", ");
}

std::string unknown_names(const std::vector<Entry>& entries, ModuleState state) {
  for (const auto& entry : entries) state.erase(entry.name);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return join(names, ", ");
}

/// What is wrong with `state`; empty if nothing is.
std::string problem_of(const std::vector<Entry>& entries, const ModuleState& state, bool is_strict) {
  if (is_strict) {
    const auto missing = missing_names(entries, state);
    if (!missing.empty()) return str("it lacks ", missing);
    const auto unknown = unknown_names(entries, state);
    if (!unknown.empty()) return str("the module has no ", unknown);
  }
  for (const auto& entry : entries) {
    const auto found = state.find(entry.name);
    if (found == state.end()) continue;
    if (found->second.sizes() != at::IntArrayRef(entry.sizes())) {
      return lockstep::str("'", entry.name, "' has sizes ", found->second.sizes(), " there and ",
                           at::IntArrayRef(entry.sizes()), " in the module");
    }
  }
  return "";
}

void take(const Entry& entry, const at::Tensor& whole) {
  const auto value = entry.layout ? entry.layout->cut(whole) : whole;
  entry.tensor.copy_(value);
}

}  // namespace

ModuleState full_state_dict(const torch::nn::Module& module, const FullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto entries = entries_of(module);
  const bool is_kept = !options.rank0_only || is_first_of_mesh(entries);
  ModuleState state;
  for (const auto& entry : entries) {
    auto whole = entry.layout ? gathered(entry.tensor, *entry.layout) : is_kept ? entry.tensor.clone() : at::Tensor();
    if (is_kept) state.emplace(entry.name, options.cpu_offload ? whole.cpu() : whole);
  }
  return state;
}

void load_full_state_dict(torch::nn::Module& module, const ModuleState& state, const LoadFullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto entries = entries_of(module);
  const auto group = options.broadcast_from_rank0 ? group_of(entries) : nullptr;
  if (!group) {
    const auto problem = problem_of(entries, state, options.strict);
    TORCH_CHECK(problem.empty(), "[lockstep/fsdp] the state does not fit the module: ", problem, ".");
    for (const auto& entry : entries) {
      if (const auto found = state.find(entry.name); found != state.end()) take(entry, found->second);
    }
    return;
  }
  // What rank 0 has, or what is wrong with it, told to all before anything is changed.
  const bool is_source = group->getRank() == 0;
  auto problem = is_source ? problem_of(entries, state, options.strict) : "";
  problem = broadcast_object(problem, 0, group);
  TORCH_CHECK(problem.empty(), "[lockstep/fsdp] the state of rank 0 does not fit the module: ", problem, ".");
  std::string has;  // a letter per entry: y or n
  for (const auto& entry : entries) has += is_source && state.contains(entry.name) ? 'y' : 'n';
  has = broadcast_object(has, 0, group);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    if (has.at(i) == 'n') continue;
    auto whole = is_source ? state.at(entry.name).to(entry.tensor.options()).contiguous()
                           : at::empty(entry.sizes(), entry.tensor.options());
    if (whole.numel() > 0) broadcast(whole, 0, group);
    take(entry, whole);
  }
}

}  // namespace lockstep
