#include "lockstep/nn/functional_collectives.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/plain_memory.h"

namespace lockstep::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void keep_group(AutogradContext* context, const GroupPtr& group) {
  context->saved_data["group"] = c10::IValue::make_capsule(group);
}

GroupPtr kept_group(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
}

void keep_op(AutogradContext* context, ReduceOp op) {
  context->saved_data["op"] = static_cast<int64_t>(op);
}

ReduceOp kept_op(AutogradContext* context) {
  return static_cast<ReduceOp>(context->saved_data["op"].toInt());
}

bool is_recorded(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

std::string where(const char* name, const GroupPtr& group) {
  return str("[lockstep/nn] rank ", group->getRank(), " of ", group->getSize(), ": functional::", name);
}

void check_op(const char* name, const at::Tensor& tensor, ReduceOp op, const GroupPtr& group) {
  check_member(group);
  TORCH_CHECK(op != ReduceOp::PREMUL_SUM, where(name, group), " cannot take factors. Multiply the tensor before.");
  TORCH_CHECK(!is_recorded(tensor) || op == ReduceOp::SUM || op == ReduceOp::AVG, where(name, group), " has no ",
              "gradient for '", name_of(op), "'. Use sum or avg, or detach() the tensor.");
}

int64_t checked_dim(const char* name, const at::Tensor& tensor, int64_t dim, const GroupPtr& group) {
  check_member(group);
  const auto ndim = tensor.dim();
  TORCH_CHECK(dim >= -ndim && dim < ndim, where(name, group), " along dim ", dim, ": the tensor has ", ndim,
              " dims, sizes ", tensor.sizes());
  return dim < 0 ? dim + ndim : dim;
}

/// Runs `along_first`, which works along dim 0, along `dim`.
template <class AlongFirst>
at::Tensor along(int64_t dim, const at::Tensor& tensor, const AlongFirst& along_first) {
  if (dim == 0) return along_first(tensor);
  return along_first(tensor.movedim(dim, 0)).movedim(0, dim).contiguous();
}

/// Calls the Function, or only its computation where nobody asks for a gradient.
template <class Collective, class... Arguments>
at::Tensor run(const at::Tensor& tensor, const Arguments&... arguments) {
  if (is_recorded(tensor)) return Collective::apply(tensor, arguments...);
  const at::NoGradGuard no_grad;
  return Collective::compute(tensor, arguments...);
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static at::Tensor compute(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
    auto result = detail::plain_copy(tensor);
    lockstep::all_reduce(result, group, op);
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
    keep_group(context, group);
    keep_op(context, op);
    return compute(tensor, group, op);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {functional::all_reduce(gradients[0], kept_group(context), kept_op(context)), {}, {}};
  }
};

struct AllGather : torch::autograd::Function<AllGather> {
  static at::Tensor compute(const at::Tensor& tensor, const GroupPtr& group) {
    auto sizes = tensor.sizes().vec();
    sizes[0] *= group->getSize();
    auto result = at::empty(sizes, tensor.options().requires_grad(false));
    all_gather_into_tensor(result, detail::as_plain_memory(tensor.detach()), group);
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const GroupPtr& group) {
    keep_group(context, group);
    return compute(tensor, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {functional::reduce_scatter(gradients[0], kept_group(context)), {}};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static at::Tensor compute(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
    auto sizes = tensor.sizes().vec();
    sizes[0] /= group->getSize();
    auto result = at::empty(sizes, tensor.options().requires_grad(false));
    reduce_scatter_tensor(result, detail::as_plain_memory(tensor.detach()), group, op);
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
    keep_group(context, group);
    keep_op(context, op);
    return compute(tensor, group, op);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto group = kept_group(context);
    auto gradient = functional::all_gather(gradients[0], group);
    if (kept_op(context) == ReduceOp::AVG) gradient = gradient / group->getSize();
    return {gradient, {}, {}};
  }
};

using Splits = std::vector<int64_t>;

struct AllToAll : torch::autograd::Function<AllToAll> {
  static at::Tensor compute(const at::Tensor& tensor, const GroupPtr& group, const Splits& output_splits,
                            const Splits& input_splits) {
    auto sizes = tensor.sizes().vec();
    if (!output_splits.empty()) sizes[0] = std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0});
    auto result = at::empty(sizes, tensor.options().requires_grad(false));
    lockstep::all_to_all_single(result, detail::as_plain_memory(tensor.detach()), group, output_splits, input_splits);
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const GroupPtr& group,
                            const Splits& output_splits, const Splits& input_splits) {
    keep_group(context, group);
    context->saved_data["output_splits"] = output_splits;
    context->saved_data["input_splits"] = input_splits;
    return compute(tensor, group, output_splits, input_splits);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto given = context->saved_data["output_splits"].toIntVector();
    const auto taken = context->saved_data["input_splits"].toIntVector();
    return {functional::all_to_all_single(gradients[0], kept_group(context), taken, given), {}, {}, {}};
  }
};

struct Broadcast : torch::autograd::Function<Broadcast> {
  static at::Tensor compute(const at::Tensor& tensor, int root, const GroupPtr& group) {
    auto result = detail::plain_copy(tensor);
    lockstep::broadcast(result, root, group);
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, int root, const GroupPtr& group) {
    keep_group(context, group);
    context->saved_data["root"] = static_cast<int64_t>(root);
    return compute(tensor, root, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto root = static_cast<int>(context->saved_data["root"].toInt());
    return {functional::reduce(gradients[0], root, kept_group(context)), {}, {}};
  }
};

struct Reduce : torch::autograd::Function<Reduce> {
  static at::Tensor compute(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
    auto result = detail::plain_copy(tensor);
    lockstep::reduce(result, root, group, op);
    if (group->getRank() != root) result.zero_();
    return result;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, int root, const GroupPtr& group,
                            ReduceOp op) {
    keep_group(context, group);
    keep_op(context, op);
    context->saved_data["root"] = static_cast<int64_t>(root);
    return compute(tensor, root, group, op);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto group = kept_group(context);
    const auto root = static_cast<int>(context->saved_data["root"].toInt());
    auto gradient = functional::broadcast(gradients[0], root, group);
    if (kept_op(context) == ReduceOp::AVG) gradient = gradient / group->getSize();
    return {gradient, {}, {}, {}};
  }
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const GroupPtr& group, ReduceOp op) {
  check_op("all_reduce", tensor, op, group);
  if (group->getSize() == 1) return tensor.clone(at::MemoryFormat::Contiguous);
  return run<AllReduce>(tensor, group, op);
}

at::Tensor all_gather(const at::Tensor& tensor, const GroupPtr& group, int64_t dim) {
  dim = checked_dim("all_gather", tensor, dim, group);
  if (group->getSize() == 1) return tensor.clone(at::MemoryFormat::Contiguous);
  return along(dim, tensor, [&](const at::Tensor& each) { return run<AllGather>(each, group); });
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const GroupPtr& group, int64_t dim, ReduceOp op) {
  dim = checked_dim("reduce_scatter", tensor, dim, group);
  check_op("reduce_scatter", tensor, op, group);
  TORCH_CHECK(tensor.size(dim) % group->getSize() == 0, where("reduce_scatter", group), " along dim ", dim,
              " of a tensor of sizes ", tensor.sizes(), ": ", tensor.size(dim), " cannot be divided evenly by ",
              group->getSize(), " ranks. Pad it.");
  if (group->getSize() == 1) return tensor.clone(at::MemoryFormat::Contiguous);
  return along(dim, tensor, [&](const at::Tensor& each) { return run<ReduceScatter>(each, group, op); });
}

at::Tensor all_to_all_single(const at::Tensor& tensor, const GroupPtr& group, const Splits& output_splits,
                             const Splits& input_splits) {
  checked_dim("all_to_all_single", tensor, 0, group);
  TORCH_CHECK(output_splits.empty() == input_splits.empty(), where("all_to_all_single", group), " was given ",
              input_splits.empty() ? "output" : "input", " splits alone. Give both, or neither for equal pieces.");
  const bool is_whole =
      output_splits == input_splits && (input_splits.empty() || input_splits == Splits{tensor.size(0)});
  if (group->getSize() == 1 && is_whole) return tensor.clone(at::MemoryFormat::Contiguous);
  return run<AllToAll>(tensor, group, output_splits, input_splits);
}

at::Tensor broadcast(const at::Tensor& tensor, int root, const GroupPtr& group) {
  check_member(group);
  if (group->getSize() == 1 && root == 0) return tensor.clone(at::MemoryFormat::Contiguous);
  return run<Broadcast>(tensor, root, group);
}

at::Tensor reduce(const at::Tensor& tensor, int root, const GroupPtr& group, ReduceOp op) {
  check_op("reduce", tensor, op, group);
  if (group->getSize() == 1 && root == 0) return tensor.clone(at::MemoryFormat::Contiguous);
  return run<Reduce>(tensor, root, group, op);
}

}  // namespace lockstep::functional
