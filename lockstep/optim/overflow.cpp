#include "lockstep/optim/overflow.h"

#include "lockstep/comm/collectives.h"

namespace lockstep {

std::function<void(at::Tensor& found_inf)> overflow_agreement(GroupPtr group) {
  return [group = std::move(group)](at::Tensor& found_inf) { all_reduce(found_inf, group, ReduceOp::MAX); };
}

}  // namespace lockstep
