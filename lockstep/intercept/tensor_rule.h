// Tensors that answer for themselves: an operator that gets one is answered by the tensor's rule instead of by
// libtorch. Two kinds have a rule. A TensorImpl of our own, which may have no storage at all (a tensor that is spread
// over ranks); and a storage whose context we made (a tensor that has no memory yet).
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <string>

#include "lockstep/intercept/operator_call.h"

namespace lockstep {

class TensorRule {
 public:
  virtual ~TensorRule() = default;

  /// Answers by call.replace(), or changes arguments and calls call.proceed(). Operators it calls are intercepted as
  /// the program's are, so tensors with other rules and owned storages work inside of it.
  virtual void run(OperatorCall& call) = 0;
};

/// A tensor with rules of its own kind. Derived classes give the base class a key set with kInterceptKey, kKernelKey or
/// both: the keys say which rules are asked.
class RuledTensorImpl : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  /// Asked above autograd, which then records what the rule calls. Null: this tensor has none there.
  virtual TensorRule* rule() const { return nullptr; }
  /// Asked below autograd, which has recorded the operator on this very tensor. Null: none there.
  virtual TensorRule* kernel_rule() const { return nullptr; }
  /// The tensor that has its memory: whoever owns that storage is told of operators on this one. Null: none has.
  virtual const at::Tensor* memory() const { return nullptr; }
};

/// RuledTensorImpl::memory() of `tensor`; of any other tensor itself.
const at::Tensor& memory_of(const at::Tensor& tensor);

/// What a storage with a rule has for a context. Owned by the storage.
class RuledStorage {
 public:
  virtual ~RuledStorage() = default;
  virtual TensorRule& rule() = 0;

  /// Replaces the storage's memory by `ruled`. Reading its address throws `message` from then on.
  static void attach(c10::StorageImpl& storage, std::unique_ptr<RuledStorage> ruled, const std::string& message);
  /// Null if `tensor` has no such storage. The storage owns the result.
  static RuledStorage* of(const at::Tensor& tensor);
};

/// The rule that answers for the call above autograd: that of the first argument with a RuledTensorImpl, else of the
/// first with a RuledStorage, else null.
TensorRule* find_rule(const OperatorCall& call);

/// The same below autograd, where storages have none.
TensorRule* find_kernel_rule(const OperatorCall& call);

}  // namespace lockstep
