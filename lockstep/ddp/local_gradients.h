// Gradients that backwards under no_sync() have added up and nobody has reduced yet. They are in .grad, or in a context
// of distributed autograd, and those of one place are no business of a backward in another. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/ddp/gradient_witness.h"
#include "lockstep/ddp/unused_parameters.h"
#include "lockstep/nn/gradient_access.h"

namespace lockstep::detail {

/// Of the place that the last backward was in. Those of other places are put aside.
class LocalGradients {
 public:
  /// A backward begins there. `marks` are of parameters that local backwards have used; null if nobody marks any.
  void enter(const GradientAccess& access, UsedMap* marks);
  /// A local backward brings gradients, and ends.
  void note_added() { now_.are_there = true; }
  void note_end(const std::vector<at::Tensor>& parameters);
  void forget() { now_.are_there = false; }

  /// There are some, and they were not zeroed; a context is still there.
  bool are_waiting(const std::vector<at::Tensor>& parameters) const;
  GradientAccess access() const { return now_.place.access(); }

 private:
  struct OfPlace {
    GradientPlace place = {};
    bool are_there = false;
    GradientWitness witness = {};  // in .grad
    at::Tensor marks = {};         // while it is put aside
  };

  OfPlace now_;
  std::vector<OfPlace> aside_;
};

}  // namespace lockstep::detail
