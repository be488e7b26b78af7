#include "lockstep/zero/element_slices.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/plain_memory.h"
#include "lockstep/comm/values.h"
#include "lockstep/shard/buffer.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {
namespace {

// Pieces from here on are runs of their own, so that the gradient can be used where it lies: a further parameter costs
// the local optimizer less than the copy.
constexpr int64_t kLargeElements = 64 << 10;

// What is sent at a time if forwards wait for parameters one by one.
constexpr int64_t kPieceBytes = 4 << 20;

ElementRange moved(const ElementRange& elements, int64_t by) {
  return {elements.begin + by, elements.end + by};
}

bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter, at::ScalarType dtype) {
  return gradient.scalar_type() == dtype && holds_its_values(gradient) && gradient.strides() == parameter.strides() &&
         parameter.is_non_overlapping_and_dense();
}

bool is_large(const ElementRange& elements) {
  return elements.size() >= kLargeElements;
}

/// Elements `from` of the gradient, counted as the parameter lies in memory, to `to` of the row. False if that is not a
/// copy of bytes on the CPU.
bool copy_bytes(const at::Tensor& row, const ElementRange& to, const at::Tensor& gradient, const at::Tensor& parameter,
                const ElementRange& from) {
  if (!gradient.is_cpu() || !lies_like(gradient, parameter, row.scalar_type())) return false;
  const auto item = static_cast<int64_t>(row.itemsize());
  std::memcpy(static_cast<char*>(row.mutable_data_ptr()) + to.begin * item,
              static_cast<const char*>(gradient.const_data_ptr()) + from.begin * item, from.size() * item);
  return true;
}

/// The values that belong to a piece as a whole.
bool have_same_rest(const NamedValues& one, int64_t one_elements, const NamedValues& other, int64_t other_elements) {
  if (one.size() != other.size()) return false;
  for (auto a = one.begin(), b = other.begin(); a != one.end(); ++a, ++b) {
    if (a->first != b->first) return false;
    const bool is_by_element = is_elementwise(a->second, one_elements);
    if (is_by_element != is_elementwise(b->second, other_elements)) return false;
    if (is_by_element) continue;
    const bool is_equal = a->second.isTensor() && b->second.isTensor()
                              ? a->second.toTensor().equal(b->second.toTensor())
                              : a->second == b->second;
    if (!is_equal) return false;
  }
  return true;
}

}  // namespace

FlatLayout ElementSlices::layout_for(const std::vector<at::Tensor>& parameters, int world_size) {
  const auto item = static_cast<int64_t>(parameters.front().itemsize());
  return flat_layout_of(parameters, world_size, {.slices = std::max<int64_t>(1, kAlignmentBytes / item)});
}

void ElementSlices::set_groups(std::vector<std::vector<at::Tensor>> groups) {
  groups_ = std::move(groups);
  std::erase_if(blocks_, [&](const Block& block) { return block.last_group >= groups_.size(); });
  for (std::size_t i = 0; i < blocks_.size(); ++i) blocks_[i].number = i;
  on_trainability_change();
}

std::unordered_set<const void*> ElementSlices::placed_parameters() const {
  std::unordered_set<const void*> placed;
  for (const auto& block : blocks_) placed.insert(block.members.begin(), block.members.end());
  return placed;
}

void ElementSlices::on_trainability_change() {
  const auto placed = placed_parameters();
  std::unordered_map<const void*, Member> missing;
  std::vector<std::vector<at::Tensor>> lists = given_blocks_;
  int64_t index = 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    std::vector<std::vector<at::Tensor>> alike;  // on one device, of one dtype
    for (const auto& parameter : groups_[i]) {
      const Member member{.index = index++, .group = i, .parameter = parameter};
      if (!parameter.requires_grad() || placed.contains(parameter.unsafeGetTensorImpl())) continue;
      missing.emplace(parameter.unsafeGetTensorImpl(), member);
      const auto found = std::find_if(alike.begin(), alike.end(), [&](const auto& each) {
        return each.front().device() == parameter.device() && each.front().dtype() == parameter.dtype();
      });
      (found == alike.end() ? alike.emplace_back() : *found).push_back(parameter);
    }
    if (!given_blocks_.empty()) continue;
    std::move(alike.begin(), alike.end(), std::back_inserter(lists));
  }
  if (missing.empty()) return;
  for (const auto& parameters : lists) {
    std::vector<Member> members;
    for (const auto& parameter : parameters) members.push_back(missing.at(parameter.unsafeGetTensorImpl()));
    blocks_.push_back(made_block(members));
  }
}

ElementSlices::Block ElementSlices::made_block(const std::vector<Member>& members) const {
  Block block{.number = blocks_.size()};
  std::vector<at::Tensor> parameters;
  for (const auto& member : members) {
    parameters.push_back(member.parameter);
    block.members.insert(member.parameter.unsafeGetTensorImpl());
    block.last_group = std::max(block.last_group, member.group);
  }
  const auto rank = group_->getRank();
  block.flat = FlatShard(layout_for(parameters, group_->getSize()), rank, parameters, group_,
                         is_awaited_later_ ? FlatMemory::kStorages : FlatMemory::kViews);
  for (const auto& piece : block.flat.layout().pieces_of(rank)) {
    block.pieces.push_back(
        {.of = members[piece.index], .elements = piece.elements, .in_parameter = piece.in_parameter});
  }
  block.runs = cut(block, PieceValues(block.pieces.size()));
  return block;
}

bool ElementSlices::has_gradient(const Piece& piece) const {
  return scattered_ ? scattered_->has(piece.of.index) : piece.of.parameter.grad().defined();
}

template <class Blocks, class Visit>
void ElementSlices::for_each_run(Blocks& blocks, const Visit& visit) const {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (auto& block : blocks) {
      for (auto& run : block.runs) {
        if (block.pieces[run.first].of.group == i) visit(i, block, run);
      }
    }
  }
}

ElementSlices::Run ElementSlices::made_run(const Block& block, std::size_t first, std::size_t last) const {
  Run run{.first = first,
          .last = last,
          .elements = {block.pieces[first].elements.begin, block.pieces[last - 1].elements.end}};
  run.parameter = part_of(block.flat.buffer(), run.elements).requires_grad_();
  return run;
}

std::vector<ElementSlices::Run> ElementSlices::cut(const Block& block, const PieceValues& values) const {
  std::vector<Run> runs;
  std::size_t first = 0;
  for (std::size_t i = 0; i < block.pieces.size(); ++i) {
    const bool is_last = i + 1 == block.pieces.size();
    const auto goes_on = [&] {
      const auto& [one, other] = std::tie(values[i], values[i + 1]);
      const auto& [piece, next] = std::tie(block.pieces[i], block.pieces[i + 1]);
      if (piece.of.group != next.of.group) return false;
      if (!scattered_ && (is_large(piece.elements) || is_large(next.elements))) return false;
      if (has_gradient(piece) != has_gradient(next)) return false;
      if (one.has_value() != other.has_value()) return false;
      return !one || have_same_rest(*one, piece.elements.size(), *other, next.elements.size());
    };
    if (!is_last && goes_on()) continue;
    runs.push_back(made_run(block, first, i + 1));
    first = i + 1;
  }
  return runs;
}

std::vector<std::vector<at::Tensor>> ElementSlices::local_parameters() const {
  std::vector<std::vector<at::Tensor>> groups(groups_.size());
  for_each_run(blocks_,
               [&](std::size_t group, const Block&, const Run& run) { groups[group].push_back(run.parameter); });
  return groups;
}

bool ElementSlices::has_only_whole_gradients() const {
  if (!scattered_) return false;
  scattered_->settle();
  return scattered_->has_only_whole_gradients();
}

bool ElementSlices::must_recut() const {
  if (scattered_) scattered_->settle();
  for (const auto& block : blocks_) {
    for (const auto& run : block.runs) {
      for (std::size_t i = run.first + 1; i < run.last; ++i) {
        if (has_gradient(block.pieces[i]) != has_gradient(block.pieces[run.first])) return true;
      }
    }
  }
  return false;
}

void ElementSlices::check_gradients_are_dense() const {
  int64_t index = 0;
  for (const auto& group : groups_) {
    for (const auto& parameter : group) {
      const auto& gradient = parameter.grad();
      TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided,
                  "[lockstep/zero] the gradient of parameter ", index,
                  " is sparse, and slices of those cannot be taken. Use ZeroPartition::kParameters.");
      TORCH_CHECK(!gradient.defined() || gradient.has_storage(), "[lockstep/zero] the gradient of parameter ", index,
                  " is divided among the ranks by another optimizer (ZeroStage::kGradients), which has to step it.");
      ++index;
    }
  }
}

void ElementSlices::take_gradients() {
  const at::NoGradGuard no_grad;
  if (!scattered_) check_gradients_are_dense();
  Copies copies;
  for (auto& block : blocks_) {
    for (auto& run : block.runs) run.parameter.mutable_grad() = gradient_of(block, run, copies);
  }
  // One kernel, not one for each small parameter.
  if (!copies.to.empty()) at::_foreach_copy_(copies.to, copies.from);
}

void ElementSlices::drop_gradients() {
  for (auto& block : blocks_) {
    for (auto& run : block.runs) run.parameter.mutable_grad() = at::Tensor();
  }
  if (scattered_) scattered_->drop();
}

at::Tensor ElementSlices::gradient_of(const Block& block, Run& run, Copies& copies) const {
  const auto& first = block.pieces[run.first];
  if (!has_gradient(first)) return {};
  if (scattered_) {
    return part_of(scattered_->slice(block.number), moved(run.elements, -block.flat.own_range().begin));
  }
  const auto& parameter = first.of.parameter;
  const auto dtype = block.flat.buffer().scalar_type();
  if (is_large(run.elements) && run.last == run.first + 1 && lies_like(parameter.grad(), parameter, dtype)) {
    return part_of(row_of(parameter.grad()), first.in_parameter);
  }
  if (!run.gradients.defined()) run.gradients = at::empty({run.elements.size()}, block.flat.buffer().options());
  for (std::size_t i = run.first; i < run.last; ++i) {
    const auto& piece = block.pieces[i];
    const auto& gradient = piece.of.parameter.grad();
    const auto to = moved(piece.elements, -run.elements.begin);
    if (to.is_empty() || copy_bytes(run.gradients, to, gradient, piece.of.parameter, piece.in_parameter)) continue;
    const auto from = part_of(flattened_like(gradient, piece.of.parameter), piece.in_parameter);
    if (gradient.is_cpu()) {
      part_of(run.gradients, to).copy_(from);
      continue;
    }
    copies.to.push_back(part_of(run.gradients, to));
    copies.from.push_back(from);
  }
  return part_of(run.gradients, {0, run.elements.size()});
}

std::vector<at::Tensor> ElementSlices::own_gradients() const {
  if (scattered_) scattered_->settle();
  std::vector<at::Tensor> gradients;
  for (const auto& block : blocks_) {
    for (const auto& piece : block.pieces) {
      if (!has_gradient(piece) || piece.elements.is_empty()) continue;
      gradients.push_back(
          scattered_ ? part_of(scattered_->slice(block.number), moved(piece.elements, -block.flat.own_range().begin))
                     : part_of(flattened_like(piece.of.parameter.grad(), piece.of.parameter), piece.in_parameter));
    }
  }
  return gradients;
}

std::vector<const FlatShard*> ElementSlices::flat_buffers() const {
  std::vector<const FlatShard*> buffers;
  for (const auto& block : blocks_) buffers.push_back(&block.flat);
  return buffers;
}

std::vector<Arrival> ElementSlices::launch_sync() {
  std::vector<Arrival> arrivals;
  if (group_->getSize() == 1) return arrivals;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    // In the second stage blocks are DDP's buckets, of which the first holds the last parameters.
    const auto& flat = blocks_[scattered_ ? blocks_.size() - 1 - i : i].flat;
    if (flat.bytes() == 0) continue;
    if (is_awaited_later_ && !scattered_) {
      launch_in_pieces(flat, arrivals);
    } else {
      arrivals.push_back({.pending = {launch_all_gather_into_tensor(flat.buffer(), flat.own_slice(), group_)},
                          .parameters = flat.parameters()});
    }
  }
  return arrivals;
}

// By broadcasts: the first parameters lie in the first rank's slice, and an all-gather brings no slice before another.
void ElementSlices::launch_in_pieces(const FlatShard& flat, std::vector<Arrival>& arrivals) const {
  const auto& layout = flat.layout();
  const auto most = kPieceBytes / static_cast<int64_t>(flat.buffer().itemsize());
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    const auto slice = layout.plan().slice_of(rank);
    for (auto begin = slice.begin; begin < slice.end; begin += most) {
      const ElementRange piece{begin, std::min(begin + most, slice.end)};
      auto& arrival =
          arrivals.emplace_back(Arrival{.pending = {launch_broadcast(part_of(flat.buffer(), piece), rank, group_)}});
      for (std::size_t i = 0; i < layout.count(); ++i) {
        if (!intersection(layout.range_of(i), piece).is_empty()) arrival.parameters.push_back(flat.parameters()[i]);
      }
    }
  }
}

std::vector<StatePiece> ElementSlices::pieces(const OptimizerStateDict& local) const {
  std::vector<StatePiece> pieces;
  int64_t position = 0;
  for_each_run(blocks_, [&](std::size_t, const Block& block, const Run& run) {
    const auto found = local.state.find(position++);
    if (found == local.state.end()) return;
    for (std::size_t i = run.first; i < run.last; ++i) {
      const auto& piece = block.pieces[i];
      auto values = found->second;
      for (auto& [name, value] : values) {
        if (!is_elementwise(value, run.elements.size())) continue;
        value = part_of(value.toTensor(), moved(piece.elements, -run.elements.begin));
      }
      pieces.push_back(
          {.index = piece.of.index, .elements = piece.in_parameter, .is_whole = false, .values = std::move(values)});
    }
  });
  return pieces;
}

OptimizerStateDict ElementSlices::load(const StateSource& source) {
  const at::NoGradGuard no_grad;
  auto blocks_after = blocks_;
  std::vector<PieceValues> values_of_block;
  for (auto& block : blocks_after) {
    auto& values = values_of_block.emplace_back();
    for (const auto& piece : block.pieces) values.push_back(source(piece.of.index, piece.in_parameter, false));
    block.runs = cut(block, values);
  }
  OptimizerStateDict dict;
  dict.param_groups.resize(groups_.size());
  int64_t position = 0;
  for_each_run(blocks_after, [&](std::size_t group, const Block& block, const Run& run) {
    dict.param_groups[group].params.push_back(position);
    const auto& values = values_of_block[block.number];
    if (values[run.first]) dict.state[position] = joined(values, run, block);
    ++position;
  });
  blocks_ = std::move(blocks_after);
  warn_of_frozen_state(source);
  return dict;
}

void ElementSlices::warn_of_frozen_state(const StateSource& source) const {
  const auto placed = placed_parameters();
  std::vector<int64_t> lost;
  int64_t index = 0;
  for (const auto& group : groups_) {
    for (const auto& parameter : group) {
      const auto own = index++;
      if (placed.contains(parameter.unsafeGetTensorImpl())) continue;
      if (source(own, {0, parameter.numel()}, true)) lost.push_back(own);
    }
  }
  if (lost.empty()) return;
  TORCH_WARN("[lockstep/zero] state of parameter ", join(lost, ", "), " is not kept: division by elements has a place ",
             "for parameters that are trainable only. Load it while they are, or use ZeroPartition::kParameters.");
}

NamedValues ElementSlices::joined(const PieceValues& values, const Run& run, const Block& block) const {
  NamedValues state;
  for (const auto& [name, value] : *values[run.first]) {
    if (!is_elementwise(value, block.pieces[run.first].elements.size())) {
      state.emplace(name, copied_to(value, at::kCPU, /*non_blocking=*/false));
      continue;
    }
    std::vector<at::Tensor> parts;
    for (std::size_t i = run.first; i < run.last; ++i) parts.push_back(values[i]->at(name).toTensor());
    state.emplace(name, at::cat(parts).to(block.flat.buffer().device()));
  }
  return state;
}

ShardingBytes ElementSlices::bytes() const {
  ShardingBytes bytes;
  for (const auto& block : blocks_) {
    bytes.buckets += block.flat.bytes();
    for (const auto& run : block.runs) {
      if (run.gradients.defined()) bytes.temporaries += static_cast<int64_t>(run.gradients.nbytes());
    }
  }
  if (scattered_) bytes.gradients = scattered_->bytes();
  return bytes;
}

}  // namespace lockstep::detail
