#include "lockstep/tp/operator_style.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/autograd.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/intercept/storage_owner.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/tp/parallel_linear.h"
#include "lockstep/tp/refused_gradient.h"

namespace lockstep::detail {
namespace {

/// An operator that is the work of a layer, and which argument is the layer's input.
struct LayerOperator {
  std::string_view name;
  std::size_t input;
};

constexpr std::array kLayerOperators = {
    LayerOperator{"aten::linear", 0},     LayerOperator{"aten::matmul", 0},   LayerOperator{"aten::mm", 0},
    LayerOperator{"aten::addmm", 1},      LayerOperator{"aten::bmm", 0},      LayerOperator{"aten::embedding", 1},
    LayerOperator{"aten::layer_norm", 0}, LayerOperator{"aten::rms_norm", 0},
};

bool is_view(const OperatorCall& call) {
  const auto& returns = call.schema().returns();
  return returns.size() == 1 && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
}

/// Programs freeze parameters through members as well as through parameters(): whichever was told last counts.
void agree_on_training(const at::Tensor& member, const at::Tensor& leaf, DTensorImpl& impl) {
  const bool member_was_told = member.is_leaf() && member.requires_grad() != impl.was_trainable();
  if (member.requires_grad() != leaf.requires_grad()) {
    (member_was_told ? leaf : member)
        .set_requires_grad(member_was_told ? member.requires_grad() : leaf.requires_grad());
  }
  impl.set_was_trainable(leaf.requires_grad());
}

/// torch::autograd::grad() with respect to a member is that with respect to what is registered, whose accumulator lives
/// as long as a graph has it. libtorch 2.11 has another kind of pointer to it.
template <class Weak>
void share_accumulator(void (&set)(const at::Tensor&, Weak), const at::Tensor& member, const at::Tensor& leaf) {
  if (!at::GradMode::is_enabled() || !leaf.requires_grad() || !leaf.is_leaf() || !member.is_leaf()) return;
  set(member, Weak(torch::autograd::impl::grad_accumulator(leaf)));
}

DTensorImpl* styled(const c10::IValue& value) {
  auto* impl = value.isTensor() ? dtensor_impl(value.toTensor()) : nullptr;
  return impl != nullptr && impl->style() ? impl : nullptr;
}

/// What the operator multiplies by, [in, out]; undefined if it does something else.
at::Tensor weight_of(const OperatorCall& call) {
  at::Tensor weight;
  if (call.name() == "aten::matmul" || call.name() == "aten::mm") weight = call.argument(1).toTensor();
  if (call.name() == "aten::linear") weight = call.argument(1).toTensor().t();
  if (call.name() == "aten::addmm") weight = call.argument(2).toTensor();
  return weight.defined() && weight.dim() == 2 ? weight : at::Tensor();
}

}  // namespace

at::Tensor InputMemo::find(const at::Tensor& input, const void* layer, const Placement& layout,
                           const Placement& desired) {
  const std::lock_guard lock(mutex_);
  const auto held = input_.lock();
  if (!held || held.get() != input.unsafeGetTensorImpl() || input.is_inference() || version_ != input._version()) {
    return {};
  }
  if (!(layout == layout_) || !(desired == desired_) || is_recorded_ != at::GradMode::is_enabled()) return {};
  // A layer that asks again is in another forward: whatever was written to the input since, by whoever, must be seen.
  if (std::find(layers_.begin(), layers_.end(), layer) != layers_.end()) return {};
  auto result = result_.lock();
  if (!result) return {};
  layers_.push_back(layer);
  return at::Tensor(std::move(result));
}

void InputMemo::remember_output(const at::Tensor& output) {
  const std::lock_guard lock(mutex_);
  output_ = output.getIntrusivePtr();
}

bool InputMemo::is_output(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const auto* impl = tensor.unsafeGetTensorImpl();
  return output_.lock().get() == impl || (input_is_output_ && input_.lock().get() == impl);
}

void InputMemo::remember(const at::Tensor& input, const void* layer, const Placement& layout, const Placement& desired,
                         const at::Tensor& result) {
  if (input.is_inference()) return;
  const bool is_output_of_layer = is_output(input);
  const std::lock_guard lock(mutex_);
  input_is_output_ = is_output_of_layer;
  input_ = input.getIntrusivePtr();
  version_ = input._version();
  is_recorded_ = at::GradMode::is_enabled();
  layout_ = layout;
  desired_ = desired;
  layers_.assign(1, layer);
  result_ = result.getIntrusivePtr();
  kept_ = is_recorded_ ? at::Tensor() : result;
}

LayerStyle::LayerStyle(DeviceMesh mesh, LayerLayouts layouts, std::shared_ptr<InputMemo> memo)
    : mesh_(std::move(mesh)), layouts_(std::move(layouts)), memo_(std::move(memo)) {}

void LayerStyle::run(OperatorCall& call) {
  const auto found = std::find_if(kLayerOperators.begin(), kLayerOperators.end(),
                                  [&](const auto& each) { return each.name == call.name(); });
  const bool is_layer = found != kLayerOperators.end() && styled(call.argument(found->input)) == nullptr;
  const bool adds = (call.name() == "aten::add_" || call.name() == "aten::add") && call.argument(0).isTensor() &&
                    !is_dtensor(call.argument(0).toTensor()) && call.argument(1).toTensor().dim() == 1;
  const auto* viewed = is_view(call) ? styled(call.argument(0)) : nullptr;
  const auto style = viewed != nullptr ? viewed->style() : nullptr;
  put_real_tensors(call);
  if (is_layer) return run_layer(call, found->input);
  if (adds) return run_bias(call);
  call.proceed();
  // A view of a parameter is one: a layer multiplies by its weight's transpose.
  if (style && call.result(0).isTensor()) {
    const auto view = call.result(0).toTensor();
    const auto* impl = dtensor_impl(view);
    auto stand_in = wrap_local(impl->local(), impl->layout());
    dtensor_impl(stand_in)->set_style(style, view);
    call.result(0) = std::move(stand_in);
  }
}

/// A member has no history of its own. It gets one for each operator, from what the registered parameter is now: it may
/// have been frozen, loaded or moved since the last. Autograd keeps the real ones, so that in backward no style acts.
void LayerStyle::put_real_tensors(OperatorCall& call) const {
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    auto& value = call.argument(i);
    if (value.isTensor()) {
      value = real_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorList()) list.push_back(real_tensor(each));
      value = std::move(list);
    }
  }
}

at::Tensor LayerStyle::real_tensor(const at::Tensor& tensor) const {
  auto* impl = dtensor_impl(tensor);
  if (impl == nullptr || !impl->style()) return tensor;
  if (impl->real().defined()) return impl->real();
  const auto& leaf = impl->local();
  agree_on_training(tensor, leaf, *impl);
  if (storage_owner_of(leaf)) {
    // A unit that is gathered only now tells whether the parameter is trained now, which autograd must know first.
    leaf.detach();
    agree_on_training(tensor, leaf, *impl);
  }
  impl->follow_dtype();
  TORCH_CHECK(!has_gradient_hooks(tensor), "[lockstep/tp] rank ", mesh_.get_rank(), ": a member of '", layouts_.path,
              "' has a hook for its gradient, which nobody would call: gradients are those of the registered ",
              "parameters. Register it there, in named_parameters(), for this rank's part.");
  TORCH_CHECK(leaf.sizes() == at::IntArrayRef(impl->layout()->local_sizes()), "[lockstep/tp] rank ", mesh_.get_rank(),
              ": a parameter of '", layouts_.path, "' has sizes ", leaf.sizes(),
              " now, and this rank's part of it has [", join(impl->layout()->local_sizes(), ", "),
              "]. Load a state dict of parts, or load before parallelize_module().");
  auto real = wrap_parameter(leaf, impl->layout());
  share_accumulator(torch::autograd::impl::set_grad_accumulator, tensor, leaf);
  return real;
}

/// This rank's piece of an input. A layer that knows how many features its input has also knows uneven pieces of it.
DTensor LayerStyle::piece_of_input(const at::Tensor& piece, std::optional<int64_t> features) const {
  const auto cut = sharded_dim(layouts_.input);
  if (features && cut && piece.dim() > 0 && (*cut < 0 ? *cut + piece.dim() : *cut) == piece.dim() - 1) {
    auto sizes = piece.sizes().vec();
    sizes.back() = *features;
    const Layout layout(mesh_, {layouts_.input}, sizes);
    if (piece.sizes() == at::IntArrayRef(layout.local_sizes())) {
      return DTensor::from_local(piece, mesh_, {layouts_.input},
                                 {.shape = sizes, .stride = strides_like(piece, sizes)});
    }
  }
  if (cut) memo_->piece_sizes().check(piece, mesh_, layouts_.path, layouts_.compares_pieces);
  return DTensor::from_local(piece, mesh_, {layouts_.input});
}

at::Tensor LayerStyle::prepared(const at::Tensor& input, std::optional<int64_t> features) const {
  // Plain tensors without gradients may be batches: memory that programs fill again without a word to anyone.
  const bool is_shared =
      is_dtensor(input) || (input.requires_grad() && at::GradMode::is_enabled()) || memo_->is_output(input);
  if (is_shared) {
    if (auto known = memo_->find(input, this, layouts_.input, layouts_.desired); known.defined()) return known;
  }
  const auto tensor = is_dtensor(input) ? DTensor(input) : piece_of_input(input, features);
  TORCH_CHECK(!features || (input.dim() > 0 && tensor.tensor().size(-1) == *features), "[lockstep/tp] rank ",
              mesh_.get_rank(), ": '", layouts_.path, "' takes ", *features, " features, and got a tensor of sizes ",
              tensor.tensor().sizes(),
              is_dtensor(input) ? ""
                                : str(", of which the given one, of sizes [", join(input.sizes().vec(), ", "),
                                      "], is this rank's piece if its layout is ", to_string(layouts_.input)),
              !is_dtensor(input) && sharded_dim(layouts_.input) && input.dim() > 0 && input.size(-1) == *features
                  ? ". If it is whole on every rank, give the style input_layouts = Replicate()."
                  : ".");
  TORCH_CHECK(tensor.device_mesh() == mesh_, "[lockstep/tp] rank ", mesh_.get_rank(), ": '", layouts_.path,
              "' lies on ", mesh_, " and gets an input on ", tensor.device_mesh(), ".");
  const auto result = tensor.redistribute({layouts_.desired}, {.async_op = true});
  if (is_shared) memo_->remember(input, this, layouts_.input, layouts_.desired, result);
  return result;
}

at::Tensor LayerStyle::finished(const at::Tensor& result) const {
  auto output = DTensor(result);
  if (layouts_.output) output = output.redistribute({*layouts_.output}, {.async_op = !layouts_.use_local_output});
  if (layouts_.takes_masks) dtensor_impl(output)->set_takes_replicas();
  return given_out(output);
}

at::Tensor LayerStyle::given_out(const DTensor& output) const {
  if (!layouts_.use_local_output) return output.tensor();
  auto local = output.to_local();
  memo_->remember_output(local);
  return local;
}

void LayerStyle::run_layer(OperatorCall& call, std::size_t input) const {
  const auto weight = weight_of(call);
  const auto x = prepared(call.argument(input).toTensor(),
                          weight.defined() ? std::optional<int64_t>(weight.size(0)) : std::nullopt);
  if (auto product = product_of(call, x, weight); product.defined()) return call.replace({std::move(product)});
  call.argument(input) = x;
  call.proceed();
  call.result(0) = finished(call.result(0).toTensor());
}

/// What the operator gives if it multiplies by the layer's weight in one of the two usual ways; else undefined.
at::Tensor LayerStyle::product_of(const OperatorCall& call, const at::Tensor& input, const at::Tensor& weight) const {
  const bool is_addmm = call.name() == "aten::addmm";
  if (is_addmm && !(call.argument(3).toScalar().equal(1) && call.argument(4).toScalar().equal(1))) return {};
  at::Tensor bias;
  if (is_addmm) bias = call.argument(0).toTensor();
  if (call.name() == "aten::linear" && call.argument(2).isTensor()) bias = call.argument(2).toTensor();
  if (!weight.defined() || !is_parallel_product(input, weight) || (bias.defined() && !is_dtensor(bias))) return {};
  auto result = parallel_product(input, weight, {.input_reshard = layouts_.input_reshard});
  if (!bias.defined()) return finished(result);
  // A bias that is cut is added before the output's layout is made, a whole one once, after terms are summed.
  if (!DTensor(bias).layout().is_replicated()) return finished(result + bias);
  return given_out(DTensor(DTensor(result).redistribute({layouts_.output.value_or(Replicate())}).tensor() + bias));
}

/// libtorch's linear adds the bias to what the product has become, in place: a local tensor of the output's layout. The
/// bias is added as this rank needs it there.
void LayerStyle::run_bias(OperatorCall& call) const {
  const auto output = call.argument(0).toTensor();
  const DTensor bias(call.argument(1).toTensor());
  const auto dims = output.dim();
  auto cut = sharded_dim(layouts_.output.value_or(Replicate()));
  if (cut && *cut < 0) *cut += dims;
  if (cut && *cut == dims - 1) {
    const auto moved = bias.redistribute({Shard(bias.tensor().dim() - 1)});
    call.argument(1) = moved.to_local();
  } else {
    const Placement gradient = cut ? Placement(Partial()) : Placement(Replicate());
    call.argument(1) = bias.redistribute({Replicate()}).to_local({.grad_placements = Placements{gradient}});
  }
  call.proceed();
}

at::Tensor make_member(const at::Tensor& leaf, std::shared_ptr<OperatorStyle> style, const std::string& name) {
  const auto layout = layout_of(leaf);
  TORCH_INTERNAL_ASSERT(layout != nullptr, "[lockstep/tp] ", name, " has no layout");
  auto member = wrap_local(leaf, layout);
  dtensor_impl(member)->set_style(std::move(style));
  member.set_requires_grad(leaf.requires_grad());
  dtensor_impl(member)->set_was_trainable(leaf.requires_grad());
  member.mutable_grad() = make_refused_gradient_of_member(member, name);
  return member;
}

}  // namespace lockstep::detail
