#include "lockstep/shard/flat_shard.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "lockstep/comm/call.h"
#include "lockstep/shard/buffer.h"
#include "lockstep/shard/flat.h"

namespace lockstep::detail {
namespace {

void check_fit(const FlatLayout& layout, int rank, const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(!parameters.empty() && parameters.size() == layout.count(), "[lockstep/shard] a flat layout of ",
              layout.count(), " parameters was given ", parameters.size());
  TORCH_CHECK(rank >= 0 && rank < layout.plan().world_size, "[lockstep/shard] there is no rank ", rank,
              " in a flat layout for ", layout.plan().world_size, " ranks");
  const auto& first = parameters.front();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& each = parameters[i];
    TORCH_CHECK(each.numel() == layout.range_of(i).size(), "[lockstep/shard] parameter ", i, " (", describe(each),
                ") does not have the ", layout.range_of(i).size(), " elements its flat layout says");
    TORCH_CHECK(each.scalar_type() == first.scalar_type() && each.device() == first.device(),
                "[lockstep/shard] one flat buffer cannot hold parameter 0 (", describe(first), " on ", first.device(),
                ") and parameter ", i, " (", describe(each), " on ", each.device(), "). Use a buffer for each.");
  }
}

}  // namespace

FlatLayout flat_layout_of(const std::vector<at::Tensor>& parameters, int world_size, const FlatAlignment& alignment) {
  std::vector<int64_t> elements;
  elements.reserve(parameters.size());
  for (const auto& parameter : parameters) elements.push_back(parameter.numel());
  return FlatLayout(elements, world_size, alignment);
}

FlatShard::FlatShard(FlatLayout layout, int rank, std::vector<at::Tensor> parameters, const GroupPtr& group,
                     FlatMemory memory)
    : layout_(std::move(layout)), rank_(rank), memory_(memory), parameters_(std::move(parameters)) {
  check_fit(layout_, rank_, parameters_);
  const at::NoGradGuard no_grad;
  const auto elements = layout_.plan().padded();
  buffer_ = allocate_buffer(elements, parameters_.front().options().requires_grad(false), group);
  for (const auto& gap : layout_.gaps()) buffer_.narrow(0, gap.begin, gap.size()).zero_();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto place = place_of(i);
    place.copy_(parameters_[i].detach());
    if (memory_ == FlatMemory::kOwn) continue;
    set_data(i, place);
    forms_.push_back({place.sizes().vec(), place.strides().vec()});
  }
}

at::Tensor FlatShard::own_slice() const {
  const auto slice = layout_.plan().slice;
  return buffer_.narrow(0, slice * rank_, slice);
}

at::Tensor FlatShard::place_of(std::size_t index) const {
  const auto& range = layout_.range_of(index);
  return unflattened_like(buffer_.narrow(0, range.begin, range.size()), parameters_[index]);
}

std::vector<std::size_t> FlatShard::moved(std::size_t at_most) const {
  std::vector<std::size_t> moved;
  if (memory_ == FlatMemory::kOwn || !buffer_.defined()) return moved;
  const auto* begin = static_cast<const char*>(buffer_.const_data_ptr());
  const auto item = static_cast<int64_t>(buffer_.itemsize());
  for (std::size_t i = 0; i < parameters_.size() && moved.size() < at_most; ++i) {
    const auto& range = layout_.range_of(i);
    if (!range.is_empty() && parameters_[i].const_data_ptr() != begin + range.begin * item) moved.push_back(i);
  }
  return moved;
}

bool FlatShard::fits(std::size_t index) const {
  const auto& parameter = parameters_[index];
  return parameter.scalar_type() == buffer_.scalar_type() && parameter.device() == buffer_.device() &&
         parameter.sizes() == at::IntArrayRef(forms_[index].sizes);
}

void FlatShard::take_back(std::size_t index) const {
  const at::NoGradGuard no_grad;
  // Not as it lies now: what others count in memory order, such as an optimizer's state, stays as it is.
  const auto& [sizes, strides] = forms_[index];
  const auto place = buffer_.as_strided(sizes, strides, buffer_.storage_offset() + layout_.range_of(index).begin);
  place.copy_(parameters_[index].detach());
  set_data(index, place);
}

void FlatShard::set_data(std::size_t index, const at::Tensor& place) const {
  const bool has_own_storage = memory_ == FlatMemory::kStorages && place.numel() > 0;
  parameters_[index].set_data(has_own_storage ? with_own_storage(place) : place);
}

void FlatShard::pack() const {
  if (memory_ != FlatMemory::kOwn) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) place_of(i).copy_(parameters_[i].detach());
}

void FlatShard::unpack() const {
  if (memory_ != FlatMemory::kOwn) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].detach().copy_(place_of(i));
}

}  // namespace lockstep::detail
