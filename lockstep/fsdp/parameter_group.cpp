#include "lockstep/fsdp/parameter_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/fsdp/two_dimensional.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_scope.h"
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

GroupPtr replicating_group(const DeviceMesh& mesh) {
  return mesh.ndim() == 2 && mesh.size(0) > 1 ? mesh.get_group(0) : nullptr;
}

std::string freed_message(const std::string& name) {
  return str("[lockstep/fsdp] parameter '", name, "' is sharded: its memory is there only while an operator uses it. ",
             "Use it in an operator, or open a summon_full_params() scope.");
}

bool has_cut_before(const std::vector<WholeParameter>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const auto& each) { return each.cut_before.has_value(); });
}

/// Parts of the ranks, one behind the other, as the whole tensor.
at::Tensor in_order(const at::Tensor& parts, const Cut& cut) {
  if (cut.is_ragged()) {
    auto whole = at::empty_like(parts);  // as long: reshard_after_forward may cut it again
    for (int64_t rank = 0; rank < cut.ranks(); ++rank) {
      const auto begin = cut.begin(rank) * cut.row();
      const auto elements = cut.count(rank) * cut.row();
      whole.narrow(0, begin, elements).copy_(parts.narrow(0, rank * cut.padded(), elements));
    }
    return whole;
  }
  return parts.view({cut.ranks(), cut.before(), -1}).transpose(0, 1).contiguous().view({-1});
}

/// A shard outlives its group if a module keeps it and drops what it computed with, as recurrent layers do in to().
void watch_orphan(const at::Tensor& shard, const std::shared_ptr<ShardWatch>& watch) {
  struct Orphan {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    OwnedStorage owned;
  };
  static auto* orphans = new std::list<Orphan>;  // shards may outlive what is destroyed at exit
  static auto* mutex = new std::mutex;           // guards orphans
  const std::lock_guard lock(*mutex);
  std::erase_if(*orphans, [](const Orphan& each) { return each.storage.expired(); });
  mark_intercepted(shard);
  if (storage_owner_of(shard)) return;
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(shard.storage().unsafeGetStorageImpl());
  orphans->push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(storage), OwnedStorage(shard, watch)});
}

/// What a parameter has from before; undefined if there is none that can be cut.
at::Tensor gradient_of(const at::Tensor& tensor) {
  const auto& gradient = tensor.grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided) return {};
  return gradient.detach();
}

at::Tensor flat_gradient(const std::vector<WholeParameter>& parameters) {
  const auto has_one = [](const WholeParameter& each) { return gradient_of(each.tensor).defined(); };
  if (std::none_of(parameters.begin(), parameters.end(), has_one)) return {};
  std::vector<at::Tensor> rows;
  for (const auto& each : parameters) {
    rows.push_back((has_one(each) ? gradient_of(each.tensor) : at::zeros_like(each.tensor.detach())).reshape({-1}));
  }
  return at::cat(rows);
}

}  // namespace

ParameterGroup::ParameterGroup(const std::vector<WholeParameter>& parameters, const DeviceMesh& mesh,
                               const FullyShardOptions& options, const std::shared_ptr<StorageOwner>& owner)
    : options_(options),
      mesh_(mesh),
      group_(sharding_group(mesh)),
      is_divided_(group_->getSize() > 1 || options.force_sharding),
      device_(parameters.empty() ? at::Device(at::kCPU) : parameters.front().tensor.device()),
      watch_(std::make_shared<ShardWatch>(group_->getSize() > 1 || has_cut_before(parameters))),
      gradients_(members_, group_, replicating_group(mesh), options),
      may_share_(options.share_on_host) {
  if (parameters.empty()) return;
  const at::NoGradGuard no_grad;
  const int64_t ranks = group_->getSize();
  const int64_t rank = group_->getRank();
  const bool requires_grad = parameters.front().tensor.requires_grad();
  handle_count_ = parameters.size();
  std::vector<at::Tensor> values;  // of this rank's shards
  const auto add = [&](const std::string& name, const at::Tensor& whole, const Cut& divided,
                       const std::optional<Layout>& cut_before) -> Member& {
    Member member{.name = name, .cut = divided, .handles = {}, .cut_before = cut_before};
    const auto dim = divided.dim();
    values.push_back(whole.narrow(dim, member.cut.begin(rank), member.cut.count(rank)).clone());
    members_.push_back(std::move(member));
    return members_.back();
  };
  std::vector<at::Tensor> gradients;  // from before, which stay as those of a parameter would
  const auto take = [&](Member& member, const WholeParameter& parameter, int64_t offset) {
    const auto& name = parameter.name;
    const auto& tensor = parameter.tensor;
    tensor.mutable_grad().reset();
    const auto dtype = gathered_dtype(tensor.scalar_type());
    member.handles.push_back({name, tensor.sizes().vec(), offset, {tensor, dtype, owner, freed_message(name)}});
  };
  std::vector<bool> trainable;
  if (options_.use_orig_params) {
    for (const auto& parameter : parameters) {
      trainable.push_back(parameter.tensor.requires_grad());
      gradients.push_back(gradient_of(parameter.tensor));
      const auto sizes = parameter.tensor.sizes().vec();
      const auto divided = parameter.counts.empty() ? Cut(sizes, parameter.dim, ranks) : Cut(sizes, parameter.counts);
      take(add(parameter.name, parameter.tensor.detach(), divided, parameter.cut_before), parameter, 0);
    }
  } else {
    std::vector<at::Tensor> rows;
    for (const auto& parameter : parameters) rows.push_back(parameter.tensor.detach().reshape({-1}));
    gradients.push_back(flat_gradient(parameters));
    int64_t elements = 0;
    for (const auto& row : rows) elements += row.numel();
    auto& flat = add(kFlatName, at::cat(rows), Cut({elements}, 0, ranks), std::nullopt);
    rows.clear();
    trainable.push_back(requires_grad);
    int64_t offset = 0;
    for (const auto& parameter : parameters) {
      const auto elements = parameter.tensor.numel();
      take(flat, parameter, offset);
      offset += elements;
    }
  }
  rebuild(values.front().options());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    cut(members_[i], values[i]);
    members_[i].shard.set_requires_grad(trainable[i]);
    members_[i].is_trainable = trainable[i];
    if (gradients[i].defined()) {
      const auto& divided = members_[i].cut;
      const auto part = gradients[i].narrow(divided.dim(), divided.begin(rank), divided.count(rank));
      members_[i].shard.mutable_grad() = part.clone();
    }
    values[i].reset();
    watch_->add_name(members_[i].shard, members_[i].name);
  }
  watch_->clear();
}

ParameterGroup::~ParameterGroup() {
  watched_.reset();
  for (const auto& member : members_) {
    if (member.shard.use_count() > 1) watch_orphan(member.shard, watch_);
  }
}

void ParameterGroup::set_unit_name(const std::string& name) {
  unit_ = name;
  gather_label_ = CallLabel{.text = interned(str("gather of FSDP unit '", name, "'")), .is_compared = true};
  gradients_.set_unit_name(name);
}

void ParameterGroup::set_all_gather(std::shared_ptr<AllGatherComm> comm) {
  comm_ = std::move(comm);
  may_share_ = false;
  if (!is_from_host_) share_.reset();  // a gather that is under way ends as it began
}

void ParameterGroup::set_group_between(GroupPtr group) {
  between_ = std::move(group);
  if (!between_) return;
  may_share_ = false;
  share_.reset();
}

/// Makes room for all shards. Their values are not moved.
void ParameterGroup::rebuild(const at::TensorOptions& options) {
  // Full precision, which is for evaluations, is not shared.
  const auto dtype = policy_dtype(c10::typeMetaToScalarType(options.dtype()));
  int64_t elements = 0;
  // Those that are mapped come first, so that all of them begin at a page.
  for (const bool wants_mapped : {true, false}) {
    for (auto& member : members_) {
      if (HostShare::is_mapped(member, dtype) != wants_mapped) continue;
      member.offset = elements;
      elements += aligned(member.cut.padded());
    }
  }
  make_room(options, elements);
  const bool shares = may_share_ && is_divided_ && device_.is_cpu();
  share_ = shares ? HostShare::make(members_, elements, dtype, group_) : nullptr;
}

void ParameterGroup::make_room(const at::TensorOptions& options, int64_t elements) {
  if (options_.offload_policy && !device_.is_cpu()) {
    const auto host = options.device(at::kCPU).pinned_memory(options_.offload_policy->pin_memory);
    shards_ = at::zeros({elements}, host);
  } else {
    shards_ = allocate_buffer(elements, options, group_);
    shards_.zero_();
  }
  // Before views are made of it, which inherit the mark.
  watched_.reset();
  watched_.emplace(shards_, watch_);
}

void ParameterGroup::cut(Member& member, const at::Tensor& value) {
  const auto row = part_of(shards_, {member.offset, member.offset + value.numel()});
  auto place = row.view(value.sizes()).detach();
  place.copy_(value);
  if (member.shard.defined()) {
    member.shard.set_data(place);
  } else {
    member.shard = place;
    const auto division = division_of(member);
    std::vector<at::Tensor> wholes;
    for (const auto& handle : member.handles) wholes.push_back(handle.tensor());
    set_gathered_layout(place, member.cut_before ? combined(division, *member.cut_before) : division, wholes);
  }
  member.address = member.shard.unsafeGetTensorImpl()->data();
  member.storage = shards_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

Layout ParameterGroup::division_of(const Member& member) const {
  const auto& cut = member.cut;
  Placements placements(static_cast<std::size_t>(mesh_.ndim()), Replicate());
  placements.back() = Shard(cut.dim());
  if (cut.is_ragged()) {
    std::vector<int64_t> counts;
    for (int64_t rank = 0; rank < cut.ranks(); ++rank) counts.push_back(cut.count(rank));
    placements.back() = RaggedShard(cut.dim(), std::move(counts));
  }
  return {mesh_, placements, cut.sizes()};
}

void ParameterGroup::check_taken_back(const Member& member) const {
  const auto& first = members_.front().shard;
  const auto who = str("[lockstep/fsdp] rank ", mesh_.get_rank(), ": the shard of parameter '", member.name, "' is ");
  const auto sizes = member.cut.sizes_of(group_->getRank());
  TORCH_CHECK(member.shard.sizes() == at::IntArrayRef(sizes), who, "of sizes ", member.shard.sizes(),
              " now; it was of sizes ", at::IntArrayRef(sizes), ". Load values of the same sizes.");
  TORCH_CHECK(member.shard.scalar_type() == first.scalar_type() && member.shard.device() == first.device(), who,
              member.shard.scalar_type(), " on ", member.shard.device(), " now, and that of '", members_.front().name,
              "' ", first.scalar_type(), " on ", first.device(), ". Move all parameters of a unit together.");
  TORCH_CHECK(!options_.offload_policy || device_.is_cpu() || member.shard.device().is_cpu(), who, "on ",
              member.shard.device(), " now, and offloaded units keep shards on the host. Do not move the model after ",
              "fully_shard().");
}

void ParameterGroup::take_back_shards() {
  const bool is_in_place = std::all_of(members_.begin(), members_.end(), [](const auto& m) { return m.is_in_place(); });
  if (is_in_place) return;
  const at::NoGradGuard no_grad;
  for (const auto& member : members_) check_taken_back(member);
  const auto options = members_.front().shard.options();
  const bool is_rebuilt = options.dtype() != shards_.dtype() || options.device() != shards_.device();
  if (is_rebuilt) {
    if (!options_.offload_policy) device_ = options.device();
    rebuild(options);
  } else {
    make_room(options, shards_.numel());  // the program may hold the memory from before, to put it back later
  }
  const auto dtype = gathered_dtype(shards_.scalar_type());
  for (auto& member : members_) {
    if (!member.is_in_place() && member.shard.storage().use_count() > 1) {
      TORCH_WARN_ONCE(
          "[lockstep/fsdp] rank ", mesh_.get_rank(), ": the shard of parameter '", member.name,
          "' was given memory that other tensors share. Its values were copied from there: what is written ",
          "to those later does not reach the parameter.");
    }
    cut(member, member.shard.detach());
    if (!is_rebuilt) continue;
    for (auto& handle : member.handles) handle.memory.exchange(dtype, device_);
  }
}

at::ScalarType ParameterGroup::policy_dtype(at::ScalarType dtype) const {
  const auto& policy = options_.mp_policy;
  return policy.param_dtype && at::isFloatingType(dtype) ? *policy.param_dtype : dtype;
}

at::ScalarType ParameterGroup::gathered_dtype(at::ScalarType dtype) const {
  return is_full_precision_ ? dtype : policy_dtype(dtype);
}

void ParameterGroup::set_full_precision(bool is_full_precision) {
  is_full_precision_ = is_full_precision;
  kept_.clear();
  if (members_.empty()) return;
  const c10::InferenceMode none(false);
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  const auto dtype = gathered_dtype(shards_.scalar_type());
  for (auto& member : members_) {
    for (auto& handle : member.handles) handle.memory.exchange(dtype, device_);
  }
}

at::Tensor ParameterGroup::gather_source(Pass pass) const {
  const auto dtype = gathered_dtype(shards_.scalar_type());
  if (dtype == shards_.scalar_type() && device_ == shards_.device()) return shards_;
  const auto source = allocate_buffer(shards_.numel(), shards_.options().dtype(dtype).device(device_), group_);
  take_step(*this, pass, "gather_copy_in", [&] { source.copy_(shards_, /*non_blocking=*/true); });
  return source;
}

bool ParameterGroup::launch_on_host(Pass pass, bool for_backward) {
  is_from_host_ = false;
  if (!may_share_) share_.reset();
  if (!share_ || is_full_precision_) return false;
  if (!for_backward || !share_->is_shown()) {
    const LabelScope label(gather_label_);
    auto pending = share_->launch(gather_source(pass), unit_);
    if (!pending) share_.reset();
    if (!pending) return false;
    gather_ = std::move(*pending);
  }
  is_from_host_ = true;
  is_in_order_ = false;
  return true;
}

void ParameterGroup::launch_gather(Pass pass, bool for_backward) {
  if (members_.empty()) return;
  // Shards that are taken back during an evaluation are trained later.
  const c10::InferenceMode none(false);
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  if (changed_since_gather() != nullptr) {
    if (options_.keep_parts) kept_.clear();
    mark_changed();
  }
  take_back_shards();
  watch_->clear();
  follow_requires_grad();
  if ((for_backward || options_.keep_parts) && !kept_.empty()) return launch_gather_between();
  kept_.clear();
  if (launch_on_host(pass, for_backward)) return;
  const int64_t ranks = group_->getSize();
  const auto source = gather_source(pass);
  at::Tensor room = source;
  if (is_divided_) {
    int64_t elements = 0;
    for (const auto& member : members_) elements += aligned(ranks * member.cut.padded());
    room = comm_->allocate(elements, source.options(), group_);
  }
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  gathered_.clear();
  for (auto& member : members_) {
    const auto length = ranks * member.cut.padded();
    const auto begin = ranks == 1 ? member.offset : std::exchange(offset, offset + aligned(length));
    gathered_.push_back(part_of(room, {begin, begin + length}));
    if (length == 0 || ranks == 1) continue;
    inputs.push_back(part_of(source, {member.offset, member.offset + member.cut.padded()}));
    outputs.push_back(gathered_.back());
  }
  if (ranks == 1) {  // in one piece, as it lies
    inputs = {source};
    outputs = {room};
  }
  is_in_order_ = false;
  const LabelScope label(gather_label_);
  if (is_divided_ && !outputs.empty()) gather_ = comm_->run(outputs, inputs, group_);
}

/// Graphs of earlier forwards need the values from before: autograd tells them by the version.
void ParameterGroup::mark_changed() const {
  for (const auto& member : members_) {
    for (const auto& handle : member.handles) {
      const auto tensor = handle.tensor();
      if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void ParameterGroup::launch_gather_between() {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int64_t elements = 0;
  for (const auto& part : kept_) elements += aligned(part.numel() * between_->getSize());
  const auto room = comm_->allocate(elements, kept_.front().options(), between_);
  int64_t offset = 0;
  gathered_.clear();
  for (const auto& part : kept_) {
    const auto length = part.numel() * between_->getSize();
    gathered_.push_back(part_of(room, {offset, offset + length}));
    offset += aligned(length);
    if (length == 0) continue;
    inputs.push_back(part);
    outputs.push_back(gathered_.back());
  }
  is_in_order_ = true;
  const LabelScope label(gather_label_);
  if (!outputs.empty()) gather_ = comm_->run(outputs, inputs, between_);
}

void ParameterGroup::wait_for_gather() {
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  std::exchange(gather_, {}).wait();
}

void ParameterGroup::finish_gather() {
  if (members_.empty()) return;
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  if (std::exchange(is_from_host_, false)) gathered_ = share_->gathered();
  TORCH_CHECK(gathered_.size() == members_.size(), "[lockstep/fsdp] rank ", mesh_.get_rank(), ": unit '", unit_,
              "' was to be whole, but its gather was left out");
  if (!options_.keep_parts) kept_.clear();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto& member = members_[i];
    auto& whole = gathered_[i];
    if (!is_in_order_ && !member.cut.is_in_order() && whole.numel() > 0) whole = in_order(whole, member.cut);
    for (auto& handle : member.handles) handle.memory.fill(whole, handle.offset);
  }
}

void ParameterGroup::free() {
  drop_parts();
  gathered_.clear();
  for (auto& member : members_) {
    for (auto& handle : member.handles) handle.memory.free();
  }
}

void ParameterGroup::free_until_backward() {
  if (!between_) return free();
  const at::NoGradGuard no_grad;
  const NotIntercepted below;
  auto parts = std::exchange(kept_, {});
  if (!parts.empty()) gathered_.clear();  // they were gathered from these
  for (const auto& whole : gathered_) {
    const auto length = whole.numel() / between_->getSize();
    auto part = allocate_buffer(length, whole.options(), between_);
    part.copy_(whole.narrow(0, length * between_->getRank(), length));
    parts.push_back(std::move(part));
  }
  free();
  kept_ = std::move(parts);
}

const std::string* ParameterGroup::changed_since_gather() const {
  const auto written = watch_->written();
  for (const auto& member : members_) {
    const auto end = member.offset + aligned(member.cut.padded());
    const bool is_written = written && *written >= member.offset && *written < end;
    if (!member.is_in_place() || is_written) return &member.name;
  }
  return nullptr;
}

void ParameterGroup::follow_requires_grad() {
  trainable_count_ = 0;
  for (auto& member : members_) {
    take_frozen_handles(member);
    const bool is_wanted = member.shard.requires_grad();
    member.is_trainable = is_wanted;
    trainable_count_ += is_wanted ? member.handles.size() : 0;
    for (const auto& handle : member.handles) {
      const auto tensor = handle.tensor();
      if (tensor.defined() && tensor.requires_grad() != is_wanted) tensor.set_requires_grad(is_wanted);
    }
  }
}

bool ParameterGroup::has_changed_requires_grad() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.shard.requires_grad() != member.is_trainable; });
}

/// A module's member that the program froze, or thawed, means the parameter.
void ParameterGroup::take_frozen_handles(Member& member) const {
  for (const auto& handle : member.handles) {
    const auto tensor = handle.tensor();
    if (!tensor.defined() || tensor.requires_grad() == member.is_trainable) continue;
    if (tensor.requires_grad() == member.shard.requires_grad()) continue;  // that was as well
    TORCH_CHECK(member.handles.size() == 1, "[lockstep/fsdp] rank ", mesh_.get_rank(), ": parameter '", handle.name,
                "' was ", member.is_trainable ? "frozen" : "thawed",
                ", and is part of a flat one, which is frozen as a ",
                "whole. Set use_orig_params, or make its module a unit of its own.");
    member.shard.set_requires_grad(tensor.requires_grad());
  }
}

int64_t ParameterGroup::shard_bytes() const {
  if (members_.empty()) return 0;
  return static_cast<int64_t>(shards_.nbytes()) + (share_ ? share_->shown_bytes() : 0);
}

int64_t ParameterGroup::whole_bytes() const {
  if (members_.empty() || !is_divided_) return 0;
  if (share_) return share_->copied_bytes();
  int64_t elements = 0;
  for (const auto& member : members_) elements += aligned(group_->getSize() * member.cut.padded());
  return elements * static_cast<int64_t>(c10::elementSize(gathered_dtype(shards_.scalar_type())));
}

Event ParameterGroup::describe() const {
  Event event{.unit = unit_, .bytes = static_cast<std::size_t>(whole_bytes()), .group_size = group_->getSize()};
  if (!members_.empty()) event.dtype = c10::toString(gathered_dtype(shards_.scalar_type()));
  return event;
}

}  // namespace lockstep::detail
