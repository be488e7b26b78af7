#include "lockstep/state/piece.h"

#include <ATen/ops/empty.h>

#include "lockstep/shard/flat.h"

namespace lockstep::detail {

bool is_elementwise(const c10::IValue& value, int64_t elements) {
  return value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().numel() == elements;
}

StateSource source_of(const OptimizerStateDict& dict, const std::vector<at::Tensor>& parameters) {
  return [&](int64_t index, const ElementRange& elements, bool is_whole) -> std::optional<NamedValues> {
    const auto found = dict.state.find(index);
    if (found == dict.state.end()) return std::nullopt;
    if (is_whole) return found->second;
    const auto& parameter = parameters[index];
    auto values = found->second;
    for (auto& [name, value] : values) {
      if (!value.isTensor() || value.toTensor().sizes() != parameter.sizes()) continue;
      value = flattened_like(value.toTensor(), parameter).narrow(0, elements.begin, elements.size());
    }
    return values;
  };
}

StateSource source_of(const std::vector<StatePiece>& pieces) {
  return [&](int64_t index, const ElementRange& elements, bool is_whole) -> std::optional<NamedValues> {
    for (const auto& piece : pieces) {
      if (piece.index == index && piece.elements == elements && piece.is_whole == is_whole) return piece.values;
    }
    return std::nullopt;
  };
}

void add_piece(OptimizerStateDict& dict, const StatePiece& piece, const at::Tensor& parameter) {
  auto& state = dict.state[piece.index];
  for (const auto& [name, value] : piece.values) {
    if (piece.is_whole || !is_elementwise(value, piece.elements.size())) {
      state.emplace(name, copied_to(value, at::kCPU, /*non_blocking=*/false));
      continue;
    }
    const auto& part = value.toTensor();
    auto found = state.find(name);
    if (found == state.end()) {
      const auto whole = at::empty({parameter.numel()}, part.options().device(at::kCPU));
      found = state.emplace(name, unflattened_like(whole, parameter)).first;
    }
    const auto row = flattened_like(found->second.toTensor(), parameter);
    row.narrow(0, piece.elements.begin, piece.elements.size()).copy_(part);
  }
}

c10::IValue to_ivalue(const std::vector<StatePiece>& pieces) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& piece : pieces) {
    c10::impl::GenericDict values(c10::StringType::get(), c10::AnyType::get());
    // A view would be written with all of the storage it is part of.
    for (const auto& [name, value] : piece.values) {
      values.insert(name, piece.is_whole || !value.isTensor() ? value : c10::IValue(value.toTensor().clone()));
    }
    list.push_back(
        c10::ivalue::Tuple::create({piece.index, piece.elements.begin, piece.elements.end, piece.is_whole, values}));
  }
  return list;
}

std::vector<StatePiece> pieces_from(const c10::IValue& value) {
  std::vector<StatePiece> pieces;
  for (const auto& each : value.toListRef()) {
    const auto fields = each.toTupleRef().elements().vec();
    StatePiece piece{
        .index = fields[0].toInt(), .elements = {fields[1].toInt(), fields[2].toInt()}, .is_whole = fields[3].toBool()};
    for (const auto& item : fields[4].toGenericDict()) piece.values.emplace(item.key().toStringRef(), item.value());
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace lockstep::detail
