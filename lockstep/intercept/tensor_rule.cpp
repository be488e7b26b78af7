#include "lockstep/intercept/tensor_rule.h"

#include "lockstep/intercept/key.h"

namespace lockstep {
namespace {

void destroy(void* context) {
  delete static_cast<RuledStorage*>(context);
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

TensorRule* find_rule(const OperatorCall& call) {
  TensorRule* of_tensor = nullptr;
  TensorRule* of_storage = nullptr;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
    if (of_tensor != nullptr || !is_marked_intercepted(tensor)) return;
    if (auto* ruled = dynamic_cast<RuledTensorImpl*>(tensor.unsafeGetTensorImpl())) {
      of_tensor = &ruled->rule();
    } else if (of_storage == nullptr) {
      if (auto* storage = RuledStorage::of(tensor)) of_storage = &storage->rule();
    }
  });
  return of_tensor != nullptr ? of_tensor : of_storage;
}

}  // namespace lockstep
