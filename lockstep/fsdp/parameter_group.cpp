#include "lockstep/fsdp/parameter_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/nn/gradient_copy.h"
#include "lockstep/shard/buffer.h"
#include "lockstep/shard/flat.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

// In elements: what kernels like a tensor to begin at.
constexpr int64_t kAlignment = 16;

int64_t aligned(int64_t elements) {
  return (elements + kAlignment - 1) / kAlignment * kAlignment;
}

GroupPtr sharding_group(const DeviceMesh& mesh) {
  return mesh.get_group(mesh.ndim() - 1);
}

Placements placements_on(const DeviceMesh& mesh) {
  Placements placements(static_cast<std::size_t>(mesh.ndim()), Replicate());
  placements.back() = Shard(0);
  return placements;
}

}  // namespace

ParameterGroup::ParameterGroup(const std::vector<WholeParameter>& parameters, const DeviceMesh& mesh,
                               const MixedPrecisionPolicy& policy, const std::shared_ptr<StorageOwner>& owner,
                               const std::string& unit)
    : policy_(policy),
      mesh_(mesh),
      group_(sharding_group(mesh)),
      replicas_(mesh.ndim() == 2 && mesh.size(0) > 1 ? mesh.get_group(0) : nullptr),
      gather_label_{interned(str("gather of FSDP unit '", unit, "'"))},
      reduce_label_{interned(str("gradients of FSDP unit '", unit, "'"))} {
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  const int64_t ranks = group_->getSize();
  const int64_t rank = group_->getRank();
  int64_t elements = 0;
  std::vector<Member> cuts;
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : parameters) {
    const auto rows = tensor.size(0);
    const auto chunk = (rows + ranks - 1) / ranks;
    const auto first = std::min(rank * chunk, rows);
    values.push_back(tensor.detach().narrow(0, first, std::min(chunk, rows - first)).clone());
    cuts.push_back({.name = name,
                    .sizes = tensor.sizes().vec(),
                    .dtype = tensor.scalar_type(),
                    .row = rows == 0 ? 0 : tensor.numel() / rows,
                    .rows = values.back().size(0),
                    .first_row = first,
                    .chunk = chunk,
                    .offset = elements,
                    .memory = FreedStorage(tensor, gathered_dtype(tensor.scalar_type()), owner,
                                           str("[lockstep/fsdp] parameter '", name,
                                               "' is sharded: its memory is there only while an operator uses it. Use "
                                               "it in an operator, or open a summon_full_params() scope."))});
    elements += aligned(cuts.back().padded());
  }
  shards_ = allocate_buffer(elements, values.front().options(), group_);
  shards_.zero_();
  // Before views are made of it, which inherit the mark.
  watched_.emplace(shards_, watch_);
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    cut(cuts[i], values[i]);
    cuts[i].shard.set_requires_grad(parameters[i].tensor.requires_grad());
    values[i].reset();
  }
  members_ = std::move(cuts);
  watch_->clear();
}

void ParameterGroup::cut(Member& member, const at::Tensor& tensor) {
  const auto row = part_of(shards_, {member.offset, member.offset + tensor.numel()});
  auto shard = row.view(tensor.sizes()).detach();
  shard.copy_(tensor);
  member.shard = shard;
  member.address = shard.unsafeGetTensorImpl()->data();
  set_layout(shard, Layout(mesh_, placements_on(mesh_), member.sizes));
}

void ParameterGroup::take_back_shards() {
  const at::NoGradGuard no_grad;
  for (auto& member : members_) {
    if (member.shard.unsafeGetTensorImpl()->data() == member.address) continue;
    std::vector<int64_t> sizes = member.sizes;
    sizes[0] = member.rows;
    TORCH_CHECK(member.shard.sizes() == at::IntArrayRef(sizes) && member.shard.scalar_type() == member.dtype &&
                    member.shard.device() == shards_.device(),
                "[lockstep/fsdp] rank ", group_->getRank(), ": the shard of parameter '", member.name, "' is ",
                describe(member.shard), " on ", member.shard.device(), " now; it was ", member.dtype, " of sizes ",
                at::IntArrayRef(sizes), " on ", shards_.device(),
                ". Load values of the same sizes, and change dtype and device before fully_shard().");
    auto place = part_of(shards_, {member.offset, member.offset + member.shard.numel()}).view(sizes);
    place.copy_(member.shard);
    member.shard.set_data(place);
  }
}

at::ScalarType ParameterGroup::gathered_dtype(at::ScalarType dtype) const {
  return policy_.param_dtype && at::isFloatingType(dtype) ? *policy_.param_dtype : dtype;
}

void ParameterGroup::launch_gather() {
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  take_back_shards();
  watch_->clear();
  follow_requires_grad();
  const int64_t ranks = group_->getSize();
  const auto dtype = gathered_dtype(shards_.scalar_type());
  at::Tensor source = shards_;
  if (dtype != shards_.scalar_type()) {
    source = allocate_buffer(shards_.numel(), shards_.options().dtype(dtype), group_);
    source.copy_(shards_);
  }
  int64_t elements = 0;
  for (const auto& member : members_) elements += aligned(ranks * member.padded());
  const auto room = allocate_buffer(elements, source.options(), group_);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  gathered_.clear();
  for (auto& member : members_) {
    const auto length = ranks * member.padded();
    gathered_.push_back(room.narrow(0, offset, length));
    offset += aligned(length);
    if (length > 0) {
      inputs.push_back(source.narrow(0, member.offset, member.padded()));
      outputs.push_back(gathered_.back());
    }
  }
  const LabelScope label(gather_label_);
  if (!outputs.empty()) gather_ = launch_all_gather_into_tensor_coalesced(outputs, inputs, group_);
}

void ParameterGroup::finish_gather() {
  const auto gathered = std::exchange(gathered_, {});
  std::exchange(gather_, {}).wait();
  for (std::size_t i = 0; i < members_.size(); ++i) members_[i].memory.fill(gathered[i]);
}

void ParameterGroup::free() {
  for (auto& member : members_) member.memory.free();
}

void ParameterGroup::write_back() {
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  for (auto& member : members_) {
    const auto tensor = member.memory.tensor();
    if (tensor.defined()) member.shard.copy_(tensor.detach().narrow(0, member.first_row, member.rows));
  }
}

const std::string* ParameterGroup::changed_since_gather() const {
  const auto written = watch_->written();
  for (const auto& member : members_) {
    const bool is_here = member.shard.unsafeGetTensorImpl()->data() == member.address;
    const bool is_written = written && *written >= member.offset && *written < member.offset + aligned(member.padded());
    if (!is_here || is_written) return &member.name;
  }
  return nullptr;
}

void ParameterGroup::follow_requires_grad() {
  trainable_count_ = 0;
  for (const auto& member : members_) {
    const auto tensor = member.memory.tensor();
    const bool is_wanted = member.shard.requires_grad();
    trainable_count_ += is_wanted ? 1 : 0;
    if (tensor.defined() && tensor.requires_grad() != is_wanted) tensor.set_requires_grad(is_wanted);
  }
}

at::Tensor ParameterGroup::reduction_input(const std::vector<std::size_t>& members, double scale) const {
  const int64_t ranks = group_->getSize();
  int64_t length = 0;
  for (const auto index : members) length += aligned(members_[index].padded());
  const auto first = whole(members.front()).grad();
  const auto dtype = policy_.reduce_dtype.value_or(first.scalar_type());
  auto input = allocate_buffer(ranks * length, first.options().dtype(dtype), group_);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t offset = rank * length;
    for (const auto index : members) {
      const auto& member = members_[index];
      const auto grad = whole(index).grad();
      const auto begin = std::min(rank * member.chunk, grad.size(0));
      const auto rows = std::min(member.chunk, grad.size(0) - begin);
      const auto used = rows * member.row;
      if (used > 0) {
        const auto part = grad.narrow(0, begin, rows);
        copy_scaled(input.narrow(0, offset, used).view(part.sizes()), part, scale);
      }
      const auto room = aligned(member.padded());
      if (used < room) input.narrow(0, offset + used, room - used).zero_();
      offset += room;
    }
  }
  return input;
}

void ParameterGroup::launch_reduction(double scale) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> members;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto tensor = whole(i);
    if (!tensor.defined() || !tensor.grad().defined() || members_[i].padded() == 0) continue;
    const auto& grad = tensor.grad();
    TORCH_CHECK(grad.layout() == at::kStrided, "[lockstep/fsdp] rank ", group_->getRank(), ": the gradient of '",
                members_[i].name, "' is sparse, which cannot be sharded. Use a dense embedding.");
    TORCH_CHECK(members.empty() || grad.scalar_type() == whole(members.front()).grad().scalar_type(),
                "[lockstep/fsdp] rank ", group_->getRank(), ": gradients of '", members_[members.front()].name,
                "' and '", members_[i].name, "' have different dtypes: ", whole(members.front()).grad().scalar_type(),
                " and ", grad.scalar_type(),
                ". One unit reduces gradients of one dtype; make the second a unit of its own.");
    members.push_back(i);
  }
  if (members.empty()) return;
  Reduction reduction;
  reduction.input = reduction_input(members, scale);
  reduction.output = at::empty({reduction.input.numel() / group_->getSize()}, reduction.input.options());
  reduction.members = std::move(members);
  const LabelScope label(reduce_label_);
  reduction.pending = launch_reduce_scatter_tensor(reduction.output, reduction.input, group_);
  for (const auto index : reduction.members) whole(index).mutable_grad().reset();
  reductions_.push_back(std::move(reduction));
}

void ParameterGroup::finish_reduction() {
  if (reductions_.empty()) return;
  auto reduction = std::move(reductions_.front());
  reductions_.erase(reductions_.begin());
  reduction.pending.wait();
  reduction.input.reset();
  if (replicas_) {
    const LabelScope label(reduce_label_);
    all_reduce(reduction.output, replicas_);
  }
  reduced_.push_back(std::move(reduction));
}

void ParameterGroup::hand_out_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& reduction : std::exchange(reduced_, {})) {
    int64_t offset = 0;
    for (const auto index : reduction.members) {
      const auto& member = members_[index];
      const auto elements = member.rows * member.row;
      auto sizes = member.sizes;
      sizes[0] = member.rows;
      auto part = part_of(reduction.output, {offset, offset + elements}).view(sizes);
      offset += aligned(member.padded());
      if (part.scalar_type() != member.dtype) part = part.to(member.dtype);
      auto& grad = member.shard.mutable_grad();
      if (grad.defined()) {
        grad.add_(part);
      } else {
        grad = part.detach();
      }
    }
  }
}

void ParameterGroup::drop_gradients() {
  for (auto& reduction : std::exchange(reductions_, {})) {
    try {
      reduction.pending.wait();
      // NOLINTNEXTLINE(bugprone-empty-catch): what it would have given is dropped
    } catch (const std::exception&) {
    }
  }
  reduced_.clear();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (const auto tensor = whole(i); tensor.defined()) tensor.mutable_grad().reset();
  }
}

}  // namespace lockstep::detail
