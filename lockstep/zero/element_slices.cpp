#include "lockstep/zero/element_slices.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/collectives.h"
#include "lockstep/ddp/bucket.h"
#include "lockstep/zero/bucket_views.h"

namespace lockstep::detail {
namespace {

// Pieces from here on are runs of their own, so that the gradient can be used where it lies: a further parameter costs
// the local optimizer less than the copy.
constexpr int64_t kLargeElements = 64 << 10;

/// An alias that autograd does not track as a view: it becomes a leaf of its own.
at::Tensor part_of(const at::Tensor& row, const ElementRange& elements) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return row.narrow(0, elements.begin, elements.size());
}

ElementRange moved(const ElementRange& elements, int64_t by) {
  return {elements.begin + by, elements.end + by};
}

bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.scalar_type() == parameter.scalar_type() && !gradient.is_conj() && !gradient.is_neg() &&
         gradient.strides() == parameter.strides() && parameter.is_non_overlapping_and_dense();
}

bool is_large(const ElementRange& elements) {
  return elements.size() >= kLargeElements;
}

/// Elements `from` of the gradient, counted as the parameter lies in memory, to `to` of the row.
void copy_gradient(const at::Tensor& row, const ElementRange& to, const at::Tensor& gradient,
                   const at::Tensor& parameter, const ElementRange& from) {
  if (gradient.is_cpu() && lies_like(gradient, parameter)) {
    const auto item = static_cast<int64_t>(row.itemsize());
    std::memcpy(static_cast<char*>(row.mutable_data_ptr()) + to.begin * item,
                static_cast<const char*>(gradient.const_data_ptr()) + from.begin * item, from.size() * item);
    return;
  }
  part_of(row, to).copy_(part_of(flattened_like(gradient, parameter), from));
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

void ElementSlices::set_groups(std::vector<std::vector<at::Tensor>> groups) {
  groups_ = std::move(groups);
  blocks_.resize(groups_.size());
  on_trainability_change();
}

void ElementSlices::on_trainability_change() {
  int64_t index = 0;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    std::unordered_set<const void*> placed;
    for (const auto& block : blocks_[i]) placed.insert(block.members.begin(), block.members.end());
    std::vector<std::pair<c10::Device, std::vector<std::pair<int64_t, at::Tensor>>>> by_device;
    for (const auto& parameter : groups_[i]) {
      const auto own_index = index++;
      if (!parameter.requires_grad() || placed.count(parameter.unsafeGetTensorImpl()) == 1) continue;
      auto found = std::find_if(by_device.begin(), by_device.end(),
                                [&](const auto& each) { return each.first == parameter.device(); });
      if (found == by_device.end()) found = by_device.insert(found, {parameter.device(), {}});
      found->second.emplace_back(own_index, parameter);
    }
    for (const auto& [device, members] : by_device) blocks_[i].push_back(made_block(members));
  }
}

ElementSlices::Block ElementSlices::made_block(const std::vector<std::pair<int64_t, at::Tensor>>& members) const {
  const at::NoGradGuard no_grad;
  Block block;
  std::vector<at::Tensor> parameters;
  int64_t total = 0;
  for (const auto& [index, parameter] : members) {
    parameters.push_back(parameter);
    block.members.insert(parameter.unsafeGetTensorImpl());
    total += parameter.numel();
  }
  const auto options = parameters.front().options().requires_grad(false);
  const auto item = static_cast<int64_t>(parameters.front().itemsize());
  block.plan = plan_slices(total, group_->getSize(), std::max<int64_t>(1, kAlignmentBytes / item));
  block.buffer = allocate_buffer(block.plan.padded(), options, group_);
  block.buffer.narrow(0, total, block.plan.padded() - total).zero_();
  move_into(block.buffer, parameters);

  const auto slice = own_slice(block);
  int64_t begin = 0;
  for (const auto& [index, parameter] : members) {
    const ElementRange range{begin, begin + parameter.numel()};
    const auto mine = range.is_empty() ? range : intersection(range, slice);
    // One without elements is a piece too: it has state.
    if (!mine.is_empty() || (range.is_empty() && block.plan.rank_of(begin) == group_->getRank())) {
      block.pieces.push_back({.index = index, .parameter = parameter, .parameter_begin = begin, .elements = mine});
    }
    begin = range.end;
  }
  block.runs = cut(block, PieceValues(block.pieces.size()));
  return block;
}

ElementRange ElementSlices::own_slice(const Block& block) const {
  return block.plan.slice_of(group_->getRank());
}

ElementSlices::Run ElementSlices::made_run(const Block& block, std::size_t first, std::size_t last) const {
  Run run{.first = first,
          .last = last,
          .elements = {block.pieces[first].elements.begin, block.pieces[last - 1].elements.end}};
  run.parameter = part_of(block.buffer, run.elements).requires_grad_();
  return run;
}

std::vector<ElementSlices::Run> ElementSlices::cut(const Block& block, const PieceValues& values) const {
  std::vector<Run> runs;
  std::size_t first = 0;
  for (std::size_t i = 0; i < block.pieces.size(); ++i) {
    const bool is_last = i + 1 == block.pieces.size();
    const auto goes_on = [&] {
      const auto& [one, other] = std::tie(values[i], values[i + 1]);
      if (is_large(block.pieces[i].elements) || is_large(block.pieces[i + 1].elements)) return false;
      if (block.pieces[i].has_gradient() != block.pieces[i + 1].has_gradient()) return false;
      if (one.has_value() != other.has_value()) return false;
      return !one || have_same_rest(*one, block.pieces[i].elements.size(), *other, block.pieces[i + 1].elements.size());
    };
    if (!is_last && goes_on()) continue;
    runs.push_back(made_run(block, first, i + 1));
    first = i + 1;
  }
  return runs;
}

std::vector<std::vector<at::Tensor>> ElementSlices::local_parameters() const {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& blocks : blocks_) {
    auto& parameters = groups.emplace_back();
    for (const auto& block : blocks) {
      for (const auto& run : block.runs) parameters.push_back(run.parameter);
    }
  }
  return groups;
}

bool ElementSlices::must_recut() const {
  for (const auto& blocks : blocks_) {
    for (const auto& block : blocks) {
      for (const auto& run : block.runs) {
        for (std::size_t i = run.first + 1; i < run.last; ++i) {
          if (block.pieces[i].has_gradient() != block.pieces[run.first].has_gradient()) return true;
        }
      }
    }
  }
  return false;
}

void ElementSlices::take_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& blocks : blocks_) {
    for (auto& block : blocks) {
      for (auto& run : block.runs) run.parameter.mutable_grad() = gradient_of(block, run);
    }
  }
}

void ElementSlices::drop_gradients() {
  for (auto& blocks : blocks_) {
    for (auto& block : blocks) {
      for (auto& run : block.runs) run.parameter.mutable_grad() = at::Tensor();
    }
  }
}

at::Tensor ElementSlices::gradient_of(Block& block, const Run& run) const {
  const auto& first = block.pieces[run.first];
  if (!first.has_gradient()) return {};
  for (std::size_t i = run.first; i < run.last; ++i) {
    TORCH_CHECK(block.pieces[i].parameter.grad().layout() == at::kStrided, "[lockstep/zero] the gradient of parameter ",
                block.pieces[i].index,
                " is sparse, and slices of those cannot be taken. Use ZeroPartition::kParameters.");
  }
  if (is_large(run.elements) && run.last == run.first + 1 && lies_like(first.parameter.grad(), first.parameter)) {
    return part_of(row_of(first.parameter.grad()), first.in_parameter());
  }
  const auto slice = own_slice(block);
  if (!block.gradients.defined()) {
    block.gradients = at::empty({slice.size()}, block.buffer.options());
  }
  for (std::size_t i = run.first; i < run.last; ++i) {
    const auto& piece = block.pieces[i];
    copy_gradient(block.gradients, moved(piece.elements, -slice.begin), piece.parameter.grad(), piece.parameter,
                  piece.in_parameter());
  }
  return part_of(block.gradients, moved(run.elements, -slice.begin));
}

std::vector<at::Tensor> ElementSlices::own_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& blocks : blocks_) {
    for (const auto& block : blocks) {
      for (const auto& piece : block.pieces) {
        if (!piece.has_gradient() || piece.elements.is_empty()) continue;
        gradients.push_back(part_of(flattened_like(piece.parameter.grad(), piece.parameter), piece.in_parameter()));
      }
    }
  }
  return gradients;
}

void ElementSlices::sync() {
  if (group_->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& blocks : blocks_) {
    for (const auto& block : blocks) {
      if (block.plan.slice == 0) continue;
      const auto mine = block.buffer.narrow(0, block.plan.slice * group_->getRank(), block.plan.slice);
      all_gather_into_tensor(block.buffer, mine, group_);
    }
  }
}

std::vector<StatePiece> ElementSlices::pieces(const torch::optim::Optimizer& local) const {
  const auto dict = state_dict_of(local);
  std::vector<StatePiece> pieces;
  int64_t position = 0;
  for (const auto& blocks : blocks_) {
    for (const auto& block : blocks) {
      for (const auto& run : block.runs) {
        const auto found = dict.state.find(position++);
        if (found == dict.state.end()) continue;
        for (std::size_t i = run.first; i < run.last; ++i) {
          const auto& piece = block.pieces[i];
          auto values = found->second;
          for (auto& [name, value] : values) {
            if (!is_elementwise(value, run.elements.size())) continue;
            value = part_of(value.toTensor(), moved(piece.elements, -run.elements.begin));
          }
          pieces.push_back(
              {.index = piece.index, .elements = piece.in_parameter(), .is_whole = false, .values = std::move(values)});
        }
      }
    }
  }
  return pieces;
}

OptimizerStateDict ElementSlices::load(const StateSource& source) {
  const at::NoGradGuard no_grad;
  OptimizerStateDict dict;
  auto blocks_after = blocks_;
  int64_t position = 0;
  for (auto& blocks : blocks_after) {
    auto& group = dict.param_groups.emplace_back();
    for (auto& block : blocks) {
      PieceValues values;
      for (const auto& piece : block.pieces) values.push_back(source(piece.index, piece.in_parameter(), false));
      block.runs = cut(block, values);
      for (const auto& run : block.runs) {
        group.params.push_back(position);
        if (values[run.first]) {
          auto& state = dict.state[position];
          for (const auto& [name, value] : *values[run.first]) {
            if (!is_elementwise(value, block.pieces[run.first].elements.size())) {
              state.emplace(name, copied_to(value, at::kCPU, /*non_blocking=*/false));
              continue;
            }
            std::vector<at::Tensor> parts;
            for (std::size_t i = run.first; i < run.last; ++i) parts.push_back(values[i]->at(name).toTensor());
            state.emplace(name, at::cat(parts).to(block.buffer.device()));
          }
        }
        ++position;
      }
    }
  }
  blocks_ = std::move(blocks_after);
  return dict;
}

ShardingBytes ElementSlices::bytes() const {
  ShardingBytes bytes;
  for (const auto& blocks : blocks_) {
    for (const auto& block : blocks) {
      bytes.buckets += static_cast<int64_t>(block.buffer.nbytes());
      if (block.gradients.defined()) bytes.temporaries += static_cast<int64_t>(block.gradients.nbytes());
    }
  }
  return bytes;
}

}  // namespace lockstep::detail
