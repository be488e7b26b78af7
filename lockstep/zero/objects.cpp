#include "lockstep/zero/objects.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep {

c10::IValue broadcast_object(const c10::IValue& value, int root, const GroupPtr& group, c10::Device device) {
  TORCH_CHECK_VALUE(root >= 0 && root < group->getSize(), "[lockstep/zero] broadcast_object: rank ", root,
                    " is not in the group, which has ", group->getSize(), " ranks");
  const bool is_root = group->getRank() == root;
  if (is_root && group->getSize() == 1) return copied_to(value, device, /*non_blocking=*/false);
  std::vector<char> bytes = is_root ? torch::jit::pickle_save(value) : std::vector<char>();
  const auto length = at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong).view({1}).to(device);
  broadcast(length, root, group);
  bytes.resize(static_cast<std::size_t>(length.item<int64_t>()));
  const auto local = at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
  const auto payload =
      is_root || device.is_cpu() ? local.to(device) : at::empty_like(local, local.options().device(device));
  broadcast(payload, root, group);
  if (is_root) return copied_to(value, device, /*non_blocking=*/false);
  if (!device.is_cpu()) local.copy_(payload);
  return copied_to(torch::jit::pickle_load(bytes), device, /*non_blocking=*/false);
}

}  // namespace lockstep
