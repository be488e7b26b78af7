#include "lockstep/intercept/shape_run.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <map>

#include "lockstep/intercept/operator_scope.h"
#include "lockstep/intercept/random_stream.h"
#include "lockstep/intercept/tensor_access.h"
#include "lockstep/intercept/tensor_rule.h"

namespace lockstep::detail {
namespace {

at::Tensor with_geometry_of(const at::Tensor& tensor, at::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(device));
}

/// `value` with every tensor in it replaced.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(replace(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

torch::jit::Stack arguments_on(const OperatorCall& call, at::Device device, bool moves) {
  bool has_tensor = false;
  for_each_tensor(call, [&](const at::Tensor&, std::size_t) { has_tensor = true; });
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    const auto& value = call.argument(i);
    const auto& name = call.schema().arguments()[i].name();
    if (value.isDevice() || (!has_tensor && name == "device")) {
      stack.emplace_back(device);
    } else if (name == "generator" || name == "pin_memory") {
      stack.emplace_back();
    } else if (name == "copy" && moves && value.isBool()) {
      stack.emplace_back(true);
    } else {
      stack.push_back(value);
    }
  }
  return stack;
}

/// Storages whose address must not be asked for, replaced by ones of which it may while kernels run: libtorch asks to
/// see whether tensors overlap. The tensors stay who they are.
class QuietStorages {
 public:
  explicit QuietStorages(const OperatorCall& call) {
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
      if (RuledStorage::of(tensor) == nullptr) return;
      auto& storage = TensorAccess::storage_of(*tensor.unsafeGetTensorImpl());
      auto& quiet = quiet_[storage.unsafeGetStorageImpl()];
      if (!quiet) quiet = quiet_like(storage);
      loud_.emplace(quiet.unsafeGetStorageImpl(), storage);
      replaced_.push_back(tensor);
      storage = quiet;
    });
  }
  ~QuietStorages() {
    for (const auto& tensor : replaced_) restore(tensor);
    for (auto& [quiet, storage] : loud_) storage.set_nbytes(quiet->nbytes());
  }
  QuietStorages(const QuietStorages&) = delete;
  QuietStorages& operator=(const QuietStorages&) = delete;

  /// For results that lie in one of them.
  void restore(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return;
    auto& storage = TensorAccess::storage_of(*tensor.unsafeGetTensorImpl());
    const auto found = loud_.find(storage.unsafeGetStorageImpl());
    if (found != loud_.end()) storage = found->second;
  }

 private:
  static c10::Storage quiet_like(const c10::Storage& storage) {
    return at::empty({static_cast<int64_t>(storage.nbytes())}, at::TensorOptions(at::kByte).device(at::kMeta))
        .storage();
  }

  std::map<c10::StorageImpl*, c10::Storage> quiet_;
  std::map<c10::StorageImpl*, c10::Storage> loud_;
  std::vector<at::Tensor> replaced_;
};

torch::jit::Stack run_on_meta(const OperatorCall& call, bool moves) {
  const QuietStorages quiet(call);
  auto stack = arguments_on(call, at::kMeta, moves);
  for (auto& value : stack) {
    value = with_tensors(value, [](const at::Tensor& tensor) {
      return !tensor.defined() || tensor.is_meta() ? tensor : with_geometry_of(tensor, at::kMeta);
    });
  }
  call.op().callBoxed(&stack);
  for (const auto& value : stack) {
    static_cast<void>(with_tensors(value, [&](const at::Tensor& tensor) {
      quiet.restore(tensor);
      return tensor;
    }));
  }
  return stack;
}

/// For operators that libtorch has no meta kernel of: run on zeros, of which only the geometry is kept.
torch::jit::Stack run_on_zeros(const OperatorCall& call, bool moves) {
  auto stack = arguments_on(call, at::kCPU, moves);
  std::map<c10::TensorImpl*, at::Tensor> originals;
  std::vector<at::Tensor> zeros;  // keeps the keys of `originals` alive
  for (auto& value : stack) {
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto zero = with_geometry_of(tensor, at::kCPU).zero_();
      originals[zero.unsafeGetTensorImpl()] = tensor;
      zeros.push_back(zero);
      return zero;
    });
  }
  const auto& generator = at::globalContext().defaultGenerator(at::kCPU);
  const auto state = state_of(generator);
  call.op().callBoxed(&stack);
  set_state(generator, state);
  for (auto& value : stack) {
    value = with_tensors(value, [&](const at::Tensor& tensor) {
      const auto found = originals.find(tensor.unsafeGetTensorImpl());
      return found != originals.end() ? found->second : with_geometry_of(tensor, at::kMeta);
    });
  }
  return stack;
}

}  // namespace

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

torch::jit::Stack run_for_shapes(const OperatorCall& call, bool moves, const char* who, const char* remedy) {
  const NotIntercepted not_intercepted;
  const auto& op = call.op();
  TORCH_CHECK(
      !op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape), who, ": ", call.name(),
      " needs the values of a tensor that has no memory yet (item(), nonzero(), comparing, indexing by a mask). ",
      remedy);
  try {
    return run_on_meta(call, moves);
  } catch (const c10::NotImplementedError&) {
    return run_on_zeros(call, moves);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, error.what_without_backtrace(), "\n", who, ": while running ", call.name(),
                " on tensors that have no memory. If it is right with memory, do that part outside of the scope.");
  }
}

}  // namespace lockstep::detail
