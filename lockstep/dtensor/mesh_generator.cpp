#include "lockstep/dtensor/mesh_generator.h"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/nn/own_generators.h"

namespace lockstep::detail {
namespace {

/// Of this process, and no other.
int64_t process_mark() {
  static const auto mark = static_cast<int64_t>(std::random_device()()) << 31 ^ std::random_device()();
  return mark;
}

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// The first rank's, along each axis in turn.
void take_over(const at::Tensor& tensor, const DeviceMesh& mesh) {
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) broadcast(tensor, 0, mesh.get_group(axis));
}

bool shares_a_process(const DeviceMesh& mesh, at::Device device) {
  const auto mark = at::full({1}, process_mark(), at::TensorOptions(device).dtype(at::kLong));
  take_over(mark, mesh);
  const auto& coordinate = *mesh.get_coordinate();
  const bool is_first = std::all_of(coordinate.begin(), coordinate.end(), [](int each) { return each == 0; });
  const auto answer = at::full({1}, !is_first && mark.item<int64_t>() == process_mark() ? 1 : 0, mark.options());
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) all_reduce(answer, mesh.get_group(axis), ReduceOp::MAX);
  return answer.item<int64_t>() != 0;
}

at::Generator synchronized_generator(const DeviceMesh& mesh, at::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const auto mine = state_of(generator);
  auto state = mine.clone().to(device);
  take_over(state, mesh);
  state = state.cpu();
  if (shares_a_process(mesh, device)) {
    auto own = generator.clone();
    own.set_state(state);
    add_own_generator(own);
    return own;
  }
  if (!at::equal(mine, state)) {
    TORCH_WARN("[lockstep/dtensor] rank ", mesh.get_rank(), ", ", mesh,
               ": random operators on DTensors draw the same numbers on all ranks, but this rank's generator stood "
               "otherwise than the first one's, whose state it takes over. Call torch::manual_seed() with one seed on "
               "all ranks of the mesh.");
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  return generator;
}

/// Meshes are known by their groups, and forgotten with them.
class Known {
 public:
  std::optional<at::Generator> find(const DeviceMesh& mesh, at::Device device) {
    const std::lock_guard lock(mutex_);
    for (const auto& each : entries_) {
      if (each.device == device && is_same(each, mesh)) return each.generator;
    }
    return std::nullopt;
  }

  void add(const DeviceMesh& mesh, at::Device device, const at::Generator& generator) {
    Entry entry{.groups = {}, .device = device, .generator = generator};
    for (const auto& group : mesh.get_all_groups()) entry.groups.emplace_back(group);
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const Entry& each) { return each.groups.front().expired(); });
    entries_.push_back(std::move(entry));
  }

 private:
  struct Entry {
    std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups;
    at::Device device;
    at::Generator generator;
  };

  static bool is_same(const Entry& entry, const DeviceMesh& mesh) {
    const auto& groups = mesh.get_all_groups();
    return std::equal(entry.groups.begin(), entry.groups.end(), groups.begin(), groups.end(),
                      [](const auto& weak, const auto& group) { return weak._unsafe_get_target() == group.get(); });
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_
};

}  // namespace

at::Generator mesh_generator(const DeviceMesh& mesh, at::Device device) {
  static Known known;
  if (const auto found = known.find(mesh, device)) return *found;
  const auto generator = synchronized_generator(mesh, device);
  known.add(mesh, device, generator);
  return generator;
}

}  // namespace lockstep::detail
