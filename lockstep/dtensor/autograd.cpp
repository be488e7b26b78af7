#include "lockstep/dtensor/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "lockstep/dtensor/check_result.h"
#include "lockstep/dtensor/idle_work.h"
#include "lockstep/dtensor/redistribute_local.h"
#include "lockstep/intercept/part_mark.h"

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::tensor_list;

/// What a node keeps beside its tensors.
template <class T>
struct Kept : torch::CustomClassHolder {
  explicit Kept(T kept) : value(std::move(kept)) {}
  T value;
};

template <class T>
void keep(AutogradContext& context, T value) {
  context.saved_data["kept"] = c10::IValue::make_capsule(c10::make_intrusive<Kept<T>>(std::move(value)));
}

template <class T>
const T& kept(AutogradContext& context) {
  return static_cast<const Kept<T>*>(context.saved_data["kept"].toCapsule().get())->value;
}

/// Of memory that autograd need not know as a view: a result of a Function that is one cannot be written.
at::Tensor another_handle(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below_views;
  auto handle = at::alias(tensor);
  if (!tensor.is_inference()) {
    handle.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  }
  return handle;
}

/// A node costs more than all the rest; most backward passes and all evaluations need none.
bool is_recorded(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

LayoutPtr layout_with(const Layout& layout, const Placements& placements) {
  return std::make_shared<const Layout>(layout.mesh(), placements, layout.sizes());
}

struct Wrapped {
  LayoutPtr layout;
  Placements grad_placements;
  bool marks_gradient = false;
};

class FromLocal : public Function<FromLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const Wrapped& wrapped) {
    context->set_materialize_grads(false);
    keep(*context, wrapped);
    // The tensor itself, not its memory: who gives a parameter other memory, as a load does, gives it to both.
    auto result = wrap_local(local, wrapped.layout);
    check_result("DTensor::from_local()", result);
    return result;
  }

  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto& wrapped = kept<Wrapped>(*context);
    const auto gradient = redistribute_differentiably(gradients[0], wrapped.grad_placements, {.async_op = true});
    const auto local = unwrap_differentiably(gradient, gradient_placements(wrapped.grad_placements));
    if (wrapped.marks_gradient) mark_part(local);
    return {local, at::Tensor()};
  }
};

class ToLocal : public Function<ToLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor, const Placements& grad_placements) {
    context->set_materialize_grads(false);
    const auto* impl = dtensor_impl(dtensor);
    keep(*context, layout_with(*impl->layout(), grad_placements));
    return another_handle(impl->local());
  }

  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto& layout = kept<LayoutPtr>(*context);
    return {wrap_differentiably(gradients[0], layout, gradient_placements(layout->placements())), at::Tensor()};
  }
};

struct Target {
  Placements to;
  RedistributeOptions options;
};

at::Tensor moved_to(const at::Tensor& dtensor, const Target& target) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto* impl = dtensor_impl(dtensor);
  const auto& options = target.options;
  const auto local = options.forward_dtype ? impl->local().to(*options.forward_dtype) : impl->local();
  auto layout = layout_with(*impl->layout(), target.to);
  if (!options.async_op) {
    auto moved = wrap_local(redistribute_local(local, *impl->layout(), target.to), std::move(layout));
    check_result("DTensor::redistribute()", moved);
    return moved;
  }
  auto pending = std::make_shared<PendingLocal>(launch_redistribute_local(local, *impl->layout(), target.to));
  auto moved = wrap_local(pending->tensor(), std::move(layout));
  dtensor_impl(moved)->set_wait([pending] {
    do_idle_work();
    return pending->wait();
  });
  check_result("DTensor::redistribute()", moved);
  return moved;
}

struct Back {
  Placements placements;
  RedistributeOptions options;
  at::ScalarType dtype;
};

class Redistribute : public Function<Redistribute> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& dtensor, const Target& target) {
    context->set_materialize_grads(false);
    const auto* impl = dtensor_impl(dtensor);
    const auto& options = target.options;
    keep(*context, Back{.placements = gradient_placements(impl->placements()),
                        .options = {.async_op = options.async_op,
                                    .forward_dtype = options.backward_dtype,
                                    .backward_dtype = options.forward_dtype},
                        .dtype = dtensor.scalar_type()});
    return moved_to(dtensor, target);
  }

  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto& back = kept<Back>(*context);
    return {redistribute_differentiably(gradients[0], back.placements, back.options).to(back.dtype), at::Tensor()};
  }
};

}  // namespace

at::Tensor wrap_differentiably(const at::Tensor& local, const LayoutPtr& layout, const Placements& grad_placements) {
  if (!is_recorded(local)) {
    auto result = wrap_local(local, layout);
    check_result("DTensor::from_local()", result);
    return result;
  }
  return FromLocal::apply(local, Wrapped{.layout = layout, .grad_placements = grad_placements});
}

at::Tensor wrap_parameter(const at::Tensor& leaf, const LayoutPtr& layout) {
  return FromLocal::apply(leaf, Wrapped{.layout = layout,
                                        .grad_placements = gradient_placements(layout->placements()),
                                        .marks_gradient = !layout->dividing_axes().empty()});
}

at::Tensor unwrap_differentiably(const at::Tensor& dtensor, const Placements& grad_placements) {
  if (!is_recorded(dtensor)) return another_handle(dtensor_impl(dtensor)->local());
  return ToLocal::apply(dtensor, grad_placements);
}

at::Tensor redistribute_differentiably(const at::Tensor& dtensor, const Placements& placements,
                                       const RedistributeOptions& options) {
  const auto* impl = dtensor_impl(dtensor);
  const bool stays = impl->placements() == placements;
  if (stays && (!options.forward_dtype || *options.forward_dtype == dtensor.scalar_type())) return dtensor;
  const Target target{.to = placements, .options = options};
  return is_recorded(dtensor) ? Redistribute::apply(dtensor, target) : moved_to(dtensor, target);
}

}  // namespace lockstep::detail
