// Where there is nothing to choose between.
#include "lockstep/shm/instruction_sets.h"

namespace lockstep::shm::detail {

extern const KernelTable baseline_kernels;

const InstructionSet& best_instruction_set() {
  static constexpr InstructionSet kBaseline{.name = "baseline", .kernels = baseline_kernels, .slower = nullptr};
  return kBaseline;
}

}  // namespace lockstep::shm::detail
