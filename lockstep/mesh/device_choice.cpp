#include "lockstep/mesh/device_choice.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "lockstep/base/env.h"
#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"

namespace lockstep::detail {
namespace {

bool is_device_chosen(const c10::impl::DeviceGuardImplInterface& guard, int device_count) {
  if (guard.getDevice().index() > 0) return true;
  // Device 0 is also what a process has that never chose; one that has used it holds a context there.
  if (guard.type() != c10::kCUDA) return false;
  const auto& hooks = at::detail::getCUDAHooks();
  for (int i = 0; i < device_count; ++i) {
    if (hooks.hasPrimaryContext(static_cast<c10::DeviceIndex>(i))) return true;
  }
  return false;
}

std::optional<int> launcher_local_rank(const World& world) {
  if (const auto given = env_integer(env, "LOCAL_RANK")) return static_cast<int>(*given);
  if (world.launcher() == "mpirun" || world.launcher() == "slurm") return world.local_rank();
  return std::nullopt;
}

}  // namespace

std::optional<DeviceChoice> choose_device(const DeviceSituation& situation) {
  if (situation.is_chosen || situation.device_count == 0) return std::nullopt;
  if (situation.local_rank) return DeviceChoice{.index = *situation.local_rank % situation.device_count};
  return DeviceChoice{.index = situation.rank % situation.device_count, .is_guess = true};
}

void check_even_devices(const std::string& device_type, const std::vector<int>& counts, int rank) {
  const auto who = [&] { return str("[lockstep/mesh] rank ", rank, " of ", counts.size(), ": "); };
  const bool is_same = std::all_of(counts.begin(), counts.end(), [&](int count) { return count == counts[0]; });
  TORCH_CHECK(is_same, who(), "a mesh of '", device_type, "' needs as many devices on every host, but ranks 0 to ",
              counts.size() - 1, " see ", join(counts, ", "), ". Choose each rank's device before the mesh is made.");
  const int world_size = static_cast<int>(counts.size());
  TORCH_CHECK(counts[0] == 0 || world_size <= counts[0] || world_size % counts[0] == 0, who(), "a mesh of '",
              device_type, "' on hosts with ", counts[0],
              " devices each needs a multiple of as many ranks, but there are ", world_size,
              ". Set LOCAL_RANK, or choose each rank's device before the mesh is made.");
}

void set_device_for_mesh(const World& world, const std::string& device_type) {
  const auto kind = c10::Device(device_type).type();
  if (kind == c10::kCPU || kind == c10::kMeta) return;
  const auto* guard = c10::impl::hasDeviceGuardImpl(kind) ? c10::impl::getDeviceGuardImpl(kind) : nullptr;
  const int count = guard != nullptr ? guard->deviceCount() : 0;
  const auto choice = choose_device({.is_chosen = count > 0 && is_device_chosen(*guard, count),
                                     .device_count = count,
                                     .rank = world.rank(),
                                     .local_rank = launcher_local_rank(world)});

  // Every rank says whether it guesses, so that a guess is refused on all ranks or on none.
  const auto texts = all_gather_object(str(count, choice && choice->is_guess ? "?" : "!"), world.group());
  if (std::any_of(texts.begin(), texts.end(), [](const auto& text) { return text.back() == '?'; })) {
    std::vector<int> counts;
    for (const auto& text : texts) counts.push_back(std::stoi(text));
    check_even_devices(device_type, counts, world.rank());
  }
  if (!choice) return;
  auto index = choice->index;
  // The device given to init() is the process's choice, though nothing has run there yet.
  if (world.is_device_given() && world.device().type() == kind && world.device().has_index()) {
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): an index is no character
    index = world.device().index();
  }
  if (choice->is_guess && count > 1) {
    TORCH_WARN("[lockstep/mesh] rank ", world.rank(), " of ", world.world_size(), ": no ", device_type,
               " device was chosen and LOCAL_RANK is not set, so the mesh takes device ", index,
               ", by rank modulo the ", count, " devices of a host. Choose the device before you make the mesh.");
  }
  guard->setDevice(c10::Device(kind, static_cast<c10::DeviceIndex>(index)));
}

}  // namespace lockstep::detail
