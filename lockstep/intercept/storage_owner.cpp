#include "lockstep/intercept/storage_owner.h"

#include <c10/core/StorageImpl.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "lockstep/intercept/key.h"

namespace lockstep {
namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being used again
  std::shared_ptr<StorageOwner> owner;
};

struct Registry {
  // Guarded by mutex: operators of all threads look up.
  std::shared_mutex mutex;
  std::unordered_map<c10::StorageImpl*, Entry> entries;
};

Registry& registry() {
  static auto* instance = new Registry;  // tensors may outlive what is destroyed at exit
  return *instance;
}

}  // namespace

OwnedStorage::OwnedStorage(const at::Tensor& tensor, std::shared_ptr<StorageOwner> owner) {
  TORCH_CHECK(owner, "[lockstep/intercept] OwnedStorage: there is no owner.");
  TORCH_CHECK(tensor.defined() && tensor.has_storage(),
              "[lockstep/intercept] OwnedStorage: the tensor has no storage that could be owned.");
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
  mark_intercepted(tensor);
  const std::unique_lock lock(registry().mutex);
  const auto [entry, is_new] = registry().entries.try_emplace(
      storage.get(), Entry{.storage = c10::weak_intrusive_ptr<c10::StorageImpl>(storage), .owner = std::move(owner)});
  TORCH_CHECK(is_new, "[lockstep/intercept] OwnedStorage: the storage of a tensor of sizes ", tensor.sizes(),
              " has an owner already. Two tensors that share memory need one owner.");
  storage_ = storage.get();
}

OwnedStorage::~OwnedStorage() {
  if (storage_ == nullptr) return;
  std::unordered_map<c10::StorageImpl*, Entry>::node_type mine;  // the owner must not end under the lock
  const std::unique_lock lock(registry().mutex);
  mine = registry().entries.extract(storage_);
}

std::shared_ptr<StorageOwner> storage_owner_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const std::shared_lock lock(registry().mutex);
  const auto found = registry().entries.find(storage);
  return found != registry().entries.end() ? found->second.owner : nullptr;
}

}  // namespace lockstep
