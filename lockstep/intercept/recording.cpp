#include "lockstep/intercept/recording.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/intercept/replay.h"
#include "lockstep/intercept/shape_run.h"
#include "lockstep/intercept/tensor_access.h"

namespace lockstep::detail {
namespace {

constexpr auto kNoAddress =
    "[lockstep/intercept] this tensor has no memory yet: it was made inside of deferred_init, so its values cannot be "
    "read or written by address. Call materialize_module() first; tensors made from values of the program "
    "(torch::tensor(vector)) need torch::from_blob(...).clone() inside of the scope, or a place outside of it.";

constexpr auto kInsideOfScope = "Compute it from numbers, or build that part outside of the scope.";
constexpr auto kAfterScope = "Call materialize_module() first.";

/// Of what an operator returned.
template <class Visit>
void for_each_tensor_in(const torch::jit::Stack& results, const Visit& visit) {
  for (const auto& result : results) {
    if (result.isTensor()) visit(result.toTensor());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& tensor : result.toTensorList()) visit(tensor);
  }
}

/// The same values elsewhere: Module::to() makes them with gradients on.
bool is_copy(const OperatorCall& call) {
  const auto& name = call.op().operator_name().name;
  return name == "aten::to" || name == "aten::_to_copy" || name == "aten::clone" || name == "aten::contiguous";
}

/// The device the call names for its results; meta, which tensors of the build show, is no such name.
std::optional<at::Device> named_device(const OperatorCall& call) {
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    const auto& value = call.argument(i);
    if (value.isDevice() && !value.toDevice().is_meta()) return value.toDevice();
  }
  return std::nullopt;
}

at::Generator generator_of(const OperatorCall& call, at::Device device) {
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    if (call.argument(i).isGenerator()) return call.argument(i).toGenerator();
  }
  return at::globalContext().defaultGenerator(device);
}

void check_can_have_memory(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.grad_fn(), "[lockstep/intercept] a tensor of sizes ", tensor.sizes(), " was computed inside of ",
              "deferred_init with gradients on, and autograd has saved tensors without memory for it. Compute it under "
              "torch::NoGradGuard.");
  TORCH_CHECK(!torch::autograd::impl::try_get_grad_accumulator(tensor), "[lockstep/intercept] a tensor of sizes ",
              tensor.sizes(),
              " has a gradient hook, or was used with gradients on, before it had memory. Materialise "
              "modules before they are wrapped.");
}

}  // namespace

TensorPlace place_of(const at::Tensor& tensor, std::size_t storage) {
  return {.storage = storage,
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .is_conj = tensor.is_conj(),
          .is_neg = tensor.is_neg()};
}

void Recording::run(OperatorCall& call) {
  const auto self = shared_from_this();  // its last storage may end here
  const NotIntercepted not_intercepted;
  {
    const std::lock_guard lock(mutex_);
    bool lacks_memory = false;
    for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t) {
      if (DeferredStorage::of(tensor) != nullptr && !adopt(tensor)) lacks_memory = true;
    });
    if (lacks_memory) return record(call);
  }
  call.proceed();
}

void Recording::run_factory(OperatorCall& call) {
  const std::lock_guard lock(mutex_);
  record(call);
}

void Recording::leave() {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  streams_.leave();
}

void Recording::storage_died(std::size_t storage) {
  const std::lock_guard lock(mutex_);
  storages_[storage].is_alive = false;
}

void Recording::record(OperatorCall& call) {
  TORCH_CHECK(is_open_ || !is_random(call.op()), "[lockstep/intercept] ", call.name(),
              " draws random numbers for a tensor that has no memory yet, after deferred_init has ended: which numbers "
              "an ordinary build would draw here is not known. Call it inside of the scope, or after "
              "materialize_module().");
  auto recorded = describe(call);
  const auto named = named_device(call);
  const bool moves = named && !recorded.read.empty() && *named != storages_[recorded.read.front()].device;
  auto results =
      run_for_shapes(call, moves, "[lockstep/intercept] deferred_init", is_open_ ? kInsideOfScope : kAfterScope);
  if (!is_open_) check_is_edit(call, recorded, results);
  keep(call, std::move(recorded), results);
  call.replace(std::move(results));
}

void Recording::check_is_edit(const OperatorCall& call, const RecordedOperator& recorded,
                              const torch::jit::Stack& results) const {
  bool meets_memory = false;
  for (const auto& argument : recorded.arguments) {
    for (const auto& operand : argument.operands) {
      meets_memory = meets_memory || (operand.real.defined() && operand.real.dim() > 0);
    }
  }
  bool makes_value = false;
  bool has_gradient = false;
  for_each_tensor_in(results, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || DeferredStorage::of(tensor) != nullptr) return;
    makes_value = true;
    has_gradient = has_gradient || (tensor.requires_grad() && !is_copy(call));
  });
  TORCH_CHECK(!makes_value || (!meets_memory && !has_gradient), "[lockstep/intercept] ", call.name(),
              " computes with a tensor that has no memory yet: it was made inside of deferred_init, and nothing it "
              "is used for would have values. ",
              kAfterScope);
}

RecordedOperand Recording::operand_of(const OperatorCall& call, const at::Tensor& tensor, bool is_written) const {
  if (!tensor.defined()) return {};
  if (auto* storage = DeferredStorage::of(tensor)) {
    TORCH_CHECK(
        storage->recording().get() == this, "[lockstep/intercept] ", call.name(),
        " gets tensors of two deferred builds. Build both inside of one deferred_init, or materialise one first.");
    return {.deferred = place_of(tensor, storage->index()), .real = {}};
  }
  TORCH_CHECK(!is_written, "[lockstep/intercept] deferred_init: ", call.name(), " would write into a tensor of sizes ",
              tensor.sizes(),
              ", which has memory, what it computes from one that has none yet. Make the written "
              "tensor inside of the scope too.");
  return {.deferred = std::nullopt, .real = tensor, .real_version = tensor.is_inference() ? 0 : tensor._version()};
}

RecordedOperator Recording::describe(const OperatorCall& call) const {
  using Kind = RecordedArgument::Kind;
  RecordedOperator recorded{
      .op = call.op(), .arguments = {}, .read = {}, .made = {}, .stream = std::nullopt, .random_state = {}};
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    const auto& value = call.argument(i);
    const auto* alias = call.schema().arguments()[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    RecordedArgument argument;
    if (value.isTensor()) {
      argument.kind = Kind::kTensor;
      argument.operands.push_back(operand_of(call, value.toTensor(), is_written));
    } else if (value.isTensorList()) {
      argument.kind = Kind::kTensorList;
      for (const at::Tensor& tensor : value.toTensorList()) {
        argument.operands.push_back(operand_of(call, tensor, is_written));
      }
    } else if (value.isOptionalTensorList()) {
      argument.kind = Kind::kOptionalTensorList;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        argument.operands.push_back(operand_of(call, tensor.value_or(at::Tensor()), is_written));
      }
    } else {
      argument.plain = value.deepcopy();
    }
    for (const auto& operand : argument.operands) {
      if (operand.deferred) recorded.read.push_back(operand.deferred->storage);
    }
    recorded.arguments.push_back(std::move(argument));
  }
  return recorded;
}

void Recording::keep(const OperatorCall& call, RecordedOperator recorded, torch::jit::Stack& results) {
  const auto position = operators_.size();
  const auto device =
      named_device(call).value_or(recorded.read.empty() ? device_ : storages_[recorded.read.front()].device);
  std::vector<std::size_t> written;
  for (std::size_t i = 0; i < recorded.arguments.size(); ++i) {
    const auto* alias = call.schema().arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (const auto& operand : recorded.arguments[i].operands) {
      if (operand.deferred) written.push_back(operand.deferred->storage);
    }
  }
  // Before anything is kept: it may refuse.
  if (is_random(call.op())) recorded.stream = streams_.add_operator(generator_of(call, device), position);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor()) {
      keep_result(results[i].toTensor(), i, 0, recorded, device);
    } else if (results[i].isTensorList()) {
      const auto list = results[i].toTensorVector();
      for (std::size_t item = 0; item < list.size(); ++item) keep_result(list[item], i, item, recorded, device);
    }
  }
  for (const auto storage : written) storages_[storage].writers.push_back(position);
  // A view, or a question about the geometry: it gives no tensor a value.
  if (written.empty() && recorded.made.empty() && !recorded.stream) return;
  operators_.push_back(std::move(recorded));
}

void Recording::keep_result(const at::Tensor& tensor, std::size_t result, std::size_t item, RecordedOperator& recorded,
                            at::Device device) {
  if (!tensor.defined()) return;
  if (DeferredStorage::of(tensor) == nullptr) {
    TORCH_CHECK(tensor.has_storage() && tensor.layout() == at::kStrided,
                "[lockstep/intercept] deferred_init: ", toString(recorded.op.operator_name()),
                " makes a tensor of layout ", tensor.layout(),
                ", which cannot be deferred. Build it outside of the scope.");
    const auto index = storages_.size();
    storages_.push_back({.device = device, .writers = {operators_.size()}, .memory = std::nullopt});
    RuledStorage::attach(*tensor.storage().unsafeGetStorageImpl(),
                         std::make_unique<DeferredStorage>(shared_from_this(), index), kNoAddress);
    recorded.made.push_back({.result = result, .item = item, .place = place_of(tensor, index)});
  }
  mark_intercepted(tensor);
}

bool Recording::adopt(const at::Tensor& tensor) {
  const auto index = DeferredStorage::of(tensor)->index();
  const auto& storage = storages_[index];
  const auto memory = storage.memory ? storage.memory->lock() : c10::intrusive_ptr<c10::StorageImpl>();
  if (!memory) return false;
  check_can_have_memory(tensor);
  const c10::InferenceMode mode(tensor.is_inference());
  const auto handle = tensor_at(c10::Storage(memory), place_of(tensor, index));
  TensorAccess::adopt(*tensor.unsafeGetTensorImpl(), *handle.unsafeGetTensorImpl());
  return true;
}

void Recording::materialize(const std::vector<at::Tensor>& tensors) {
  const auto self = shared_from_this();
  const NotIntercepted not_intercepted;
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_open_, "[lockstep/intercept] materialize: the deferred_init scope of these tensors is still open.");
  for (const auto& tensor : tensors) check_can_have_memory(tensor);
  std::vector<std::size_t> wanted;
  for (const auto& tensor : tensors) {
    const auto index = DeferredStorage::of(tensor)->index();
    const auto& memory = storages_[index].memory;
    if (!memory || memory->expired()) wanted.push_back(index);
  }
  Replay replay(*this);
  replay.run_for(wanted);
  for (const auto& tensor : tensors) {
    if (DeferredStorage::of(tensor) != nullptr) TORCH_INTERNAL_ASSERT(adopt(tensor));
  }
  const bool is_done = std::all_of(storages_.begin(), storages_.end(),
                                   [](const RecordedStorage& s) { return !s.is_alive || s.memory.has_value(); });
  // An ordinary build draws also for tensors it throws away, and then leaves its generators where they stand.
  if (is_done) Replay(*this).run_all_draws();
  for (std::size_t i = 0; i < streams_.size(); ++i) streams_.settle(streams_[i]);
}

}  // namespace lockstep::detail
