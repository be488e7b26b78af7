#include "lockstep/fsdp/freed_storage.h"

#include <c10/util/typeid.h>

#include <utility>

namespace lockstep::detail {
namespace {

/// Releases before 2.13 cannot take the message back: there a freed storage is an empty one.
template <class Storage>
constexpr bool kHasMessages = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

template <class Storage>
void set_message(Storage& storage, const std::string& message) {
  if constexpr (kHasMessages<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

template <class Storage>
void clear_message(Storage& storage) {
  if constexpr (kHasMessages<Storage>) storage.clear_data_ptr_access_error_msg_();
}

at::Tensor without_memory(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false);
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

/// What the storage's pointer holds on to.
struct FreedStorage::Memory {
  std::shared_ptr<OwnedStorage> owned;
  at::Tensor buffer;

  static void destroy(void* context) { delete static_cast<Memory*>(context); }
};

FreedStorage::FreedStorage(const at::Tensor& tensor, at::ScalarType dtype, const std::shared_ptr<StorageOwner>& owner,
                           std::string message)
    : tensor_(tensor.getIntrusivePtr()), message_(std::move(message)) {
  tensor.set_data(without_memory(tensor.sizes(), dtype, tensor.device()));
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  const auto owned = std::make_shared<OwnedStorage>(tensor, owner);
  owned_ = owned;
  set(storage, nullptr, {});
}

void FreedStorage::set(c10::StorageImpl& storage, void* data, const at::Tensor& buffer) {
  auto memory = std::make_unique<Memory>(Memory{owned_.lock(), buffer});
  clear_message(storage);
  storage.set_nbytes(buffer.defined() ? buffer.nbytes() : 0);
  storage.set_data_ptr_noswap(c10::DataPtr(data, memory.release(), &Memory::destroy, storage.device()));
  if (data == nullptr) set_message(storage, message_);
}

at::Tensor FreedStorage::tensor() const {
  auto alive = tensor_.lock();
  return alive ? at::Tensor(std::move(alive)) : at::Tensor();
}

void FreedStorage::fill(const at::Tensor& buffer) {
  const auto alive = tensor();
  if (!alive.defined()) return;
  set(*alive.storage().unsafeGetStorageImpl(), buffer.mutable_data_ptr(), buffer);
}

void FreedStorage::free() {
  const auto alive = tensor();
  if (!alive.defined()) return;
  set(*alive.storage().unsafeGetStorageImpl(), nullptr, {});
}

}  // namespace lockstep::detail
