// Owners of storages: told before and after every operator that touches a tensor on one of their storages, views
// included. For memory that is there only while it is needed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <utility>

namespace lockstep {

class OperatorCall;

/// A tensor on an owned storage among the arguments of a call.
struct TouchedTensor {
  at::Tensor tensor;
  bool is_written = false;  // as the operator's schema says
};

/// May be called by several threads at once: the program's, autograd's, other ranks'. What it calls itself is not
/// intercepted.
class StorageOwner {
 public:
  virtual ~StorageOwner() = default;
  /// Before the operator runs; may change its other arguments. If it throws, the operator does not run and throws that.
  virtual void before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) = 0;
  /// The operator has run: may change its results. The owner told last is asked first. If it throws, so does the
  /// operator.
  virtual void on_result(OperatorCall& call) { static_cast<void>(call); }
  /// After it ran or threw; once for every before_operator() that returned, the last first.
  virtual void after_operator(const OperatorCall& call) noexcept { static_cast<void>(call); }
};

/// Makes `owner` answer for the storage of `tensor` while it lives, and marks the tensor. One owner per storage. Other
/// tensors that share the storage already must be marked as well (mark_intercepted). Local and thread-safe.
class OwnedStorage {
 public:
  OwnedStorage(const at::Tensor& tensor, std::shared_ptr<StorageOwner> owner);
  ~OwnedStorage();
  OwnedStorage(OwnedStorage&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  OwnedStorage& operator=(OwnedStorage&&) = delete;

 private:
  c10::StorageImpl* storage_;
};

/// The owner of `tensor`'s storage; null if it has none.
std::shared_ptr<StorageOwner> storage_owner_of(const at::Tensor& tensor);

}  // namespace lockstep
