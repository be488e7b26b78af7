#include "lockstep/state/stream.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/objects.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {
namespace {

/// Marks tuples that stand for tensors.
constexpr const char* kMark = "lockstep.tensor";

/// What every rank has.
std::vector<std::vector<StatePiece>> all_descriptions(const std::vector<StatePiece>& own, const GroupPtr& group) {
  std::vector<StatePiece> mine;
  for (const auto& piece : own) mine.push_back(described(piece));
  const auto bytes = torch::jit::pickle_save(to_ivalue(mine));
  std::vector<std::vector<StatePiece>> all;
  for (const auto& each : all_gather_object({bytes.begin(), bytes.end()}, group)) {
    all.push_back(pieces_from(torch::jit::pickle_load({each.begin(), each.end()})));
  }
  return all;
}

/// Calls `visit(begin, size)` for chunks of `total` bytes.
void in_chunks(int64_t total, int64_t max_bytes, const std::function<void(int64_t begin, int64_t size)>& visit) {
  for (int64_t begin = 0; begin < total; begin += max_bytes) visit(begin, std::min(max_bytes, total - begin));
}

}  // namespace

int64_t TensorForm::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t TensorForm::nbytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

at::Tensor TensorForm::empty() const {
  return at::empty_strided(sizes, strides, at::TensorOptions(dtype));
}

StatePiece described(const StatePiece& piece) {
  auto description = piece;
  for (auto& [name, value] : description.values) {
    if (!value.isTensor()) continue;
    const auto& tensor = value.toTensor();
    const auto strides = tensor.is_non_overlapping_and_dense()
                             ? tensor.strides().vec()
                             : at::empty_like(tensor, at::kMeta).contiguous().strides().vec();
    value =
        c10::ivalue::Tuple::create({kMark, static_cast<int64_t>(tensor.scalar_type()), tensor.sizes().vec(), strides});
  }
  return description;
}

std::optional<TensorForm> form_of(const c10::IValue& value) {
  if (!value.isTuple()) return std::nullopt;
  const auto& fields = value.toTupleRef().elements();
  if (fields.size() != 4 || !fields[0].isString() || fields[0].toStringRef() != kMark) return std::nullopt;
  return TensorForm{.dtype = static_cast<at::ScalarType>(fields[1].toInt()),
                    .sizes = fields[2].toIntVector(),
                    .strides = fields[3].toIntVector()};
}

at::Tensor bytes_of_state(const at::Tensor& tensor) {
  const auto memory = tensor.is_non_overlapping_and_dense() ? tensor.detach() : tensor.detach().contiguous();
  return memory.as_strided({memory.numel()}, {1}, memory.storage_offset()).view(at::kByte);
}

at::Tensor place_for(StateByIndex& by_index, const StatePiece& described, const std::string& name,
                     const at::Tensor& parameter) {
  auto& state = by_index[described.index];
  for (const auto& [other, value] : described.values) {
    if (!form_of(value)) state.emplace(other, value);
  }
  if (name.empty()) return {};
  const auto form = *form_of(described.values.at(name));
  const bool is_by_element = !described.is_whole && !form.sizes.empty() && form.numel() == described.elements.size();
  if (!is_by_element) {
    auto found = state.find(name);
    if (found == state.end()) found = state.emplace(name, form.empty()).first;
    return bytes_of_state(found->second.toTensor());
  }
  auto found = state.find(name);
  if (found == state.end()) {
    const auto whole = at::empty({parameter.numel()}, at::TensorOptions(form.dtype));
    found = state.emplace(name, unflattened_like(whole, parameter)).first;
  }
  const auto row = flattened_like(found->second.toTensor(), parameter);
  return bytes_of_state(row.narrow(0, described.elements.begin, described.elements.size()));
}

void stream_pieces(const std::vector<StatePiece>& own, int to, int64_t max_bytes, const GroupPtr& group,
                   c10::Device device, const ChunkSink& sink) {
  const at::NoGradGuard no_grad;
  const auto descriptions = all_descriptions(own, group);
  const bool is_target = group->getRank() == to;
  at::Tensor passing;  // what other ranks send goes through here
  for (int rank = 0; rank < group->getSize(); ++rank) {
    // Nobody else needs what the target has.
    if (rank == to && !is_target) continue;
    const auto& pieces = descriptions[rank];
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      bool has_tensor = false;
      for (const auto& [name, value] : pieces[i].values) {
        const auto form = form_of(value);
        if (!form) continue;
        has_tensor = true;
        const bool is_mine = rank == group->getRank();
        const auto source = is_mine ? bytes_of_state(own[i].values.at(name).toTensor()) : at::Tensor();
        if (is_target && form->nbytes() == 0) sink(pieces[i], name, 0, at::empty({0}, at::kByte));
        in_chunks(form->nbytes(), max_bytes, [&](int64_t begin, int64_t size) {
          if (!is_mine && (!passing.defined() || passing.numel() < size)) {
            passing = at::Tensor();
            passing = at::empty({size}, at::TensorOptions(at::kByte).device(device));
          }
          auto chunk = is_mine ? source.narrow(0, begin, size) : passing.narrow(0, 0, size);
          // A scalar of the state may lie elsewhere than the parameter.
          if (rank != to) chunk = chunk.to(device);
          if (rank != to) broadcast(chunk, rank, group);
          if (is_target) sink(pieces[i], name, begin, chunk);
        });
      }
      if (is_target && !has_tensor) sink(pieces[i], "", 0, {});
    }
  }
}

}  // namespace lockstep::detail
