// Which device a rank computes on, if nobody has said so before a mesh is made. Internal to mesh.
#pragma once

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::detail {

/// What a rank knows when it has to choose.
struct DeviceSituation {
  bool is_chosen = false;  // the process has already used or selected a device of the kind
  int device_count = 0;    // on this host
  int rank = 0;
  std::optional<int> local_rank = std::nullopt;  // as the launcher gave it
};

struct DeviceChoice {
  int index = 0;
  bool is_guess = false;  // rank modulo devices, which is right only if all hosts are alike
  bool operator==(const DeviceChoice&) const = default;
};

/// None if the process has chosen, or there is nothing to choose from. A launcher's local rank is taken modulo the
/// devices, as init() does, so that ranks may share one. Pure.
std::optional<DeviceChoice> choose_device(const DeviceSituation& situation);

/// Refuses a guess that cannot be right: hosts with different numbers of devices, or ranks that do not fill every host.
/// `counts` holds the number of devices each rank sees. Pure.
void check_even_devices(const std::string& device_type, const std::vector<int>& counts, int rank);

/// Chooses and sets this rank's device of the kind, unless the process has. Warns about a guess. Collective over the
/// world, except for kinds without devices to choose from, such as the CPU.
void set_device_for_mesh(const World& world, const std::string& device_type);

}  // namespace lockstep::detail
