#include "lockstep/fsdp/sharded_files.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/turn.h"
#include "lockstep/shard/gather.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep {
namespace {

std::string shard_path(const std::string& path, const std::string& save, int64_t part) {
  return str(path, save.empty() ? "" : "." + save, ".shard", part);
}

/// What is wrong on some rank, told to all: first along the last axis, then along those before it.
std::string first_problem(const DeviceMesh& mesh, std::string problem) {
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    for (auto& each : all_gather_object(problem, mesh.get_group(axis))) {
      if (problem.empty()) problem = std::move(each);
    }
  }
  return problem;
}

std::string problem_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// The index that a new one will replace; of no parts if there is none.
ShardIndex index_before(const std::string& path) {
  try {
    return load_shard_index(path);
  } catch (const std::exception&) {
    return {.parts = 0};
  }
}

void replace_index(const std::string& path, const ShardIndex& index) {
  const auto before = index_before(path);
  save_shard_index(path, index);
  for (int part = 0; part < before.parts; ++part) std::remove(shard_path(path, before.save, part).c_str());
  // And those of a save from before there was an index, which a save has always replaced.
  for (int part = 0; std::remove(shard_path(path, "", part).c_str()) == 0;) ++part;
}

/// All parts, and then the index, which the mesh's first rank writes. Returns what went wrong on some rank, after which
/// nothing of it is left.
std::string write_shards(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                         const std::string& path, const std::optional<DeviceMesh>& mesh) {
  const auto together = [&](const std::string& problem) { return mesh ? first_problem(*mesh, problem) : problem; };
  const auto id = str(std::random_device()(), "-", std::random_device()());
  StateShard shard{.save = mesh ? broadcast_over(*mesh, id) : id, .parts = mesh ? static_cast<int>(mesh->size()) : 1};
  const auto& ranks = mesh ? mesh->ranks() : std::vector<int>{0};
  const auto place = mesh ? std::find(ranks.begin(), ranks.end(), mesh->get_rank()) - ranks.begin() : 0;
  const auto file = shard_path(path, shard.save, place);
  auto problem = together(problem_of([&] {
    shard.model = sharded_state_dict(module);
    if (optimizer != nullptr) shard.optimizer = sharded_optimizer_state_dict(module, *optimizer);
    save_state_shard(file, shard);
  }));
  if (problem.empty()) {
    problem = together(problem_of([&] {
      if (place == 0) replace_index(path, {.save = shard.save, .parts = shard.parts});
    }));
  }
  if (!problem.empty()) std::remove(file.c_str());
  return problem;
}

/// What is saved but for its values, by which slices of a mesh that hold the same are known.
std::string names_of(const torch::nn::Module& module) {
  std::string names;
  for (const auto& each : module.named_parameters()) {
    const auto layout = layout_of(each.value());
    names += str(each.key(), "[", layout ? join(layout->sizes(), ",") : join(each.value().sizes().vec(), ","), "] ");
  }
  return names;
}

/// Of slices of a mesh that all save the same, as replicas of a tensor-parallel module do, one writes, and the others
/// hear of it. Returns what went wrong.
std::string save_in_one_slice(const torch::nn::Module& module, const std::string& path, const DeviceMesh& mesh,
                              const std::function<std::string()>& write) {
  const bool leads = mesh.get_rank() == mesh.ranks().front();
  std::optional<Turn> turn;
  if (leads) turn.emplace("save_sharded(" + path + ")", mesh.ranks().front());
  const bool is_first = broadcast_over(mesh, leads && turn->is_first() ? "first" : "") == "first";
  const auto saved = "saved " + names_of(module);
  if (is_first) {
    const auto problem = write();
    if (leads) turn->tell(problem.empty() ? saved : problem);
    return problem;
  }
  const auto told = broadcast_over(mesh, leads ? turn->told() : "");
  if (told == saved) return "";
  if (!told.starts_with("saved ")) return told;
  return str("another slice of ", mesh.get_root_mesh(), " has saved other parameters to ", path,
             ". Slices that hold different ones need paths of their own.");
}

void save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer, const std::string& path) {
  const auto mesh = largest_mesh(module.parameters());
  const auto write = [&] { return write_shards(module, optimizer, path, mesh); };
  const bool is_slice = mesh && mesh->get_root_mesh().size() > mesh->size();
  const auto problem = is_slice ? save_in_one_slice(module, path, *mesh, write) : write();
  TORCH_CHECK(problem.empty(), "[lockstep/fsdp] state was not saved: ", problem);
}

void load(torch::nn::Module& module, torch::optim::Optimizer* optimizer, const std::string& path,
          const LoadShardedStateOptions& options) {
  detail::ModuleStateLoader model(module, options);
  std::optional<detail::OptimizerStateLoader> state;
  if (optimizer != nullptr) state.emplace(module, *optimizer, options);
  // Saves from before there was an index have parts without a number, of which the first says how many there are.
  const bool is_old = !std::ifstream(path) && std::ifstream(shard_path(path, "", 0));
  auto index = is_old ? ShardIndex() : load_shard_index(path);
  const auto number = index.save;
  for (int part = 0; part < index.parts; ++part) {
    const auto file = shard_path(path, number, part);
    const auto shard = load_state_shard(file);
    if (is_old && part == 0) index = {.save = shard.save, .parts = shard.parts};
    TORCH_CHECK(shard.save == index.save, "[lockstep/fsdp] ", file, " belongs to another save than ",
                is_old ? shard_path(path, "", 0) : path, ". A save was not finished, or parts were mixed up.");
    model.add(shard.model);
    if (state) state->add(shard.optimizer);
  }
  model.check();
  if (state) state->finish();
  model.finish();
}

}  // namespace

void save_sharded(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, const std::string& path) {
  save(module, &optimizer, path);
}

void save_sharded(const torch::nn::Module& module, const std::string& path) {
  save(module, nullptr, path);
}

void load_sharded(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const std::string& path,
                  const LoadShardedStateOptions& options) {
  load(module, &optimizer, path, options);
}

void load_sharded(torch::nn::Module& module, const std::string& path, const LoadShardedStateOptions& options) {
  load(module, nullptr, path, options);
}

}  // namespace lockstep
