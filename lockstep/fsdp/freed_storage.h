// A storage whose memory is there only while it is needed, for good the same StorageImpl: what autograd has saved stays
// valid, and versions do not change. Internal to fsdp.
//
// The storage keeps its OwnedStorage, and through it the owner, alive: the owner must not keep the tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

#include "lockstep/intercept/storage_owner.h"

namespace lockstep::detail {

class FreedStorage {
 public:
  /// Gives `tensor` a storage of its own without memory, of `dtype`, and makes `owner` answer for it. `message` is what
  /// reading its address throws. Sizes stay, strides become contiguous.
  FreedStorage(const at::Tensor& tensor, at::ScalarType dtype, const std::shared_ptr<StorageOwner>& owner,
               std::string message);

  /// Lets the storage point into the memory of `buffer`, a contiguous tensor, at an element, and keeps that alive.
  void fill(const at::Tensor& buffer, int64_t offset);
  void free();
  /// Another dtype or device, without memory. What was saved of the tensor before stays with the memory it had.
  void exchange(at::ScalarType dtype, at::Device device);

  /// Undefined if all handles are gone.
  at::Tensor tensor() const;

 private:
  struct Memory;
  void place(const at::Tensor& tensor, at::ScalarType dtype, at::Device device,
             const std::shared_ptr<StorageOwner>& owner);
  void set(c10::StorageImpl& storage, void* data, std::size_t bytes, const at::Tensor& buffer);

  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;
  std::weak_ptr<OwnedStorage> owned_;
  std::string message_;
};

}  // namespace lockstep::detail
