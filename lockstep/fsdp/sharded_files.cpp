#include "lockstep/fsdp/sharded_files.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <random>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/shard/gather.h"

namespace lockstep {
namespace {

std::string shard_path(const std::string& path, int64_t part) {
  return str(path, ".shard", part);
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

void save(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer, const std::string& path) {
  const auto mesh = largest_mesh(module.parameters());
  const auto id = str(std::random_device()(), ".", std::random_device()());
  StateShard shard{.save = mesh ? broadcast_over(*mesh, id) : id,
                   .parts = mesh ? static_cast<int>(mesh->size()) : 1,
                   .model = sharded_state_dict(module)};
  std::string problem;
  try {
    if (optimizer != nullptr) shard.optimizer = sharded_optimizer_state_dict(module, *optimizer);
    const auto& ranks = mesh ? mesh->ranks() : std::vector<int>{0};
    const auto place = mesh ? std::find(ranks.begin(), ranks.end(), mesh->get_rank()) - ranks.begin() : 0;
    save_state_shard(shard_path(path, place), shard);
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  }
  if (mesh) problem = first_problem(*mesh, problem);
  TORCH_CHECK(problem.empty(), "[lockstep/fsdp] state was not saved: ", problem);
}

void load(torch::nn::Module& module, torch::optim::Optimizer* optimizer, const std::string& path,
          const LoadShardedStateOptions& options) {
  detail::ModuleStateLoader model(module, options);
  std::optional<detail::OptimizerStateLoader> state;
  if (optimizer != nullptr) state.emplace(module, *optimizer, options);
  std::string save;
  int parts = 1;
  for (int part = 0; part < parts; ++part) {
    const auto shard = load_state_shard(shard_path(path, part));
    if (part == 0) {
      save = shard.save;
      parts = shard.parts;
    }
    TORCH_CHECK(shard.save == save, "[lockstep/fsdp] ", shard_path(path, part), " belongs to another save than ",
                shard_path(path, 0), ". A save was not finished, or parts were mixed up.");
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
