// Ordinary tensors beside DTensors, taken for replicas where the program says so.
#pragma once

#include "lockstep/intercept/operator_scope.h"

namespace lockstep {

/// While it lives, operators the thread calls on DTensors take ordinary tensors beside them for replicas, and operators
/// without a rule have their arguments replicated first: Python's implicit_replication(). Nobody checks that all ranks
/// hold the same values. Backward passes started inside are seen as well. Local.
class ImplicitReplication {
 public:
  ImplicitReplication();

 private:
  EnterScope scope_;
};

}  // namespace lockstep
