#include "lockstep/comm/values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "lockstep/comm/collectives.h"

namespace lockstep {
namespace {

/// The root's bytes, on ranks that want them; the others have none. They travel on the device.
std::vector<char> broadcast_bytes(std::vector<char> bytes, bool is_wanted, int root, const GroupPtr& group,
                                  c10::Device device) {
  const bool is_root = group->getRank() == root;
  const auto length = at::scalar_tensor(static_cast<int64_t>(bytes.size()), at::kLong).view({1}).to(device);
  broadcast(length, root, group);
  const auto size = length.item<int64_t>();
  const auto on_device = at::TensorOptions(at::kByte).device(device);
  if (!is_root && !is_wanted) {
    broadcast(at::empty({size}, on_device), root, group);
    return {};
  }
  bytes.resize(static_cast<std::size_t>(size));
  const auto local = at::from_blob(bytes.data(), {size}, at::kByte);
  const auto payload = is_root || device.is_cpu() ? local.to(device) : at::empty({size}, on_device);
  broadcast(payload, root, group);
  if (!is_root && !device.is_cpu()) local.copy_(payload);
  return bytes;
}

}  // namespace

c10::IValue broadcast_value(const c10::IValue& value, int root, const GroupPtr& group, c10::Device device) {
  check_member(group);
  TORCH_CHECK(root >= 0 && root < group->getSize(), "[lockstep/comm] broadcast_value: rank ", root,
              " is not in the group, which has ", group->getSize(), " ranks");
  const bool is_root = group->getRank() == root;
  if (is_root && group->getSize() == 1) return copied_to(value, device, /*non_blocking=*/false);
  const auto bytes = broadcast_bytes(is_root ? torch::jit::pickle_save(value) : std::vector<char>(),
                                     /*is_wanted=*/!is_root, root, group, device);
  return copied_to(is_root ? value : torch::jit::pickle_load(bytes), device, /*non_blocking=*/false);
}

c10::IValue send_value(const c10::IValue& value, int root, int to, const GroupPtr& group, c10::Device device) {
  check_member(group);
  const bool is_root = group->getRank() == root;
  const bool is_target = group->getRank() == to;
  const auto bytes =
      broadcast_bytes(is_root ? torch::jit::pickle_save(value) : std::vector<char>(), is_target, root, group, device);
  return is_target ? torch::jit::pickle_load(bytes) : c10::IValue();
}

c10::IValue copied_to(const c10::IValue& value, c10::Device device, bool non_blocking) {
  // The host does not follow a stream: it would read before the bytes are there.
  non_blocking = non_blocking && !device.is_cpu();
  const auto copied = [&](const c10::IValue& each) { return copied_to(each, device, non_blocking); };
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? tensor.detach().to(device, tensor.scalar_type(), non_blocking, /*copy=*/true) : tensor;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& each : value.toTupleRef().elements()) elements.push_back(copied(each));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    for (std::size_t i = 0; i < list.size(); ++i) copy.push_back(copied(list.get(i)));
    return copy;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict copy(dict.keyType(), dict.valueType());
    for (const auto& each : dict) copy.insert(each.key(), copied(each.value()));
    return copy;
  }
  return value;
}

}  // namespace lockstep
