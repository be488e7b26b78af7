#include "lockstep/comm/shm/call_spans.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/comm/plain_memory.h"

namespace lockstep::detail {
namespace {

using Spans = CallSpans::Spans;

shm::Span span_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

/// Piece `index` of `count` equal ones of a contiguous tensor.
shm::Span piece_of(const at::Tensor& tensor, int index, int count) {
  const auto bytes = tensor.nbytes() / static_cast<std::size_t>(count);
  return {static_cast<std::byte*>(tensor.data_ptr()) + static_cast<std::size_t>(index) * bytes, bytes};
}

void add_splits(Spans& spans, const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks) {
  const auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const auto row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(rows);
  auto* at = static_cast<std::byte*>(tensor.data_ptr());
  for (int rank = 0; rank < ranks; ++rank) {
    const auto share = splits.empty() ? rows / ranks : splits[static_cast<std::size_t>(rank)];
    const auto bytes = static_cast<std::size_t>(share) * row_bytes;
    spans.push_back({at, bytes});
    at += bytes;
  }
}

bool overlap(const shm::Span& one, const shm::Span& other) {
  return one.at < other.at + other.bytes && other.at < one.at + one.bytes;
}

bool are_plain(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_plain_memory);
}

/// The smallest span with all of the tensors in it.
shm::Span hull(const std::vector<at::Tensor>& tensors) {
  shm::Span all;
  const std::byte* end = nullptr;
  for (const auto& tensor : tensors) {
    const auto span = span_of(tensor);
    if (span.bytes == 0) continue;
    if (all.at == nullptr || span.at < all.at) all.at = span.at;
    end = std::max<const std::byte*>(end, span.at + span.bytes);
  }
  all.bytes = static_cast<std::size_t>(end - all.at);
  return all;
}

}  // namespace

CallSpans::CallSpans(const Call& call, int rank, int ranks) : call_(call), rank_(rank), ranks_(ranks) {
  make_contiguous();
  separate_inputs();
  collect_spans();
}

Call& CallSpans::own() {
  if (!own_) own_ = call_;
  return *own_;
}

void CallSpans::make_contiguous() {
  if (are_plain(call_.inputs) && are_plain(call_.outputs)) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Others only give, and may be views that cannot be written, such as expanded ones.
  const bool inputs_change = call_.kind == CallKind::kAllReduce || (call_.kind == CallKind::kReduce && is_root()) ||
                             (call_.kind == CallKind::kBroadcast && !is_root());
  for (auto& input : own().inputs) {
    if (is_plain_memory(input)) continue;
    const auto given = input;
    input = plain_copy(given);
    if (inputs_change) to_write_back_.emplace_back(input, given);
  }
  for (auto& output : own().outputs) {
    if (is_plain_memory(output)) continue;
    const auto given = output;
    output = at::empty_like(given, at::MemoryFormat::Contiguous);
    to_write_back_.emplace_back(output, given);
  }
}

/// True if an output may lie in an input, because only this rank reads there: its own piece, exactly.
bool CallSpans::is_own_piece(std::size_t input, std::size_t output) const {
  const auto same = [](const shm::Span& one, const shm::Span& other) {
    return one.at == other.at && one.bytes == other.bytes;
  };
  const auto& from = call().inputs[input];
  const auto& to = call().outputs[output];
  switch (call_.kind) {
    case CallKind::kAllGatherSingle:
      return input == output && same(span_of(from), piece_of(to, rank_, ranks_));
    case CallKind::kReduceScatterSingle:
      return input == output && same(piece_of(from, rank_, ranks_), span_of(to));
    case CallKind::kAllGather:
    case CallKind::kGather:
      return output == static_cast<std::size_t>(rank_) * call_.inputs.size() + input &&
             same(span_of(from), span_of(to));
    case CallKind::kReduceScatter:
    case CallKind::kScatter:
      return input == static_cast<std::size_t>(rank_) && same(span_of(from), span_of(to));
    default:
      return false;
  }
}

/// What others still have to read must not be written: an input that overlaps an output is copied first.
void CallSpans::separate_inputs() {
  if (call_.inputs.empty() || call_.outputs.empty() || !overlap(hull(call().inputs), hull(call().outputs))) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < call_.inputs.size(); ++i) {
    for (std::size_t o = 0; o < call_.outputs.size(); ++o) {
      if (!overlap(span_of(call().inputs[i]), span_of(call().outputs[o])) || is_own_piece(i, o)) continue;
      own().inputs[i] = call().inputs[i].clone();
      break;
    }
  }
}

void CallSpans::collect_spans() {
  const auto add = [](Spans& spans, const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) spans.push_back(span_of(tensor));
  };
  const auto add_pieces = [&](Spans& spans, const std::vector<at::Tensor>& tensors) {
    for (int rank = 0; rank < ranks_; ++rank) {
      for (const auto& tensor : tensors) spans.push_back(piece_of(tensor, rank, ranks_));
    }
  };
  const auto& inputs = call().inputs;
  const auto& outputs = call().outputs;
  switch (call_.kind) {
    case CallKind::kAllReduce:
      add(gives_, inputs);
      gets_ = gives_;
      return;
    case CallKind::kReduce:
      add(gives_, inputs);
      if (is_root()) gets_ = gives_;
      return;
    case CallKind::kBroadcast:
      add(is_root() ? gives_ : gets_, inputs);
      return;
    case CallKind::kAllGatherSingle:
      add(gives_, inputs);
      add_pieces(gets_, outputs);
      return;
    case CallKind::kReduceScatterSingle:
      add_pieces(gives_, inputs);
      add(gets_, outputs);
      return;
    case CallKind::kAllToAllSingle:
      add_splits(gives_, inputs[0], call_.input_splits, ranks_);
      add_splits(gets_, outputs[0], call_.output_splits, ranks_);
      return;
    default:
      add(gives_, inputs);
      add(gets_, outputs);
      return;
  }
}

void CallSpans::write_back() const {
  if (to_write_back_.empty()) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [from, to] : to_write_back_) to.copy_(from);
}

}  // namespace lockstep::detail
