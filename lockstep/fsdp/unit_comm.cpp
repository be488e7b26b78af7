#include "lockstep/fsdp/unit_comm.h"

#include "lockstep/comm/collectives.h"
#include "lockstep/shard/buffer.h"

namespace lockstep {

at::Tensor AllGatherComm::allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& group) {
  return detail::allocate_buffer(elements, options, group);
}

Pending AllGatherComm::run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                           const GroupPtr& group) {
  return launch_all_gather_into_tensor_coalesced(outputs, inputs, group);
}

at::Tensor ReduceScatterComm::allocate(int64_t elements, const at::TensorOptions& options, const GroupPtr& group) {
  return detail::allocate_buffer(elements, options, group);
}

Pending ReduceScatterComm::run(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                               const GroupPtr& group) {
  return launch_reduce_scatter_tensor_coalesced(outputs, inputs, group);
}

}  // namespace lockstep
