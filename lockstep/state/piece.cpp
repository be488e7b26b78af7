#include "lockstep/state/piece.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <set>
#include <utility>

#include "lockstep/comm/values.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {

StatePiece weight_piece(int64_t index, std::string name, const at::Tensor& weight) {
  return {.index = index,
          .name = std::move(name),
          .elements = {0, weight.numel()},
          .is_whole = true,
          .values = {{kWeight, weight.detach()}}};
}

StatePiece weight_piece(int64_t index, std::string name, const at::Tensor& row, const ElementRange& elements) {
  TORCH_CHECK(row.dim() == 1 && row.numel() == elements.size(), "[lockstep/state] elements ", elements.begin, " to ",
              elements.end, " of '", name, "' were given as a tensor of sizes ", row.sizes());
  return {.index = index,
          .name = std::move(name),
          .elements = elements,
          .is_whole = false,
          .values = {{kWeight, row.detach()}}};
}

bool is_elementwise(const c10::IValue& value, int64_t elements) {
  return value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().numel() == elements;
}

StateSource source_of(const StateByIndex& state, const std::vector<at::Tensor>& parameters) {
  return [&](int64_t index, const ElementRange& elements, bool is_whole) -> std::optional<NamedValues> {
    const auto found = state.find(index);
    if (found == state.end()) return std::nullopt;
    auto values = with_dense_tensors(found->second);
    if (is_whole) return values;
    const auto& parameter = parameters[index];
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

StateSource with_indices(StateSource source, std::vector<int64_t> indices) {
  return [source = std::move(source), indices = std::move(indices)](int64_t index, const ElementRange& elements,
                                                                    bool is_whole) {
    return source(indices.at(index), elements, is_whole);
  };
}

std::vector<int64_t> indices_by_name(const std::vector<std::string>& wanted, const std::vector<std::string>& saved,
                                     const std::string& who) {
  std::map<std::string, int64_t> position_of;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (!saved[i].empty()) position_of.emplace(saved[i], static_cast<int64_t>(i));
  }
  std::vector<int64_t> indices;
  std::set<int64_t> taken;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto found = position_of.find(wanted[i]);
    const bool is_known = found != position_of.end();
    TORCH_CHECK(is_known || wanted[i].empty() || i >= saved.size() || saved[i].empty(), who, ": parameter '", wanted[i],
                "' is not among those that were saved; '", saved[i], "' is. Is it the state of another model?");
    indices.push_back(is_known ? found->second : static_cast<int64_t>(i));
    TORCH_CHECK(taken.insert(indices.back()).second, who, ": parameter ", i, ", which has ",
                wanted[i].empty() ? "no name" : "the name '" + wanted[i] + "'",
                ", would get the state of another one. Name all parameters, or none.");
  }
  return indices;
}

void add_piece(StateByIndex& by_index, const StatePiece& piece, const at::Tensor& parameter) {
  auto& state = by_index[piece.index];
  for (const auto& [name, value] : piece.values) {
    if (piece.is_whole || !is_elementwise(value, piece.elements.size())) {
      state.emplace(name, copied_to(value, at::kCPU, /*non_blocking=*/false));
      continue;
    }
    const auto& own = value.toTensor();
    auto found = state.find(name);
    if (found == state.end()) {
      // What no piece brings, because the rank that had it is gone, begins anew.
      const auto whole = at::zeros({parameter.numel()}, own.options().device(at::kCPU));
      found = state.emplace(name, unflattened_like(whole, parameter)).first;
    }
    const auto row = flattened_like(found->second.toTensor(), parameter);
    row.narrow(0, piece.elements.begin, piece.elements.size()).copy_(own);
  }
}

namespace {

/// A view would be written with all of the storage it is part of.
c10::IValue to_send(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const auto& tensor = value.toTensor();
  const bool is_view = tensor.is_cpu() && tensor.storage().nbytes() != tensor.nbytes();
  return is_view ? tensor.clone() : tensor.cpu();
}

}  // namespace

c10::IValue to_ivalue(const std::vector<StatePiece>& pieces) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& piece : pieces) {
    c10::impl::GenericDict values(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [name, value] : piece.values) values.insert(name, to_send(value));
    list.push_back(c10::ivalue::Tuple::create(
        {piece.index, piece.elements.begin, piece.elements.end, piece.is_whole, values, piece.name}));
  }
  return list;
}

std::vector<StatePiece> pieces_from(const c10::IValue& value) {
  std::vector<StatePiece> pieces;
  for (const auto& each : value.toListRef()) {
    const auto fields = each.toTupleRef().elements().vec();
    StatePiece piece{
        .index = fields[0].toInt(), .elements = {fields[1].toInt(), fields[2].toInt()}, .is_whole = fields[3].toBool()};
    if (fields.size() > 5) piece.name = fields[5].toStringRef();
    for (const auto& item : fields[4].toGenericDict()) piece.values.emplace(item.key().toStringRef(), item.value());
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace lockstep::detail
