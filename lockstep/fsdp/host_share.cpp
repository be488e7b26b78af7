#include "lockstep/fsdp/host_share.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

// Copying up to so many bytes costs less than a collective.
constexpr int64_t kLittle = 256 << 10;

}  // namespace

bool HostShare::is_mapped(const Member& member, at::ScalarType dtype) {
  const auto& cut = member.cut;
  return cut.is_in_order() && SharedBlocks::is_piece(0, static_cast<std::size_t>(cut.padded()) * elementSize(dtype));
}

std::unique_ptr<HostShare> HostShare::make(const std::vector<Member>& members, int64_t elements, at::ScalarType dtype,
                                           const GroupPtr& group) {
  if (group->getSize() < 2 || elements == 0 || !SharedBlocks::are_possible(group)) return nullptr;
  std::unique_ptr<HostShare> share(new HostShare(members, elements, dtype, group));
  const auto whole = share->shown_bytes() * group->getSize();
  return share->copied_bytes() <= std::max(kLittle, whole / 4) ? std::move(share) : nullptr;
}

HostShare::HostShare(const std::vector<Member>& members, int64_t elements, at::ScalarType dtype, GroupPtr group)
    : group_(std::move(group)), elements_(elements), dtype_(dtype) {
  for (const auto& member : members) {
    const auto& part = parts_.emplace_back(
        Part{.name = member.name,
             .sizes = str("sizes [", join(member.cut.sizes(), ", "), "], dim ", member.cut.dim(), " divided"),
             .offset = member.offset,
             .elements = member.cut.padded(),
             .is_mapped = is_mapped(member, dtype)});
    if (!part.is_mapped) {
      copied_bytes_ += part.elements * group_->getSize() * static_cast<int64_t>(elementSize(dtype));
    }
  }
}

int64_t HostShare::shown_bytes() const {
  return elements_ * static_cast<int64_t>(elementSize(dtype_));
}

void HostShare::connect(const std::string& unit) {
  const auto item = elementSize(dtype_);
  SharedBlocks::Plan plan{.bytes = static_cast<std::size_t>(shown_bytes()),
                          .what = str("the parameters of FSDP unit '", unit, "'")};
  for (const auto& part : parts_) {
    plan.contents.emplace_back(str("parameter '", part.name, "'"), part.sizes);
    if (!part.is_mapped) continue;
    plan.pieces.push_back(
        {static_cast<std::size_t>(part.offset) * item, static_cast<std::size_t>(part.elements) * item});
  }
  blocks_ = SharedBlocks::make(plan, group_);
  if (!blocks_) return;
  std::size_t index = 0;
  for (const auto& part : parts_) {
    auto& whole = mapped_.emplace_back();
    if (!part.is_mapped) continue;
    // What autograd has saved may outlive this object.
    whole = at::from_blob(
        blocks_->side_by_side(index++), {group_->getSize() * part.elements}, [blocks = blocks_](void*) {},
        at::TensorOptions(dtype_));
  }
}

std::optional<Pending> HostShare::launch(const at::Tensor& source, const std::string& unit) {
  if (!blocks_) connect(unit);
  if (!blocks_) return std::nullopt;
  is_shown_ = true;
  return blocks_->launch_publish(source);
}

std::vector<at::Tensor> HostShare::gathered() const {
  const auto item = elementSize(dtype_);
  auto wholes = mapped_;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    if (part.is_mapped) continue;
    wholes[i] = at::empty({group_->getSize() * part.elements}, at::TensorOptions(dtype_));
    const auto bytes = static_cast<std::size_t>(part.elements) * item;
    if (bytes == 0) continue;
    auto* to = static_cast<std::byte*>(wholes[i].mutable_data_ptr());
    for (int rank = 0; rank < group_->getSize(); ++rank, to += bytes) {
      std::memcpy(to, blocks_->block_of(rank) + static_cast<std::size_t>(part.offset) * item, bytes);
    }
  }
  return wholes;
}

}  // namespace lockstep::detail
