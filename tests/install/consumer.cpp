// A user's program: sees only the install tree.
#include <lockstep/lockstep.h>

#include <ATen/ops/ones.h>

#include <cstdio>

int main() {
  const auto world = lockstep::init();
  auto tensor = at::ones({3}, world.device());
  lockstep::all_reduce(tensor, world.group());
  const auto mesh = lockstep::init_device_mesh("cpu", {world.world_size()}, {.mesh_dim_names = {"dp"}});
  std::printf("sum %g on %d ranks, mesh of %d\n", tensor.sum().item<double>(), world.world_size(),
              static_cast<int>(mesh.size()));
  return tensor.sum().item<double>() == 3.0 * world.world_size() ? 0 : 1;
}
