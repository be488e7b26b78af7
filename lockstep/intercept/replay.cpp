#include "lockstep/intercept/replay.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <mutex>

namespace lockstep::detail {
namespace {

constexpr auto kAll = std::numeric_limits<std::size_t>::max();

/// The number of elements a storage must have for it.
int64_t span_of(const TensorPlace& place) {
  int64_t last = place.offset;
  for (std::size_t dim = 0; dim < place.sizes.size(); ++dim) {
    if (place.sizes[dim] == 0) return place.offset;
    last += (place.sizes[dim] - 1) * place.strides[dim];
  }
  return last + 1;
}

bool lies_at(const at::Tensor& tensor, const TensorPlace& place) {
  return tensor.sizes() == place.sizes && tensor.strides() == place.strides && tensor.scalar_type() == place.dtype &&
         tensor.storage_offset() == place.offset && tensor.is_conj() == place.is_conj &&
         tensor.is_neg() == place.is_neg;
}

// The default generator, while an operator that takes no other runs from a state we gave it.
std::mutex borrowed_generator;

}  // namespace

at::Tensor tensor_at(const c10::Storage& storage, const TensorPlace& place) {
  auto tensor = at::empty({0}, at::TensorOptions(place.dtype).device(storage.device()));
  tensor.set_(storage, place.offset, place.sizes, place.strides);
  if (place.is_conj) tensor = at::_conj(tensor);
  if (place.is_neg) tensor = at::_neg_view(tensor);
  return tensor;
}

void Replay::run_for(const std::vector<std::size_t>& storages) {
  wanted_.insert(storages.begin(), storages.end());
  for (const auto storage : wanted_) need_storage(storage, kAll);
  run_planned();
  for (const auto storage : wanted_) {
    recording_.storages_[storage].memory.emplace(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory_.at(storage).unsafeGetStorageImpl()));
  }
}

void Replay::run_all_draws() {
  for (std::size_t i = 0; i < recording_.streams_.size(); ++i) need_earlier_draws(i, kAll);
  run_planned();
}

void Replay::need_storage(std::size_t storage, std::size_t before) {
  auto& planned_before = needed_before_[storage];
  const auto from = planned_before;
  if (before <= from) return;
  planned_before = before;
  for (const auto position : recording_.storages_[storage].writers) {
    if (position >= from && position < before) need_operator(position);
  }
}

void Replay::need_operator(std::size_t position) {
  if (!planned_.insert(position).second) return;
  const auto& recorded = recording_.operators_[position];
  for (const auto storage : recorded.read) need_storage(storage, position);
  if (recorded.stream && !recorded.random_state.defined()) need_earlier_draws(*recorded.stream, position);
}

void Replay::need_earlier_draws(std::size_t stream, std::size_t position) {
  const auto& drawing = recording_.streams_[stream];
  auto& count = planned_draws_.try_emplace(stream, drawing.run_count).first->second;
  while (count < drawing.operators.size() && drawing.operators[count] <= position) {
    need_operator(drawing.operators[count++]);
  }
}

void Replay::note_last_uses() {
  std::map<std::size_t, std::size_t> last_use;
  for (const auto position : planned_) {
    const auto& recorded = recording_.operators_[position];
    for (const auto storage : recorded.read) last_use[storage] = position;
    for (const auto& made : recorded.made) last_use[made.place.storage] = position;
  }
  for (const auto& [storage, position] : last_use) {
    if (!wanted_.contains(storage)) last_used_at_[position].push_back(storage);
  }
}

void Replay::run_planned() {
  const c10::InferenceMode no_inference_mode(false);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  note_last_uses();
  for (const auto position : planned_) {
    run(position);
    for (const auto storage : last_used_at_[position]) memory_.erase(storage);
  }
  planned_.clear();
}

void Replay::run(std::size_t position) {
  auto& recorded = recording_.operators_[position];
  auto stack = arguments_of(recorded);
  if (recorded.stream) {
    draw(recorded, stack);
  } else {
    recorded.op.callBoxed(&stack);
  }
  take_results(recorded, stack);
}

void Replay::draw(RecordedOperator& recorded, torch::jit::Stack& stack) {
  auto& stream = recording_.streams_[*recorded.stream];
  const bool is_first = !recorded.random_state.defined();
  const auto before = is_first ? stream.next_state : recorded.random_state;
  at::Tensor after;
  const auto& arguments = recorded.op.schema().arguments();
  const auto argument =
      std::find_if(arguments.begin(), arguments.end(), [](const auto& a) { return a.name() == "generator"; });
  if (argument != arguments.end()) {
    const auto generator = stream.generator.clone();
    set_state(generator, before);
    stack[static_cast<std::size_t>(argument - arguments.begin())] = generator;
    recorded.op.callBoxed(&stack);
    after = state_of(generator);
  } else {
    const std::lock_guard lock(borrowed_generator);
    const auto lent = state_of(stream.generator);
    set_state(stream.generator, before);
    try {
      recorded.op.callBoxed(&stack);
    } catch (...) {
      set_state(stream.generator, lent);
      throw;
    }
    after = state_of(stream.generator);
    set_state(stream.generator, lent);
  }
  if (!is_first) return;
  recorded.random_state = before;
  stream.next_state = after;
  ++stream.run_count;
}

torch::jit::Stack Replay::arguments_of(const RecordedOperator& recorded) const {
  using Kind = RecordedArgument::Kind;
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < recorded.arguments.size(); ++i) {
    const auto& argument = recorded.arguments[i];
    if (argument.kind == Kind::kTensor) {
      stack.emplace_back(tensor_of(recorded, argument.operands.front()));
    } else if (argument.kind == Kind::kTensorList) {
      std::vector<at::Tensor> tensors;
      for (const auto& operand : argument.operands) tensors.push_back(tensor_of(recorded, operand));
      stack.emplace_back(std::move(tensors));
    } else if (argument.kind == Kind::kOptionalTensorList) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& operand : argument.operands) {
        auto tensor = tensor_of(recorded, operand);
        tensors.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
      }
      stack.emplace_back(std::move(tensors));
    } else if (argument.plain.isDevice() && argument.plain.toDevice().is_meta()) {
      stack.emplace_back(recording_.device_);  // the program took it from a tensor without memory
    } else if (argument.plain.isNone() && recorded.read.empty() && !recorded.made.empty() &&
               recorded.op.schema().arguments()[i].name() == "dtype") {
      stack.emplace_back(recorded.made.front().place.dtype);  // the default of then may not be that of now
    } else {
      stack.push_back(argument.plain.deepcopy());
    }
  }
  return stack;
}

at::Tensor Replay::tensor_of(const RecordedOperator& recorded, const RecordedOperand& operand) const {
  if (operand.deferred) return tensor_at(memory_.at(operand.deferred->storage), *operand.deferred);
  if (operand.real.defined()) {
    TORCH_CHECK(operand.real.is_inference() || operand.real._version() == operand.real_version,
                "[lockstep/intercept] materialize: a tensor of sizes ", operand.real.sizes(), " which ",
                toString(recorded.op.operator_name()),
                " took a value from inside of deferred_init has been changed since. Give the build a clone of it.");
  }
  return operand.real;
}

void Replay::take_results(const RecordedOperator& recorded, const torch::jit::Stack& results) {
  for (const auto& made : recorded.made) {
    const auto& value = results[made.result];
    auto tensor = value.isTensorList() ? value.toTensorVector()[made.item] : value.toTensor();
    const auto is_its_memory = [&](const auto& known) { return tensor.storage().is_alias_of(known.second); };
    if (!lies_at(tensor, made.place) || std::any_of(memory_.begin(), memory_.end(), is_its_memory)) {
      const auto flat = at::empty({span_of(made.place)}, tensor.options().dtype(made.place.dtype));
      const auto copy = tensor_at(flat.storage(), made.place);
      copy.copy_(tensor);
      tensor = copy;
    }
    memory_[made.place.storage] = tensor.storage();
  }
}

}  // namespace lockstep::detail
