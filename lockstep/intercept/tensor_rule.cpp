#include "lockstep/intercept/tensor_rule.h"

#include <atomic>
#include <typeinfo>

#include "lockstep/intercept/key.h"

namespace lockstep {
namespace {

void destroy(void* context) {
  delete static_cast<RuledStorage*>(context);
}

/// Null if it is none. Nearly all tensors with rules are of one type: the last one that was found is known at a glance.
const RuledTensorImpl* ruled_impl(const at::Tensor& tensor) {
  static std::atomic<const std::type_info*> known = nullptr;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* type = &typeid(*impl);
  if (type == known.load(std::memory_order_relaxed)) return static_cast<const RuledTensorImpl*>(impl);
  const auto* ruled = dynamic_cast<const RuledTensorImpl*>(impl);
  if (ruled != nullptr) known.store(type, std::memory_order_relaxed);
  return ruled;
}

}  // namespace

void RuledStorage::attach(c10::StorageImpl& storage, std::unique_ptr<RuledStorage> ruled, const std::string& message) {
  const auto device = storage.device();
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, ruled.release(), &destroy, device));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

RuledStorage* RuledStorage::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  auto& pointer = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &destroy ? static_cast<RuledStorage*>(pointer.get_context()) : nullptr;
}

const at::Tensor& memory_of(const at::Tensor& tensor) {
  if (tensor.has_storage()) return tensor;
  const auto* ruled = ruled_impl(tensor);
  const auto* memory = ruled != nullptr ? ruled->memory() : nullptr;
  return memory != nullptr ? *memory : tensor;
}

TensorRule* find_rule(const OperatorCall& call) {
  TensorRule* of_tensor = nullptr;
  TensorRule* of_storage = nullptr;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
    if (of_tensor != nullptr || !is_marked_intercepted(tensor)) return;
    if (const auto* ruled = ruled_impl(tensor)) {
      of_tensor = ruled->rule();
    } else if (of_storage == nullptr) {
      if (auto* storage = RuledStorage::of(tensor)) of_storage = &storage->rule();
    }
  });
  return of_tensor != nullptr ? of_tensor : of_storage;
}

TensorRule* find_kernel_rule(const OperatorCall& call) {
  TensorRule* rule = nullptr;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
    if (rule != nullptr || !tensor.unsafeGetTensorImpl()->key_set().has(kKernelKey)) return;
    if (const auto* ruled = ruled_impl(tensor)) rule = ruled->kernel_rule();
  });
  return rule;
}

}  // namespace lockstep
