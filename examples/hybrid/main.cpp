// Six processes: four trainers, an embedding server and a master that gives them work.
//   build/bin/lockstep-run -n 6 build/examples/hybrid --ddp outside
#include <ATen/ops/allclose.h>

#include <cstdio>
#include <cstring>
#include <latch>
#include <string>

#include "examples/hybrid/hybrid_model.h"
#include "lockstep/comm/world.h"
#include "lockstep/rpc/rpc.h"

namespace {

using hybrid::DdpMode;

// Trainers and server serve until the master calls this. A latch: the call may come before the wait.
std::latch stop_called(1);
const auto stop = lockstep::rpc::function("stop", [] { stop_called.count_down(); });

DdpMode mode_from(int argc, char** argv) {
  const std::string given = argc == 3 && std::strcmp(argv[1], "--ddp") == 0 ? argv[2] : "outside";
  if (given == "none") return DdpMode::kNone;
  if (given == "inside") return DdpMode::kInside;
  TORCH_CHECK(given == "outside", "--ddp is none, inside or outside, not ", given);
  return DdpMode::kOutside;
}

}  // namespace

int main(int argc, char** argv) {
  const auto mode = mode_from(argc, argv);
  const auto world = lockstep::init({.backend = "gloo"});
  const auto role = hybrid::role_of(world.rank());
  hybrid::log(hybrid::Level::kInfo, "rank " + std::to_string(world.rank()) + " begins");
  lockstep::rpc::init_rpc("worker" + std::to_string(world.rank()), world.rank(), world.world_size());
  if (role == hybrid::Role::kMaster) {
    hybrid::lead(mode, /*is_uneven=*/false, [](int round, const std::vector<hybrid::Gradients>& gradients) {
      double shared = 0;
      double own = 0;
      for (const auto& [ddp, others] : gradients) {
        for (const auto& each : ddp) shared += each.norm().item<double>();
        for (const auto& each : others) own += each.norm().item<double>();
      }
      std::printf("round %d: gradients that DDP averaged %.3f, others %.3f\n", round, shared, own);
    });
    for (int rank = 0; rank < world.world_size() - 1; ++rank) lockstep::rpc::rpc_sync(rank, stop);
  } else {
    if (role == hybrid::Role::kServer && mode != DdpMode::kNone) lockstep::new_group({0, 1, 2, 3});
    stop_called.wait();
  }
  lockstep::rpc::shutdown();
  return 0;
}
