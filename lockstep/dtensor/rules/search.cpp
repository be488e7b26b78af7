// Operators that look along one dim, or run along it: that dim is whole on every rank, and indices are those of the
// whole tensor.
#include <ATen/ops/nonzero.h>
#include <ATen/ops/value_selecting_reduction_backward_native.h>
#include <torch/library.h>

#include "lockstep/dtensor/redistribute_local.h"
#include "lockstep/dtensor/rules/reduction.h"

namespace lockstep::detail {
namespace {

/// Backward of max, topk, sort and others of a dim. libtorch writes DTensors into an ordinary tensor of zeros there.
at::Tensor selecting_backward(const at::Tensor& gradient, int64_t dim, const at::Tensor& indices,
                              c10::SymIntArrayRef sizes, bool keeps_dim) {
  if (dtensor_impl(gradient) == nullptr && dtensor_impl(indices) == nullptr) {
    return at::native::value_selecting_reduction_backward_symint(gradient, dim, indices, sizes, keeps_dim);
  }
  const bool is_gone = !keeps_dim && !sizes.empty();
  auto zeros = gradient.new_zeros_symint(sizes);
  return zeros.scatter(dim, is_gone ? indices.unsqueeze(dim) : indices, is_gone ? gradient.unsqueeze(dim) : gradient);
}

/// Autograd takes this composite operator apart before it could come to a rule, so it is answered there.
void install_selecting_backward() {
  for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
    static std::vector<std::unique_ptr<torch::Library>> kept;
    kept.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    kept.back()->impl("value_selecting_reduction_backward", &selecting_backward);
  }
}

/// How many there are is known when they have been looked for, on the whole tensor.
Plan nonzero(const RuleCall& call) {
  const auto& operand = call.operands().front();
  const Placements whole(operand.layout->placements().size(), Replicate());
  const auto* impl = dtensor_impl(operand.tensor);
  auto found = at::nonzero(redistribute_local(impl->local(), *operand.layout, whole));
  Plan plan;
  plan.result_sizes = {found.sizes().vec()};
  plan.operand_placements = {operand.layout->placements()};
  plan.result_placements = {whole};
  plan.run = [found](LocalCall&) -> torch::jit::Stack { return {found}; };
  return plan;
}

Reduction one_dim(const RuleCall& call, const c10::IValue& dim, bool keeps_dims) {
  return reduction_of(call, &dim, keeps_dims);
}

/// Values and indices, of a dim that is gone or has one element.
Plan best_of_dim(const RuleCall& call) {
  return whole_dims_plan(call, one_dim(call, call.argument(1), call.argument(2).toBool()), 2);
}

Plan kth_of_dim(const RuleCall& call) {
  return whole_dims_plan(call, one_dim(call, call.argument(2), call.argument(3).toBool()), 2);
}

/// The dim stays, with `size` elements.
Plan along_dim(const RuleCall& call, const c10::IValue& dim, std::optional<int64_t> size, std::size_t result_count) {
  auto plan = whole_dims_plan(call, one_dim(call, dim, /*keeps_dims=*/true), result_count);
  auto sizes = call.operands().front().sizes();
  if (size && !sizes.empty()) {
    sizes[static_cast<std::size_t>(RuleCall::dim_from_front(dim.toInt(), call.operands().front().dim()))] = *size;
  }
  plan.result_sizes.assign(result_count, sizes);
  return plan;
}

Plan topk(const RuleCall& call) {
  return along_dim(call, call.argument(2), call.argument(1).toInt(), 2);
}

Plan sort(const RuleCall& call) {
  return along_dim(call, call.argument(1), std::nullopt, 2);
}

Plan sort_stably(const RuleCall& call) {
  return along_dim(call, call.argument(2), std::nullopt, 2);
}

Plan argsort_stably(const RuleCall& call) {
  return along_dim(call, call.argument(2), std::nullopt, 1);
}

Plan scan(const RuleCall& call) {
  return along_dim(call, call.argument(1), std::nullopt, 1);
}

Plan scan_with_indices(const RuleCall& call) {
  return along_dim(call, call.argument(1), std::nullopt, 2);
}

}  // namespace

void add_search_rules(RuleTable& table) {
  install_selecting_backward();
  for (const auto* name :
       {"aten::max.dim", "aten::min.dim", "aten::median.dim", "aten::nanmedian.dim", "aten::mode."}) {
    table[name] = {.plan = &best_of_dim};
  }
  table["aten::nonzero."] = {.plan = &nonzero};
  table["aten::kthvalue."] = {.plan = &kth_of_dim};
  table["aten::topk."] = {.plan = &topk};
  table["aten::sort."] = {.plan = &sort};
  table["aten::sort.stable"] = {.plan = &sort_stably};
  table["aten::argsort.stable"] = {.plan = &argsort_stably};
  for (const auto* name : {"aten::cumsum.", "aten::cumprod.", "aten::logcumsumexp."}) table[name] = {.plan = &scan};
  for (const auto* name : {"aten::cummax.", "aten::cummin."}) table[name] = {.plan = &scan_with_indices};
}

}  // namespace lockstep::detail
