// How operators on DTensors run: below autograd, by the operator's rule, on local tensors.
#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "lockstep/dtensor/check_result.h"
#include "lockstep/dtensor/choose.h"
#include "lockstep/dtensor/fast_path.h"
#include "lockstep/dtensor/redistribute_local.h"
#include "lockstep/dtensor/rule.h"
#include "lockstep/intercept/key.h"

namespace lockstep::detail {
namespace {

/// Lets operators come to rules below autograd again.
class LetIn {
 public:
  LetIn() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kKernelKey)) {
    c10::impl::tls_set_dispatch_key_excluded(kKernelKey, false);
  }
  ~LetIn() { c10::impl::tls_set_dispatch_key_excluded(kKernelKey, was_excluded_); }
  LetIn(const LetIn&) = delete;
  LetIn& operator=(const LetIn&) = delete;

 private:
  const bool was_excluded_;
};

/// Operators on lists of tensors have a form that works on one after the other, for devices without a kernel of theirs.
bool is_for_each(const c10::OperatorHandle& op) {
  return op.schema().name().starts_with("aten::_foreach_") &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) || is_for_each(op);
}

torch::jit::Stack arguments_of(const OperatorCall& call) {
  torch::jit::Stack stack;
  stack.reserve(call.argument_count());
  for (std::size_t i = 0; i < call.argument_count(); ++i) stack.push_back(call.argument(i));
  return stack;
}

/// A composite operator reaches us whole where autograd, which takes it apart otherwise, is out of the way.
void decompose(OperatorCall& call) {
  auto stack = arguments_of(call);
  const LetIn let_in;
  // The CPU has no kernels of its own for lists: this is the form for all devices.
  const auto key = is_for_each(call.op()) ? c10::DispatchKey::CPU : c10::DispatchKey::AutogradCPU;
  call.op().redispatchBoxed(c10::DispatchKeySet(key), &stack);
  call.replace(std::move(stack));
}

[[noreturn]] void refuse(const RuleCall& call) {
  TORCH_CHECK(false, call.describe(),
              ": this operator has no rule for DTensors. Use to_local() or full_tensor() before ",
              "it, or open a scope of ImplicitReplication to have its arguments replicated.");
}

/// Puts tensors into the places of the operands, in order.
void put(torch::jit::Stack& arguments, const RuleCall& call, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    auto& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = tensors[next++];
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorList()) list.push_back(each.defined() ? tensors[next++] : each);
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        list.push_back(each && each->defined() ? std::optional<at::Tensor>(tensors[next++]) : each);
      }
      value = std::move(list);
    }
  }
  TORCH_INTERNAL_ASSERT(next == call.operands().size());
}

const at::Tensor& local_of(const Operand& operand) {
  const auto* impl = dtensor_impl(operand.tensor);
  return impl != nullptr ? impl->local() : operand.tensor;
}

/// The layout of one of the operands if it is the one wanted: most results have it, and share it then.
LayoutPtr shared_layout(const RuleCall& call, const Placements& placements, const Sizes& sizes) {
  for (const auto& operand : call.operands()) {
    if (operand.layout->placements() == placements && operand.layout->sizes() == sizes) return operand.layout;
  }
  return std::make_shared<const Layout>(call.mesh(), placements, sizes);
}

/// Local results as DTensors; what is written in place as the argument that it is.
class Wrapper {
 public:
  Wrapper(const OperatorCall& call, const RuleCall& rule_call, const std::vector<LayoutPtr>& layouts,
          const std::vector<Sizes>& strides, bool is_copied = false)
      : call_(call), rule_call_(rule_call), layouts_(layouts), strides_(strides), is_copied_(is_copied) {}

  void wrap(torch::jit::Stack& results) {
    const auto& returns = call_.schema().returns();
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto* alias = i < returns.size() ? returns[i].alias_info() : nullptr;
      if (alias != nullptr && alias->isWrite()) {
        results[i] = written(i, results[i]);
        ++next_;
      } else if (results[i].isTensor()) {
        results[i] = wrapped(results[i].toTensor(), alias != nullptr);
      } else if (results[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : results[i].toTensorList()) list.push_back(wrapped(each, alias != nullptr));
        results[i] = std::move(list);
      }
    }
  }

 private:
  at::Tensor wrapped(const at::Tensor& local, bool is_view) {
    const auto index = next_++;
    const auto& layout = layouts_.at(index);
    if (!local.defined() || !layout) return local;
    const auto* original = is_view ? dtensor_impl(call_.argument(0).toTensor()) : nullptr;
    auto wrapped = original != nullptr
                       ? wrap_view(local, layout, strides_.at(index), original->version_counter().enabled())
                       : wrap_local(local, layout, strides_.at(index));
    if (rule_call_.takes_replicas()) dtensor_impl(wrapped)->set_takes_replicas();
    if (is_view) remember_original(*dtensor_impl(wrapped));
    return wrapped;
  }

  /// Views are of the first argument.
  void remember_original(DTensorImpl& view) const {
    replay_views();
    const auto* original = dtensor_impl(call_.argument(0).toTensor());
    if (original == nullptr) return;
    // Alike on all ranks: those that hold differently much have said is_copied_.
    const bool shares = !view.mesh().is_member() || view.local().is_alias_of(original->local());
    if (is_copied_ || !shares || original->is_copied()) view.set_copied(*original);
  }

  /// The argument that the result at `index` is, which may have got another shape.
  const c10::IValue& written(std::size_t index, const c10::IValue& result) const {
    const auto& argument = written_argument(index);
    if (!argument.isTensor() || !result.isTensor()) return argument;
    auto* impl = dtensor_impl(argument.toTensor());
    const auto& layout = layouts_.at(next_);
    if (impl == nullptr || !layout || impl->sizes() == layout->sizes()) return argument;
    impl->shallow_copy_from(wrap_local(result.toTensor(), layout, strides_.at(next_)).getIntrusivePtr());
    return argument;
  }

  const c10::IValue& written_argument(std::size_t index) const {
    std::size_t seen = 0;
    for (std::size_t i = 0; i < call_.argument_count(); ++i) {
      const auto* alias = call_.schema().arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && seen++ == index) return call_.argument(i);
    }
    TORCH_INTERNAL_ASSERT(false);
  }

  const OperatorCall& call_;
  const RuleCall& rule_call_;
  const std::vector<LayoutPtr>& layouts_;
  const std::vector<Sizes>& strides_;
  const bool is_copied_;
  std::size_t next_ = 0;
};

bool returns_view(const OperatorCall& call) {
  const auto& returns = call.schema().returns();
  const auto* alias = returns.empty() ? nullptr : returns.front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

/// Of the whole results, where the rule does not say: alike on all ranks.
std::vector<Sizes> strides_of(const OperatorCall& call, const RuleCall& rule_call,
                              const std::vector<LayoutPtr>& results, bool is_pointwise) {
  std::vector<Sizes> strides;
  for (const auto& layout : results) {
    const auto found = std::find_if(rule_call.operands().begin(), rule_call.operands().end(), [&](const auto& operand) {
      return is_pointwise && layout && operand.sizes() == layout->sizes();
    });
    if (found == rule_call.operands().end()) {
      strides.push_back(layout ? at::detail::defaultStrides(layout->sizes()) : Sizes());
    } else {
      const auto& tensor = found->tensor;
      strides.push_back(returns_view(call) ? tensor.strides().vec()
                                           : elementwise_strides(call, *tensor.unsafeGetTensorImpl()));
    }
  }
  return strides;
}

/// Operands that all have one layout, and no terms of sums: each rank computes on what it has.
bool runs_as_it_is(const RuleCall& call) {
  const auto& layout = call.first_layout();
  if (layout->has_partial()) return false;
  return std::all_of(call.operands().begin(), call.operands().end(), [&](const Operand& operand) {
    return operand.layout == layout || *operand.layout == *layout ||
           (operand.tensor.dim() == 0 && operand.layout->is_replicated());
  });
}

/// Terms are made of whole values only: what is neither those terms nor whole is made whole first.
at::Tensor moved(const Operand& operand, const RuleCall& call, const Placements& to) {
  const auto& from = operand.layout->placements();
  auto whole = to;
  for (std::size_t axis = 0; axis < to.size(); ++axis) {
    const bool is_ready = from[axis] == to[axis] || std::holds_alternative<Replicate>(from[axis]);
    if (is_partial(to[axis]) && !is_ready) whole[axis] = Replicate();
  }
  const PlanOptions internal = {.allow_partial_target = true, .needed_by = &call.name()};
  auto local = redistribute_local(local_of(operand), *operand.layout, whole, internal);
  if (whole == to) return local;
  return redistribute_local(local, Layout(call.mesh(), whole, operand.sizes()), to, internal);
}

/// On ranks outside of the mesh: empty tensors, of the dtypes that the others' have.
torch::jit::Stack run_outside(const OperatorCall& call, const RuleCall& rule_call, std::size_t result_count) {
  if (call.schema().returns().empty()) return {};
  if (result_count == 0) {  // item(), equal()
    const auto returns_bool = call.schema().returns().front().type()->kind() == c10::TypeKind::BoolType;
    return {returns_bool ? c10::IValue(true) : c10::IValue(at::Scalar(0))};
  }
  auto results = arguments_of(call);
  std::vector<at::Tensor> shapes;
  for (const auto& operand : rule_call.operands()) {
    shapes.push_back(at::empty(operand.sizes(), operand.tensor.options().device(at::kMeta)));
  }
  put(results, rule_call, shapes);
  for (auto& each : results) {
    if (each.isDevice()) each = at::Device(at::kMeta);
  }
  call.op().callBoxed(&results);
  const at::Device device(rule_call.mesh().device_type());
  const auto none = [&](const at::Tensor& shape) {
    return shape.defined() ? at::empty({0}, shape.options().device(device)) : shape;
  };
  for (auto& each : results) {
    if (each.isTensor()) each = none(each.toTensor());
    if (!each.isTensorList()) continue;
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : each.toTensorList()) list.push_back(none(one));
    each = std::move(list);
  }
  return results;
}

/// They differ at most on axes of one rank, which holds everything in any case.
bool holds_the_same(const DeviceMesh& mesh, const Placements& one, const Placements& other) {
  for (std::size_t axis = 0; axis < one.size(); ++axis) {
    if (mesh.size(static_cast<int64_t>(axis)) > 1 && !(one[axis] == other[axis])) return false;
  }
  return true;
}

void run_on_locals(OperatorCall& call, const RuleCall& rule_call, const OpRule& rule, const Plan& plan,
                   const Chosen& chosen) {
  std::vector<at::Tensor> locals;
  std::vector<LayoutPtr> operands;
  bool is_copied = plan.is_copied;
  for (std::size_t i = 0; i < rule_call.operands().size(); ++i) {
    const auto& operand = rule_call.operands()[i];
    const bool moves = !(operand.layout->placements() == chosen.operands[i]);
    locals.push_back(moves ? moved(operand, rule_call, chosen.operands[i]) : local_of(operand));
    operands.push_back(moves ? std::make_shared<const Layout>(rule_call.mesh(), chosen.operands[i], operand.sizes())
                             : operand.layout);
    is_copied =
        is_copied || (moves && !holds_the_same(rule_call.mesh(), operand.layout->placements(), chosen.operands[i]));
  }
  std::vector<LayoutPtr> results;
  for (std::size_t i = 0; i < plan.result_sizes.size(); ++i) {
    results.push_back(shared_layout(rule_call, chosen.results[i], plan.result_sizes[i]));
  }
  LocalCall local{.call = rule_call, .arguments = arguments_of(call), .operands = operands, .results = results};
  put(local.arguments, rule_call, locals);
  if (plan.sizes_argument) local.arguments[*plan.sizes_argument] = results.front()->local_sizes();
  torch::jit::Stack stack;
  if (!rule_call.mesh().is_member()) {
    stack = run_outside(call, rule_call, results.size());
  } else {
    stack = plan.run ? plan.run(local) : local.run();
  }
  const auto strides =
      plan.result_strides.empty() ? strides_of(call, rule_call, results, rule.is_pointwise) : plan.result_strides;
  Wrapper(call, rule_call, results, strides, is_copied).wrap(stack);
  call.replace(std::move(stack));
}

class DTensorRule : public TensorRule {
 public:
  void run(OperatorCall& call) override {
    answer(call);
    check_results(call);
  }

 private:
  static void answer(OperatorCall& call) {
    const auto* rule = find_op_rule(call.op());
    if (rule == nullptr && is_composite(call.op())) return decompose(call);
    if (rule != nullptr && rule->is_pointwise && run_elementwise(call)) return;
    const RuleCall rule_call(call, rule != nullptr && rule->takes_ordinary);
    if (rule == nullptr) refuse(rule_call);
    if (rule->is_pointwise && runs_as_it_is(rule_call)) return run_as_it_is(call, rule_call);
    const auto plan = rule->plan(rule_call);
    run_on_locals(call, rule_call, *rule, plan, choose(rule_call, plan));
  }

  static void run_as_it_is(OperatorCall& call, const RuleCall& rule_call) {
    auto stack = arguments_of(call);
    std::vector<at::Tensor> locals;
    for (const auto& operand : rule_call.operands()) locals.push_back(local_of(operand));
    put(stack, rule_call, locals);
    call.op().callBoxed(&stack);
    const std::vector<LayoutPtr> layouts(stack.size(), rule_call.first_layout());
    Wrapper(call, rule_call, layouts, strides_of(call, rule_call, layouts, /*is_pointwise=*/true)).wrap(stack);
    call.replace(std::move(stack));
  }
};

}  // namespace

TensorRule& dtensor_rule() {
  static DTensorRule rule;
  return rule;
}

}  // namespace lockstep::detail
