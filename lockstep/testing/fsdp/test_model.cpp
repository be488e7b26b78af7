#include "lockstep/testing/fsdp/test_model.h"

#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <limits>
#include <utility>

#include "lockstep/comm/objects.h"
#include "lockstep/comm/world.h"

namespace lockstep::testing {
namespace {

/// Not Module::to(dtype), which casts integers too.
void cast_floating(torch::nn::Module& module, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  auto tensors = module.parameters();
  for (const auto& buffer : module.buffers()) tensors.push_back(buffer);
  for (const auto& tensor : tensors) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.to(dtype));
  }
}

}  // namespace

DeviceMesh TestGroups::mesh() const {
  const auto device = c10::DeviceTypeName(compute_device().type(), /*lower_case=*/true);
  if (!replicate) return DeviceMesh::from_group(shard, device);
  // A rank knows its own row and column only; the rows of its column are all there are.
  const auto mine = global_ranks(shard);
  const auto row_bytes = mine.size() * sizeof(int);
  std::string bytes(row_bytes, '\0');
  std::memcpy(bytes.data(), mine.data(), row_bytes);
  RankArray array;
  for (const auto& row : all_gather_object(bytes, replicate)) {
    TORCH_CHECK(row.size() == row_bytes, "[lockstep/testing] the shard groups of one replicate group have ",
                row.size() / sizeof(int), " and ", mine.size(), " ranks; they must have the same number.");
    std::vector<int> ranks(mine.size());
    std::memcpy(ranks.data(), row.data(), row_bytes);
    array.ranks.insert(array.ranks.end(), ranks.begin(), ranks.end());
  }
  array.shape = {static_cast<int64_t>(replicate->getSize()), static_cast<int64_t>(mine.size())};
  return DeviceMesh::from_group({replicate, shard}, device,
                                {.mesh = std::move(array), .mesh_dim_names = {"replicate", "shard"}});
}

c10::Device compute_device() {
  const auto world = current_world();
  if (!world || world->device().is_cpu()) return at::kCPU;
  // Rank threads share a device by backends that copy through the host: there is nothing to gain.
  const bool is_native = world->group()->getBackend(world->device().type())->getBackendName() == "nccl";
  return is_native ? world->device() : c10::Device(at::kCPU);
}

FullyShardOptions with_mesh(FullyShardOptions options, const TestGroups& groups) {
  const bool is_hybrid = options.sharding_strategy == ShardingStrategy::kHybridShard ||
                         options.sharding_strategy == ShardingStrategy::kHybridShardZero2;
  const bool is_left_to_library = is_hybrid && !groups.replicate;
  if (!options.mesh && !is_left_to_library) options.mesh = groups.mesh();
  return options;
}

void move_if(bool moves, torch::nn::Module& module) {
  if (moves) module.to(compute_device());
}

void wrap_if(bool wraps, torch::nn::Module& module, const FullyShardOptions& options) {
  if (wraps) fully_shard(module, options);
}

void build_model(bool is_deterministic, const std::function<void()>& build, uint64_t seed) {
  if (!is_deterministic) {
    const auto drawn =
        at::randint(std::numeric_limits<int>::max(), {1}, rank_generator(), at::TensorOptions(at::kLong));
    seed = static_cast<uint64_t>(drawn.item<int64_t>());
  }
  build_deterministically(build, seed);
}

void init_model(torch::nn::Module& model, const TestGroups& groups, const TestModelOptions& options,
                const std::function<void(const FullyShardOptions& fsdp)>& shard) {
  const auto fsdp_mode = options.fsdp_init_mode;
  const auto device_mode = options.device_init_mode;
  TORCH_CHECK(fsdp_mode == FsdpInitMode::kNoFsdp || fsdp_mode == FsdpInitMode::kRecursive,
              "[lockstep/testing] unknown FsdpInitMode ", static_cast<int>(fsdp_mode), ". Use kNoFsdp or kRecursive.");
  TORCH_CHECK(device_mode == DeviceInitMode::kBefore || device_mode == DeviceInitMode::kAfter ||
                  device_mode == DeviceInitMode::kNever,
              "[lockstep/testing] unknown DeviceInitMode ", static_cast<int>(device_mode),
              ". Use kBefore, kAfter or kNever.");
  if (options.dtype) cast_floating(model, *options.dtype);
  move_if(device_mode == DeviceInitMode::kBefore, model);
  if (fsdp_mode == FsdpInitMode::kRecursive) shard(with_mesh(options.fsdp, groups));
  move_if(device_mode == DeviceInitMode::kAfter, model);
}

}  // namespace lockstep::testing
