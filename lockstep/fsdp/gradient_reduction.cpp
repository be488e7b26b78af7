#include "lockstep/fsdp/gradient_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/current_stream.h"
#include "lockstep/fsdp/refused_gradient.h"
#include "lockstep/intercept/part_mark.h"
#include "lockstep/nn/gradient_copy.h"
#include "lockstep/shard/flat.h"
#include "lockstep/shard/layout_of.h"

namespace lockstep::detail {
namespace {

/// A sum in float16 must not overflow: one part of the division comes before it, about the square root, the other
/// after.
double factor_before_half(double divisor) {
  double factor = 1;
  while (divisor / factor > factor) factor *= 2;
  return factor;
}

at::Tensor grad_of(const WholeHandle& handle) {
  const auto tensor = handle.tensor();
  if (!tensor.defined()) return {};
  const auto& grad = tensor.grad();
  return grad.is_same(handle.refused_grad) && is_refused(grad) ? at::Tensor() : grad;
}

void drop_grad(WholeHandle& handle) {
  if (const auto tensor = handle.tensor(); tensor.defined()) tensor.mutable_grad().reset();
}

bool has_gradient(const Member& member) {
  return std::any_of(member.handles.begin(), member.handles.end(),
                     [](const WholeHandle& handle) { return handle.kept_grad.defined() || grad_of(handle).defined(); });
}

/// The parts of all ranks, each as long as the longest.
void fill_ragged(const at::Tensor& input, const Cut& cut, const at::Tensor& whole, double scale) {
  for (int64_t rank = 0; rank < cut.ranks(); ++rank) {
    const auto part = whole.narrow(0, cut.begin(rank), cut.count(rank));
    const auto begin = rank * cut.padded();
    copy_scaled(part_of(input, {begin, begin + part.numel()}).view(part.sizes()), part, scale);
    part_of(input, {begin + part.numel(), begin + cut.padded()}).zero_();
  }
}

at::Tensor run_hooks(const at::Tensor& shard, at::Tensor grad) {
  for (const auto& hook : torch::autograd::impl::hooks(shard)) grad = (*hook)({grad})[0];
  return grad;
}

bool has_hooks(const at::Tensor& shard) {
  return has_gradient_hooks(shard) || torch::autograd::impl::post_acc_grad_hooks(shard) != nullptr;
}

}  // namespace

GradientReduction::GradientReduction(std::vector<Member>& members, GroupPtr group, GroupPtr replicas,
                                     const FullyShardOptions& options)
    : members_(members), group_(std::move(group)), replicas_(std::move(replicas)), policy_(options.mp_policy) {}

void GradientReduction::set_unit_name(const std::string& name) {
  unit_ = name;
  label_ = CallLabel{.text = interned(str("gradients of FSDP unit '", name, "'")), .is_compared = true};
}

std::string GradientReduction::who() const {
  return str("[lockstep/fsdp] rank ", group_->getRank(), " of ", group_->getSize(), ", unit '", unit_, "'");
}

int64_t GradientReduction::world() const {
  return group_->getSize() * static_cast<int64_t>(replicas_ ? replicas_->getSize() : 1);
}

at::ScalarType GradientReduction::reduce_dtype(at::ScalarType compute_dtype) const {
  return policy_.reduce_dtype && at::isFloatingType(compute_dtype) ? *policy_.reduce_dtype : compute_dtype;
}

void GradientReduction::witness(std::size_t index) {
  witnesses_.resize(members_.size());
  auto& grad = members_[index].shard.mutable_grad();
  const bool is_stand_in = !grad.defined();
  if (is_stand_in) grad = at::zeros_like(members_[index].shard.detach());
  auto& witness = witnesses_[index];
  if (witness.grad == grad.unsafeGetTensorImpl()) return;
  witness = {grad.unsafeGetTensorImpl(), grad._version(), is_stand_in};
  if (!is_stand_in) return;
  witness.watch = std::make_shared<ZeroWatch>();
  witness.watched = std::make_shared<OwnedStorage>(grad, witness.watch);
}

bool GradientReduction::is_zeroed(std::size_t index) const {
  if (witnesses_.empty() || witnesses_[index].grad == nullptr) return false;
  const auto& witness = witnesses_[index];
  const auto& grad = members_[index].shard.grad();
  if (!grad.defined() || grad.unsafeGetTensorImpl() != witness.grad) return true;
  if (witness.watch) return witness.watch->is_zeroed();
  return grad._version() != witness.version && !grad.any().item<bool>();
}

void GradientReduction::forget_zeroed() {
  for (std::size_t i = 0; i < witnesses_.size(); ++i) {
    if (!is_zeroed(i)) continue;
    for (auto& handle : members_[i].handles) handle.kept_grad.reset();
    if (!partials_.empty()) partials_[i].reset();
    for (auto* list : {&scattering_, &replicating_, &reduced_}) {
      for (auto& reduction : *list) {
        const auto found = std::find(reduction.members.begin(), reduction.members.end(), i);
        reduction.is_zeroed.resize(reduction.members.size());
        if (found != reduction.members.end()) reduction.is_zeroed[found - reduction.members.begin()] = true;
      }
    }
    witnesses_[i] = {};
  }
}

void GradientReduction::refuse_whole() {
  for (auto& member : members_) {
    for (auto& handle : member.handles) {
      const auto tensor = handle.tensor();
      if (!tensor.defined() || !tensor.requires_grad() || tensor.grad().defined()) continue;
      auto& refused = handle.refused_grad;
      const bool fits = refused.defined() && is_refused(refused) && refused.scalar_type() == tensor.scalar_type() &&
                        refused.device() == tensor.device();
      if (!fits) refused = make_refused_gradient(tensor, str(who(), ": parameter '", handle.name, "'"));
      tensor.mutable_grad() = refused;
    }
  }
}

void GradientReduction::accept_whole() {
  for (auto& member : members_) {
    for (auto& handle : member.handles) {
      if (!grad_of(handle).defined()) drop_grad(handle);
    }
  }
}

void GradientReduction::drop_frozen() {
  for (auto& member : members_) {
    if (member.shard.requires_grad()) continue;
    for (auto& handle : member.handles) drop_grad(handle);
  }
}

void GradientReduction::keep(bool counts) {
  const at::NoGradGuard no_grad;
  forget_zeroed();
  drop_frozen();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (!has_gradient(members_[i])) continue;
    check({i});
    for (auto& handle : members_[i].handles) {
      const auto grad = grad_of(handle);
      if (!grad.defined()) continue;
      if (!counts) grad.zero_();
      if (handle.kept_grad.defined()) {
        handle.kept_grad.add_(grad);
      } else {
        handle.kept_grad = grad.to(reduce_dtype(grad.scalar_type()));
      }
      drop_grad(handle);
    }
    witness(i);
  }
}

bool GradientReduction::has_kept() const {
  return std::any_of(members_.begin(), members_.end(), [](const Member& member) {
    return std::any_of(member.handles.begin(), member.handles.end(),
                       [](const WholeHandle& handle) { return handle.kept_grad.defined(); });
  });
}

std::vector<std::size_t> GradientReduction::members_to_reduce(const ReductionSettings& settings) {
  forget_zeroed();
  drop_frozen();
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto& member = members_[i];
    const bool is_sent_as_zeros = settings.sends_zeros && member.shard.requires_grad();
    const bool has_partial = !partials_.empty() && partials_[i].defined();
    if (has_gradient(member) || is_sent_as_zeros || has_partial) chosen.push_back(i);
  }
  return chosen;
}

void GradientReduction::check(const std::vector<std::size_t>& members) const {
  const WholeHandle* first = nullptr;
  for (const auto index : members) {
    for (const auto& handle : members_[index].handles) {
      const auto grad = grad_of(handle);
      if (!grad.defined()) continue;
      TORCH_CHECK(grad.layout() == at::kStrided, who(), ": the gradient of '", handle.name,
                  "' is sparse, which cannot be sharded. Use a dense embedding.");
      TORCH_CHECK(!grad.requires_grad(), who(), ": the gradient of '", handle.name,
                  "' is to be differentiated itself (create_graph), which sharded parameters do not support. Leave ",
                  "create_graph out, or use DistributedDataParallel.");
      if (first == nullptr) first = &handle;
      const auto dtype = grad_of(*first).scalar_type();
      TORCH_CHECK(grad.scalar_type() == dtype, who(), ": gradients of '", first->name, "' and '", handle.name,
                  "' have different dtypes: ", dtype, " and ", grad.scalar_type(),
                  ". One unit reduces gradients of one dtype; make the second a unit of its own.");
    }
  }
}

void GradientReduction::fill(const at::Tensor& input, const Member& member, double scale, bool counts) {
  const auto& cut = member.cut;
  for (const auto& handle : member.handles) {
    const auto grad = counts ? grad_of(handle) : at::Tensor();
    auto source = handle.kept_grad;
    if (source.defined() && grad.defined()) source.add_(grad);
    if (!source.defined()) source = grad;
    const auto place = part_of(input, {handle.offset, handle.offset + c10::multiply_integers(handle.sizes)});
    if (!source.defined()) {
      (cut.is_ragged() ? input : place).zero_();
    } else if (cut.is_ragged()) {
      fill_ragged(input, cut, source, scale);
    } else if (cut.is_in_order()) {
      copy_scaled(place.view(handle.sizes), source, scale);
    } else {
      const auto parts = source.contiguous().view({cut.before(), cut.ranks(), -1}).transpose(0, 1);
      copy_scaled(place.view(parts.sizes()), parts, scale);
    }
  }
  const auto used = cut.numel();
  if (used < input.numel() && !cut.is_ragged()) input.narrow(0, used, input.numel() - used).zero_();
}

void GradientReduction::launch(const ReductionSettings& settings) {
  const at::NoGradGuard no_grad;
  Reduction reduction;
  reduction.members = members_to_reduce(settings);
  if (reduction.members.empty()) return;
  check(reduction.members);
  int64_t elements = 0;
  for (const auto index : reduction.members) elements += members_[index].cut.padded();
  const auto whole = members_[reduction.members.front()].handles.front().tensor();
  const auto dtype = reduce_dtype(whole.scalar_type());
  const auto options = at::TensorOptions(dtype).device(whole.device());
  const auto divisor = settings.divisor > 0 ? settings.divisor : static_cast<double>(world());
  const auto before = dtype == at::kHalf ? factor_before_half(divisor) : divisor;
  reduction.scale_after = before / divisor;
  reduction.settings = settings;
  const int64_t ranks = group_->getSize();
  reduction.input = comm_->allocate(elements * ranks, options, group_);
  reduction.output = at::empty({elements}, options);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int64_t offset = 0;
  for (const auto index : reduction.members) {
    const auto next = offset + members_[index].cut.padded();
    if (next == offset) continue;  // no elements: the gradient is as empty
    inputs.push_back(part_of(reduction.input, {offset * ranks, next * ranks}));
    outputs.push_back(part_of(reduction.output, {offset, next}));
    fill(inputs.back(), members_[index], 1 / before, settings.counts);
    offset = next;
  }
  if (ranks == 1 && !outputs.empty()) {  // in one piece, as it lies
    inputs = {reduction.input};
    outputs = {reduction.output};
  }
  const LabelScope label(label_);
  if (!outputs.empty()) reduction.pending = comm_->run(outputs, inputs, group_);
  for (const auto index : reduction.members) {
    for (auto& handle : members_[index].handles) {
      drop_grad(handle);
      handle.kept_grad.reset();
    }
  }
  scattering_.push_back(std::move(reduction));
}

void GradientReduction::add_partials(const Reduction& reduction) {
  partials_.resize(members_.size());
  int64_t offset = 0;
  for (std::size_t i = 0; i < reduction.members.size(); ++i) {
    const auto index = reduction.members[i];
    const auto sum = part_of(reduction.output, {offset, offset + members_[index].cut.padded()});
    offset += sum.numel();
    if (reduction.is_dropped(i)) continue;
    if (partials_[index].defined()) sum.add_(std::exchange(partials_[index], {}));
    if (reduction.settings.sums_replicas) continue;
    partials_[index] = sum;
    witness(index);
  }
}

void GradientReduction::finish_scatter() {
  const at::NoGradGuard no_grad;
  for (auto& reduction : std::exchange(scattering_, {})) {
    std::exchange(reduction.pending, {}).wait();  // which holds on to the input as well
    reduction.input.reset();
    if (replicas_) {
      add_partials(reduction);
      if (!reduction.settings.sums_replicas) continue;
      const LabelScope label(label_);
      reduction.pending = launch_all_reduce(reduction.output, replicas_);
    }
    replicating_.push_back(std::move(reduction));
  }
}

void GradientReduction::run_hook(Reduction& reduction) {
  const auto& stream = reduction.settings.on_reduced_stream;
  if (!stream || stream->device().is_cpu()) return reduction.settings.on_reduced(reduction.output);
  c10::Event reduced(stream->device_type());
  reduced.record(current_stream(stream->device()));
  reduced.block(*stream);
  {
    const c10::StreamGuard there(*stream);
    reduction.settings.on_reduced(reduction.output);
  }
  reduction.hooked.emplace(stream->device_type());
  reduction.hooked->record(*stream);
}

void GradientReduction::finish_replicas() {
  const at::NoGradGuard no_grad;
  for (auto& reduction : std::exchange(replicating_, {})) {
    std::exchange(reduction.pending, {}).wait();
    if (reduction.scale_after != 1) reduction.output.mul_(reduction.scale_after);
    if (reduction.settings.on_reduced) run_hook(reduction);
    reduced_.push_back(std::move(reduction));
  }
}

void GradientReduction::leave_launched() {
  forget_zeroed();
  for (const auto* list : {&scattering_, &replicating_, &reduced_}) {
    for (const auto& reduction : *list) {
      for (std::size_t i = 0; i < reduction.members.size(); ++i) {
        if (!reduction.is_dropped(i)) witness(reduction.members[i]);
      }
    }
  }
}

void GradientReduction::hand_out() {
  const at::NoGradGuard no_grad;
  forget_zeroed();
  for (auto& reduction : std::exchange(reduced_, {})) {
    if (reduction.hooked) reduction.hooked->block(current_stream(reduction.output.device()));
    int64_t offset = 0;
    for (std::size_t i = 0; i < reduction.members.size(); ++i) {
      const auto index = reduction.members[i];
      const auto& member = members_[index];
      const auto flat = part_of(reduction.output, {offset, offset + member.cut.padded()});
      offset += member.cut.padded();
      if (reduction.is_dropped(i)) continue;
      // A penalty on the shard itself may have added to our zeros.
      const auto& grad = member.shard.grad();
      const bool is_untouched = !witnesses_.empty() && witnesses_[index].is_stand_in && grad.defined() &&
                                grad.unsafeGetTensorImpl() == witnesses_[index].grad &&
                                grad._version() == witnesses_[index].version;
      if (is_untouched) member.shard.mutable_grad().reset();
      if (!witnesses_.empty()) witnesses_[index] = {};
      hand_out(member, flat);
    }
  }
}

void GradientReduction::hand_out(const Member& member, const at::Tensor& flat) {
  const auto& shard = member.shard;
  const auto dtype = policy_.keep_low_precision_grads ? flat.scalar_type() : shard.scalar_type();
  const bool is_pinned = shard.device().is_cpu() && !flat.device().is_cpu() && shard.is_pinned();
  auto& grad = shard.mutable_grad();
  // A copy to the host that somebody reads at once must be there.
  const bool is_async = is_pinned && !grad.defined() && !has_hooks(shard);
  auto part = part_of(flat, {0, shard.numel()}).view(shard.sizes());
  if (is_pinned) {
    auto host = at::empty(shard.sizes(), shard.options().dtype(dtype).pinned_memory(true).requires_grad(false));
    if (is_async) copying_ = current_stream(part.device());
    part = host.copy_(part, is_async);
  } else if (part.scalar_type() != dtype || part.device() != shard.device()) {
    part = part.to(shard.device(), dtype);
  }
  part = run_hooks(shard, part.detach());
  if (grad.defined()) {
    grad.add_(part);
  } else {
    grad = part;
  }
  if (group_->getSize() > 1 || member.cut_before) mark_part(grad);
  if (const auto& after = torch::autograd::impl::post_acc_grad_hooks(shard)) (*after)(shard);
}

void GradientReduction::finish_copies() {
  if (copying_) copying_->synchronize();
  copying_.reset();
}

void GradientReduction::drop() {
  for (auto* list : {&scattering_, &replicating_}) {
    for (auto& reduction : std::exchange(*list, {})) {
      try {
        reduction.pending.wait();
        // NOLINTNEXTLINE(bugprone-empty-catch): what it would have given is dropped
      } catch (const std::exception&) {
      }
    }
  }
  for (const auto& reduction : std::exchange(reduced_, {})) {
    if (reduction.hooked) reduction.hooked->block(current_stream(reduction.output.device()));
  }
  partials_.clear();
  for (std::size_t i = 0; i < witnesses_.size(); ++i) {
    if (witnesses_[i].is_stand_in && !is_zeroed(i)) members_[i].shard.mutable_grad().reset();
  }
  witnesses_.clear();
  for (auto& member : members_) {
    for (auto& handle : member.handles) {
      drop_grad(handle);
      handle.kept_grad.reset();
    }
  }
}

int64_t GradientReduction::buffer_bytes() const {
  int64_t bytes = 0;
  for (const auto& member : members_) {
    const auto dtype = reduce_dtype(member.handles.front().tensor().scalar_type());
    bytes += member.cut.padded() * (group_->getSize() + 1) * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return bytes;
}

}  // namespace lockstep::detail
