#include "lockstep/rpc/rref_backward.h"

#include <torch/csrc/autograd/variable.h>

#include "lockstep/rpc/box.h"
#include "lockstep/rpc/dist_autograd.h"

namespace lockstep::rpc::detail {

void backward_of(const c10::IValue& object, std::optional<std::int64_t> context_id, bool retain_graph) {
  const auto& box = any_box(object);
  TORCH_CHECK(box.type() == typeid(at::Tensor), "[lockstep/rpc] RRef.backward: the RRef holds a ", readable(box.type()),
              ", not a Tensor.");
  const auto root = *unboxed<at::Tensor>(object);
  if (context_id) {
    dist_autograd::backward(*context_id, {root}, {.retain_graph = retain_graph});
    return;
  }
  TORCH_CHECK(root.requires_grad(), "[lockstep/rpc] RRef.backward: the tensor requires no gradient.");
  root.backward({}, retain_graph);
}

}  // namespace lockstep::rpc::detail
