#include "lockstep/fsdp/freed_storage.h"

#include <c10/util/typeid.h>

#include <cstddef>
#include <utility>

#include "lockstep/intercept/address_message.h"

namespace lockstep::detail {
namespace {

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
  place(tensor, dtype, tensor.device(), owner);
}

void FreedStorage::place(const at::Tensor& tensor, at::ScalarType dtype, at::Device device,
                         const std::shared_ptr<StorageOwner>& owner) {
  tensor.set_data(without_memory(tensor.sizes(), dtype, device));
  const auto owned = std::make_shared<OwnedStorage>(tensor, owner);
  owned_ = owned;
  set(*tensor.storage().unsafeGetStorageImpl(), nullptr, 0, {});
}

void FreedStorage::exchange(at::ScalarType dtype, at::Device device) {
  const auto alive = tensor();
  if (!alive.defined() || (alive.scalar_type() == dtype && alive.device() == device)) return;
  place(alive, dtype, device, storage_owner_of(alive));
}

void FreedStorage::set(c10::StorageImpl& storage, void* data, std::size_t bytes, const at::Tensor& buffer) {
  auto memory = std::make_unique<Memory>(Memory{owned_.lock(), buffer});
  clear_address_message(storage);
  storage.set_nbytes(bytes);
  storage.set_data_ptr_noswap(c10::DataPtr(data, memory.release(), &Memory::destroy, storage.device()));
  if (!buffer.defined()) set_address_message(storage, message_);
}

at::Tensor FreedStorage::tensor() const {
  auto alive = tensor_.lock();
  return alive ? at::Tensor(std::move(alive)) : at::Tensor();
}

void FreedStorage::fill(const at::Tensor& buffer, int64_t offset) {
  const auto alive = tensor();
  if (!alive.defined()) return;
  auto* data = static_cast<std::byte*>(buffer.mutable_data_ptr()) + offset * buffer.itemsize();
  set(*alive.storage().unsafeGetStorageImpl(), data, alive.nbytes(), buffer);
}

void FreedStorage::free() {
  const auto alive = tensor();
  if (!alive.defined()) return;
  set(*alive.storage().unsafeGetStorageImpl(), nullptr, 0, {});
}

}  // namespace lockstep::detail
