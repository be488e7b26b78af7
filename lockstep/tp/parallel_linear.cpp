#include "lockstep/tp/parallel_linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "lockstep/dtensor/autograd.h"
#include "lockstep/dtensor/check_result.h"
#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/dtensor/idle_work.h"
#include "lockstep/dtensor/rule.h"

namespace lockstep::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::tensor_list;

/// What is cut in a product of this kind: the result, or what it sums over.
struct Kind {
  explicit Kind(const DTensorImpl& weight)
      : cut(weight.placements().front()), is_by_column(sharded_dim(cut) == std::optional<int64_t>(1)) {}

  Placement cut;  // of the weight
  bool is_by_column;
};

at::Tensor wrap_as(const at::Tensor& local, const DTensorImpl& like, const Placement& placement,
                   at::IntArrayRef sizes) {
  return wrap_local(local, std::make_shared<const Layout>(like.mesh(), Placements{placement}, sizes.vec()));
}

/// As rows, which may be empty.
at::Tensor flat(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const auto leading = tensor.sizes().slice(0, static_cast<std::size_t>(tensor.dim() - 1));
  return tensor.reshape({c10::multiply_integers(leading), tensor.size(-1)});
}

/// Each rank's part of what all hold, along the longest dim: it leaves the least on any rank.
at::Tensor part_of(const at::Tensor& whole) {
  const auto sizes = whole.sizes();
  const auto longest = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
  return redistribute_differentiably(whole, {Shard(longest)}, {});
}

/// The input of backward: gathered, if a part is what was kept of it. Waited for where it is used.
at::Tensor whole_input(const at::Tensor& kept, bool is_cut) {
  return is_cut ? redistribute_differentiably(kept, {Replicate()}, {.async_op = true}) : kept;
}

/// A DTensor like `like` whose local tensor is computed when it is needed.
at::Tensor late_like(const at::Tensor& like, std::function<at::Tensor()> compute) {
  const auto* impl = dtensor_impl(like);
  const auto late = LateTensor::make(std::move(compute));
  auto result = wrap_local(at::empty({0}, impl->local().options().requires_grad(false)), impl->layout());
  dtensor_impl(result)->set_wait([late] { return late->get(); });
  return result;
}

class ParallelProduct : public Function<ParallelProduct> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& part) {
    context->set_materialize_grads(false);
    context->save_for_backward({part.value_or(input), weight});
    context->saved_data["is_cut"] = part.has_value();
    const auto* x = dtensor_impl(input);
    const auto* w = dtensor_impl(weight);
    const Kind kind(*w);
    const auto local = x->local().matmul(w->local());
    auto sizes = input.sizes().vec();
    sizes.back() = weight.size(1);
    const auto placement = kind.is_by_column ? cut_of(kind.cut, input.dim() - 1) : Placement(Partial());
    auto result = wrap_as(local, *x, placement, sizes);
    check_result("the product of a parallel layer", result);
    return result;
  }

  static tensor_list backward(AutogradContext* context, const tensor_list& gradients) {
    const auto& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const auto saved = context->get_saved_variables();
    const auto needs_weight = context->needs_input_grad(1);
    const auto input = whole_input(saved[0], needs_weight && context->saved_data["is_cut"].toBool());
    const auto& weight = saved[1];
    const auto* x = dtensor_impl(input);
    const auto* w = dtensor_impl(weight);
    const Kind kind(*w);
    const auto expected = kind.is_by_column ? cut_of(kind.cut, input.dim() - 1) : Placement(Replicate());
    const auto* dy = dtensor_impl(gradient);
    if (at::GradMode::is_enabled() || !(dy->placements().front() == expected)) {
      return {context->needs_input_grad(0)
                  ? gradient.matmul(weight.to(gradient.scalar_type()).t().conj()).to(input.scalar_type())
                  : at::Tensor(),
              needs_weight
                  ? flat(input).to(gradient.scalar_type()).t().conj().matmul(flat(gradient)).to(weight.scalar_type())
                  : at::Tensor(),
              at::Tensor()};
    }
    // In the precision of the forward's product: a unit's, or autocast's.
    const auto dtype = dy->local().scalar_type();
    at::Tensor of_input;
    if (context->needs_input_grad(0)) {
      const auto local = dy->local().matmul(w->local().to(dtype).t().conj()).to(input.scalar_type());
      of_input = wrap_as(local, *x, kind.is_by_column ? Placement(Partial()) : x->placements().front(), input.sizes());
      check_result("the input's gradient of a parallel layer", of_input);
    }
    if (!needs_weight) return {of_input, at::Tensor(), at::Tensor()};
    const auto compute = [input, of_y = dy->local(), dtype, of_weight = w->local().scalar_type()] {
      const at::NoGradGuard no_grad;
      return flat(dtensor_impl(input)->local()).to(dtype).t().conj().matmul(flat(of_y)).to(of_weight);
    };
    // Terms of the input's gradient will be summed: the weight's can wait until that is under way.
    const bool can_wait = kind.is_by_column && of_input.defined();
    return {of_input, can_wait ? late_like(weight, compute) : wrap_local(compute(), w->layout()), at::Tensor()};
  }
};

}  // namespace

bool is_parallel_product(const at::Tensor& input, const at::Tensor& weight) {
  const auto* x = dtensor_impl(input);
  const auto* w = dtensor_impl(weight);
  if (x == nullptr || w == nullptr || x->mesh().ndim() != 1 || weight.dim() != 2 || input.dim() < 1) return false;
  if (input.size(-1) != weight.size(0)) return false;
  if (!sharded_dim(w->placements().front()) || !(x->mesh() == w->mesh())) return false;
  const Kind kind(*w);
  const auto& held = x->placements().front();
  if (kind.is_by_column) return std::holds_alternative<Replicate>(held);
  return sharded_dim(held) == input.dim() - 1 && held.index() == kind.cut.index();
}

at::Tensor parallel_product(const at::Tensor& input, const at::Tensor& weight, const ProductOptions& options) {
  const bool keeps_part = options.input_reshard && at::GradMode::is_enabled() && weight.requires_grad() &&
                          dtensor_impl(input)->layout()->is_replicated();
  // An operand of its own, so that second derivatives find their way through it.
  return ParallelProduct::apply(input, weight, keeps_part ? std::optional<at::Tensor>(part_of(input)) : std::nullopt);
}

}  // namespace lockstep::detail
