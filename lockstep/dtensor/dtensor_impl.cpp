#include "lockstep/dtensor/dtensor_impl.h"

#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <typeinfo>
#include <utility>

#include "lockstep/intercept/key.h"

namespace lockstep::detail {
namespace {

constexpr auto kNoMemory =
    "[lockstep/dtensor] a DTensor has no data pointer: its elements lie on the ranks of a mesh. Take what this rank "
    "holds with lockstep::DTensor(tensor).to_local(), or all of it with full_tensor(). To print it, print "
    "lockstep::DTensor(tensor), which is its to_string(), or one of those two.";

c10::DispatchKeySet keys_for(const at::Tensor& local) {
  install_kernel_interceptor();
  // The backend's own key is there for autograd's and autocast's sake: its kernels are never reached.
  auto keys = c10::DispatchKeySet(c10::DispatchKey::Dense) | c10::DispatchKeySet(local.key_set().highestBackendKey());
  keys = keys.add(kKernelKey);
  return is_marked_intercepted(local) ? keys.add(kInterceptKey) : keys;
}

/// In inference mode views of ordinary tensors are ordinary ones, whose counter of writes they share.
class OrdinaryIf {
 public:
  explicit OrdinaryIf(bool has_counter) {
    if (has_counter && c10::InferenceMode::is_enabled()) mode_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> mode_;
};

}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides)
    : RuledTensorImpl(keys_for(local), local.dtype(), local.device()),
      local_(std::move(local)),
      layout_(std::move(layout)) {
  set_sizes_and_strides(layout_->sizes(), strides);
  set_storage_access_should_throw();
  set_custom_device(local_.is_meta());
  // For all who want its memory: libtorch's operator<< comes to it with no operator that we could answer.
  extra_meta_ = std::make_unique<c10::ExtraMeta>();
  extra_meta_->custom_data_ptr_error_msg_ = kNoMemory;
  // One counter: a write to either is a write to the other.
  if (!local_.is_inference() && !is_inference()) {
    set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
  }
}

const at::Tensor& DTensorImpl::local() const {
  if (wait_) local_ = std::exchange(wait_, {})();
  TORCH_CHECK(!copied_version_ || *copied_version_ == version_counter().current_version(), "[lockstep/dtensor] rank ",
              mesh().get_rank(), ": a view of sizes ", sizes(), " and placements ", to_string(placements()),
              " had to be copied, because what it is a view of lies on the ranks in another way, and that has been "
              "written in place since. Make the view again, or redistribute() before it.");
  return local_;
}

void DTensorImpl::set_style(std::shared_ptr<OperatorStyle> style, at::Tensor real) {
  install_interceptor();
  key_set_ = key_set_.add(kInterceptKey);
  style_ = std::move(style);
  real_ = std::move(real);
}

void DTensorImpl::set_copied(const DTensorImpl& original) {
  is_copied_ = true;
  if (is_inference() || !original.version_counter().enabled()) return;
  set_version_counter(original.version_counter());
  copied_version_ = version_counter().current_version();
}

bool DTensorImpl::try_write() {
  if (is_copied_ && (is_inference() || !unique_version())) return false;
  is_copied_ = false;
  copied_version_.reset();
  return true;
}

TensorRule* DTensorImpl::kernel_rule() const {
  return &dtensor_rule();
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  const auto held = local();
  const OrdinaryIf ordinary(version_counter.enabled());
  auto copy = c10::make_intrusive<DTensorImpl>(held, layout_, strides());
  copy->set_version_counter(version_counter);
  copy->set_allow_tensor_metadata_change(allow_tensor_metadata_change);
  if (style_) copy->set_style(style_, real_);
  copy->takes_replicas_ = takes_replicas_;
  copy->is_copied_ = is_copied_;
  // A counter of its own says nothing of the original.
  if (copied_version_ && version_counter.enabled() && version_counter.current_version() == *copied_version_) {
    copy->copied_version_ = copied_version_;
  }
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  const auto counter = std::move(version_counter);
  return shallow_copy_and_detach(counter, allow_tensor_metadata_change);
}

void DTensorImpl::release_resources() {
  TensorImpl::release_resources();
  local_.reset();
  wait_ = {};
  real_.reset();
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  const auto* other = dynamic_cast<const DTensorImpl*>(impl.get());
  TORCH_CHECK(other != nullptr, "[lockstep/dtensor] a DTensor of sizes ", sizes(),
              " is given the data of an ordinary tensor. Make a DTensor of it first: distribute_tensor().");
  TensorImpl::shallow_copy_from(impl);
  local_ = other->local();
  wait_ = {};
  layout_ = other->layout_;
  takes_replicas_ = other->takes_replicas_;
  is_copied_ = other->is_copied_;
  copied_version_.reset();
}

DTensorImpl* dtensor_impl(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->key_set().has(kKernelKey)) return nullptr;
  // Nothing is derived from it, so this is a cast that costs a comparison.
  auto* impl = tensor.unsafeGetTensorImpl();
  return typeid(*impl) == typeid(DTensorImpl) ? static_cast<DTensorImpl*>(impl) : nullptr;
}

bool is_even(const Layout& layout) {
  auto sizes = layout.sizes();
  for (std::size_t axis = 0; axis < layout.placements().size(); ++axis) {
    const auto& placement = layout.placements()[axis];
    const auto dim = sharded_dim(placement);
    if (!dim) continue;
    const auto* strided = std::get_if<StridedShard>(&placement);
    const auto parts =
        layout.mesh().size(static_cast<int64_t>(axis)) * (strided != nullptr ? strided->split_factor : 1);
    auto& size = sizes[static_cast<std::size_t>(*dim)];
    if (std::holds_alternative<RaggedShard>(placement) || size % parts != 0) return false;
    size /= layout.mesh().size(static_cast<int64_t>(axis));
  }
  return true;
}

std::vector<int64_t> strides_like(const at::Tensor& local, at::IntArrayRef sizes) {
  const auto count = sizes.size();
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const bool has_order = static_cast<std::size_t>(local.dim()) == count && !local.is_contiguous();
  if (has_order) {
    const auto strides = local.strides();
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return strides[a] > strides[b]; });
  }
  std::vector<int64_t> result(count);
  int64_t stride = 1;
  for (auto i = count; i > 0; --i) {
    const auto dim = order[i - 1];
    result[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return result;
}

at::Tensor wrap_local(at::Tensor local, LayoutPtr layout) {
  const auto strides =
      is_even(*layout) ? strides_like(local, layout->sizes()) : at::detail::defaultStrides(layout->sizes());
  return wrap_local(std::move(local), std::move(layout), strides);
}

at::Tensor wrap_local(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides) {
  return at::detail::make_tensor<DTensorImpl>(std::move(local), std::move(layout), strides);
}

at::Tensor wrap_view(at::Tensor local, LayoutPtr layout, at::IntArrayRef strides, bool has_counter) {
  const OrdinaryIf ordinary(has_counter);
  return wrap_local(std::move(local), std::move(layout), strides);
}

std::vector<int64_t> elementwise_strides(const OperatorCall& call, const c10::TensorImpl& operand) {
  if (operand.is_contiguous()) return operand.strides().vec();
  const auto& last = call.schema().arguments().back();
  const auto& format = call.argument(call.argument_count() - 1);
  const bool wants_contiguous =
      last.name() == "memory_format" && format.isInt() && format.toMemoryFormat() == at::MemoryFormat::Contiguous;
  if (!wants_contiguous && operand.is_non_overlapping_and_dense()) return operand.strides().vec();
  return at::detail::defaultStrides(operand.sizes());
}

void replay_views() {
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

Placements gradient_placements(const Placements& placements) {
  auto result = placements;
  for (auto& each : result) {
    if (std::holds_alternative<Partial>(each)) each = Replicate();
  }
  return result;
}

}  // namespace lockstep::detail
