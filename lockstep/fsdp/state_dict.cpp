#include "lockstep/fsdp/state_dict.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/fsdp/flat_pieces.h"
#include "lockstep/fsdp/unit_registry.h"
#include "lockstep/shard/gather.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

struct Entry {
  std::string name;
  at::Tensor tensor;
  std::shared_ptr<const Layout> layout = nullptr;  // null for buffers and what is not sharded
  bool is_frozen = false;
  std::optional<at::ScalarType> saved_dtype = std::nullopt;  // of a buffer that was cast
  std::optional<detail::FlatPiece> piece = std::nullopt;     // of `tensor`, a flat parameter

  std::vector<int64_t> sizes() const {
    if (piece) return piece->sizes;
    return layout ? layout->sizes() : tensor.sizes().vec();
  }
};

/// What is registered.
std::vector<Entry> entries_of(const torch::nn::Module& module) {
  std::vector<Entry> entries;
  for (const auto& item : module.named_parameters()) {
    entries.push_back({.name = item.key(),
                       .tensor = item.value().detach(),
                       .layout = layout_of(item.value()),
                       .is_frozen = !item.value().requires_grad()});
  }
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    entries.push_back(
        {.name = item.key(), .tensor = item.value().detach(), .saved_dtype = detail::original_dtype_of(item.value())});
  }
  return entries;
}

/// The same, with what flat parameters consist of in their place.
std::vector<Entry> original_entries_of(const torch::nn::Module& module) {
  const auto flat = detail::flat_pieces(module);
  if (flat.empty()) return entries_of(module);
  std::unordered_map<std::string, const std::vector<detail::FlatPiece>*> by_name;
  for (const auto& item : module.named_parameters()) {
    const auto found = flat.find(item.value().unsafeGetTensorImpl());
    if (found != flat.end()) by_name.emplace(item.key(), &found->second);
  }
  std::vector<Entry> entries;
  for (const auto& entry : entries_of(module)) {
    const auto found = by_name.find(entry.name);
    if (found == by_name.end()) {
      entries.push_back(entry);
      continue;
    }
    for (const auto& piece : *found->second) {
      auto& part = entries.emplace_back(entry);
      part.name = piece.name;
      part.piece = piece;
    }
  }
  return entries;
}

/// "a, b": names that are in one and not in the other.
std::string missing_names(const std::vector<Entry>& entries, const ModuleState& state, bool may_lack_frozen) {
  std::vector<std::string> names;
  for (const auto& entry : entries) {
    if (entry.is_frozen && may_lack_frozen) continue;
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
std::string problem_of(const std::vector<Entry>& entries, const ModuleState& state,
                       const LoadFullStateOptions& options) {
  if (options.strict) {
    const auto missing = missing_names(entries, state, options.ignore_frozen_params);
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

/// This rank's part of what a flat parameter has of it.
void take_piece(const Entry& entry, const at::Tensor& whole) {
  const auto& piece = *entry.piece;
  const auto mine = entry.layout->part();
  entry.tensor.narrow(0, 0, 0).zero_();  // a write on all ranks, also those that have nothing of it: all gather anew
  for (const auto& range : mine.ranges().front()) {
    const auto common = intersection(range, {piece.offset, piece.offset + piece.elements});
    if (common.is_empty()) continue;
    entry.tensor.narrow(0, common.begin - range.begin, common.size())
        .copy_(whole.reshape({-1}).narrow(0, common.begin - piece.offset, common.size()));
  }
}

void take(const Entry& entry, const at::Tensor& whole) {
  if (entry.piece) return take_piece(entry, whole);
  const auto value = entry.layout ? entry.layout->cut(whole) : whole;
  entry.tensor.copy_(value);
}

}  // namespace

ModuleState full_state_dict(const torch::nn::Module& module, const FullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const bool is_kept = !options.rank0_only || is_first_rank(largest_mesh(module.parameters()));
  ModuleState state;
  at::Tensor flat;  // whole
  for (const auto& entry : original_entries_of(module)) {
    if (entry.is_frozen && options.ignore_frozen_params) continue;
    at::Tensor whole;
    if (entry.piece) {
      if (entry.piece->offset == 0) flat = gather_whole(entry.tensor, *entry.layout);
      if (is_kept) whole = entry.piece->in(flat).clone();
    } else {
      whole = entry.layout ? gather_whole(entry.tensor, *entry.layout) : is_kept ? entry.tensor.clone() : at::Tensor();
    }
    if (!is_kept) continue;
    if (entry.saved_dtype) whole = whole.to(*entry.saved_dtype);
    state.emplace(entry.name, options.cpu_offload ? whole.cpu() : whole);
  }
  return state;
}

void load_full_state_dict(torch::nn::Module& module, const ModuleState& state, const LoadFullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto entries = original_entries_of(module);
  const auto mesh = options.broadcast_from_rank0 ? largest_mesh(module.parameters()) : std::nullopt;
  if (!mesh) {
    const auto problem = problem_of(entries, state, options);
    TORCH_CHECK(problem.empty(), "[lockstep/fsdp] the state does not fit the module: ", problem, ".");
    for (const auto& entry : entries) {
      if (const auto found = state.find(entry.name); found != state.end()) take(entry, found->second);
    }
    return;
  }
  // What rank 0 has, or what is wrong with it, told to all before anything is changed.
  const bool is_source = is_first_rank(mesh);
  const auto problem = broadcast_over(*mesh, is_source ? problem_of(entries, state, options) : "");
  TORCH_CHECK(problem.empty(), "[lockstep/fsdp] the state of rank 0 does not fit the module: ", problem, ".");
  std::string has;  // a letter per entry: y or n
  for (const auto& entry : entries) has += is_source && state.contains(entry.name) ? 'y' : 'n';
  has = broadcast_over(*mesh, has);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = entries[i];
    if (has.at(i) == 'n') continue;
    const auto whole = is_source ? state.at(entry.name).to(entry.tensor.options()).contiguous()
                                 : at::empty(entry.sizes(), entry.tensor.options());
    broadcast_over(*mesh, whole);
    take(entry, whole);
  }
}

ShardedModuleState sharded_state_dict(const torch::nn::Module& module, const ShardedStateOptions& options) {
  ShardedModuleState state;
  for (const auto& item : module.named_parameters()) {
    if (options.ignore_frozen_params && !item.value().requires_grad()) continue;
    state[item.key()] = {item.value().detach(), sharding_of(item.value())};
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) state[item.key()].local = item.value().detach();
  }
  return state;
}

void load_sharded_state_dict(torch::nn::Module& module, const ShardedModuleState& state,
                             const LoadShardedStateOptions& options) {
  const auto own = sharded_state_dict(module);
  for (const auto& [name, given] : state) {
    const auto found = own.find(name);
    if (found == own.end() || found->second.sharding == given.sharding) continue;
    const auto text = [](const ShardedTensor& tensor) {
      return tensor.sharding ? tensor.sharding->to_string() : std::string("whole");
    };
    TORCH_CHECK(false, "[lockstep/fsdp] '", name, "' was saved as ", text(given), "; here it is ", text(found->second),
                ". Load the parts of all ranks that saved, of which this rank takes its own.");
  }
  load_sharded_state_dict(module, std::vector{state}, options);
}

void load_sharded_state_dict(torch::nn::Module& module, const std::vector<ShardedModuleState>& parts,
                             const LoadShardedStateOptions& options) {
  detail::ModuleStateLoader loader(module, options);
  for (const auto& part : parts) loader.add(part);
  loader.check();
  loader.finish();
}

namespace detail {

struct ModuleStateLoader::Wanted {
  at::Tensor into;
  bool may_be_missing;
  PartialTensor values;
  bool has_come = false;
};

ModuleStateLoader::ModuleStateLoader(torch::nn::Module& module, const LoadShardedStateOptions& options)
    : options_(options) {
  for (const auto& entry : entries_of(module)) {
    const auto part = entry.layout ? entry.layout->part() : whole_part(entry.sizes());
    wanted_.emplace(entry.name,
                    Wanted{.into = entry.tensor,
                           .may_be_missing = !options.strict || (entry.is_frozen && options.ignore_frozen_params),
                           .values = {entry.name, entry.sizes(), part, entry.tensor.options()}});
  }
}

ModuleStateLoader::~ModuleStateLoader() = default;

void ModuleStateLoader::add(const ShardedModuleState& part) {
  for (const auto& [name, tensor] : part) {
    const auto found = wanted_.find(name);
    if (found == wanted_.end()) {
      unknown_.insert(name);
      continue;
    }
    found->second.values.add(tensor);
    found->second.has_come = true;
  }
}

void ModuleStateLoader::check() const {
  std::vector<std::string> missing;
  for (const auto& [name, wanted] : wanted_) {
    if (!wanted.has_come && !wanted.may_be_missing) missing.push_back(name);
    if (wanted.has_come) wanted.values.finished();
  }
  const auto problem = !missing.empty()                       ? str("it lacks ", join(missing, ", "))
                       : options_.strict && !unknown_.empty() ? str("the module has no ", join(unknown_, ", "))
                                                              : std::string();
  TORCH_CHECK(problem.empty(), "[lockstep/fsdp] the state does not fit the module: ", problem, ".");
}

void ModuleStateLoader::finish() {
  const at::NoGradGuard no_grad;
  for (auto& [name, wanted] : wanted_) {
    if (wanted.has_come) wanted.into.copy_(wanted.values.finished());
  }
}

}  // namespace detail
}  // namespace lockstep
