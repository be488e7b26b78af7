#include "lockstep/tp/loss_parallel.h"

#include "lockstep/dtensor/rules/loss.h"

namespace lockstep {

LossParallel::LossParallel() {
  ++detail::loss_parallel_depth();
}

LossParallel::~LossParallel() {
  --detail::loss_parallel_depth();
}

}  // namespace lockstep
