// What a sharded optimizer takes of a rank's memory.
#pragma once

#include <cstdint>

namespace lockstep {

/// In bytes, on one rank.
struct ZeroMemoryReport {
  /// All of them: they are not divided.
  int64_t parameters = 0;
  /// This rank's shard of the optimizer state.
  int64_t state = 0;
  /// This rank's shard of the gradients, with ZeroStage::kGradients; else gradients are whole, and not counted here.
  int64_t gradients = 0;
  /// Flat tensors that parameters are views of: no memory beside theirs, once the old one is freed.
  int64_t buckets = 0;
  /// Kept from step to step for moving parameters and gradients; with ZeroStage::kGradients also the buckets that go
  /// round.
  int64_t temporaries = 0;
};

}  // namespace lockstep
