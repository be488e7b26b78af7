// What DistributedDataParallel::recover() tells the program to do next.
#pragma once

namespace lockstep {

enum class Recovered {
  /// The step's gradients are averaged, over all ranks or over those who are left: go on behind backward, with the
  /// optimizer's step.
  kStep,
  /// There are no gradients: begin the step again, with zeroed gradients and its first forward.
  kRepeatStep,
};

}  // namespace lockstep
