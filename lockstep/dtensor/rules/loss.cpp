// The negative log likelihood. Samples may be cut: a mean divides by the weight of all of them. Classes may be cut: the
// rank that has the target's class looks it up, and the gradient is cut as the input is.
#include "lockstep/dtensor/rules/loss.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "lockstep/comm/collectives.h"
#include "lockstep/dtensor/rule.h"
#include "lockstep/dtensor/rules/positions.h"

namespace lockstep::detail {

int& loss_parallel_depth() {
  thread_local int depth = 0;
  return depth;
}

namespace {

/// One for all threads: a backward may change threads between two nodes.
class ClassSums {
 public:
  void remember(const at::Tensor& gradient, at::Tensor sums) {
    if (gradient.is_inference()) return;
    const std::lock_guard lock(mutex_);
    std::erase_if(sums_, [](const auto& entry) { return entry.second.gradient.expired(); });
    sums_.insert_or_assign(gradient.unsafeGetTensorImpl(),
                           Entry{WeakImpl(gradient.getIntrusivePtr()), gradient._version(), std::move(sums)});
  }

  at::Tensor take(const at::Tensor& gradient) {
    const std::lock_guard lock(mutex_);
    const auto found = sums_.find(gradient.unsafeGetTensorImpl());
    if (found == sums_.end()) return {};
    const auto entry = std::move(found->second);
    sums_.erase(found);
    return entry.version == gradient._version() ? entry.sums : at::Tensor();
  }

 private:
  using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakImpl gradient;
    int64_t version;
    at::Tensor sums;
  };

  std::mutex mutex_;
  // Guarded by mutex_. An address is not used again while its entry is there.
  std::unordered_map<const c10::TensorImpl*, Entry> sums_;
};

ClassSums& class_sums() {
  static ClassSums sums;
  return sums;
}

/// Input, target and weight of a loss, of which some are arguments from `first` on: input, target, weight, reduction,
/// ignore_index.
struct NllCall {
  const RuleCall& call;
  std::size_t first;

  const Operand& input() const { return *call.operand_of(first); }
  const Operand& target() const { return *call.operand_of(first + 1); }
  bool has_weight() const { return call.operand_of(first + 2) != nullptr; }
  int64_t reduction() const { return call.argument(first + 3).toInt(); }
  int64_t ignore_index() const { return call.argument(first + 4).toInt(); }
  int64_t class_dim() const { return input().dim() < 2 ? 0 : 1; }
  /// Where a dim of the input lies in the target, which has no classes.
  int64_t target_dim(int64_t dim) const { return dim > class_dim() ? dim - 1 : dim; }
  int64_t input_dim(int64_t target_dim) const { return target_dim >= class_dim() ? target_dim + 1 : target_dim; }

  /// An ordinary tensor is a replica: what part of it belongs to samples that are cut would be a guess.
  void check_target() const {
    const bool is_ordinary = dtensor_impl(target().tensor) == nullptr;
    if (!is_ordinary) return;
    for (const auto& placement : input().layout->placements()) {
      const auto dim = sharded_dim(placement);
      TORCH_CHECK(!dim || *dim == class_dim(), call.describe(),
                  ": the target is an ordinary tensor, but the input's samples are cut. Make it a DTensor that is cut "
                  "as they are: DTensor::from_local() or distribute_tensor().");
    }
  }

  /// Samples of the input or of the target, as cuts of the input.
  std::vector<Placement> sample_cuts(int64_t axis) const {
    const auto input_at = call.position_of(first);
    const auto target_at = call.position_of(first + 1);
    return cuts_on(call, axis, [&](std::size_t operand, int64_t dim) -> int64_t {
      if (operand == input_at) return dim == class_dim() ? -1 : dim;
      return operand == target_at ? input_dim(dim) : -1;
    });
  }

  bool cuts_classes(int64_t axis) const { return sharded_dim(input().on(axis)) == class_dim(); }
};

/// Axes of the input as it was moved that cut its classes, or its samples.
std::vector<int64_t> axes_cutting(const Layout& input, int64_t class_dim, bool classes) {
  std::vector<int64_t> axes;
  for (std::size_t axis = 0; axis < input.placements().size(); ++axis) {
    const auto dim = sharded_dim(input.placements()[axis]);
    if (dim && (*dim == class_dim) == classes) axes.push_back(static_cast<int64_t>(axis));
  }
  return axes;
}

at::Tensor reduced(at::Tensor tensor, const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  for (const auto axis : axes) all_reduce(tensor, mesh.get_group(axis));
  return tensor;
}

/// What the local target says of each sample.
struct Targets {
  at::Tensor is_ignored;
  at::Tensor classes;  // 0 where it is ignored
  at::Tensor weights;  // of each sample's class; 0 where it is ignored
};

Targets targets_of(const NllCall& nll, const LocalCall& local, at::ScalarType dtype) {
  const auto target = local.arguments[nll.first + 1].toTensor();
  const auto is_ignored = target.eq(nll.ignore_index());
  const auto classes = target.masked_fill(is_ignored, 0);
  if (target.is_cpu() && target.numel() > 0) {
    TORCH_CHECK_INDEX(
        classes.min().item<int64_t>() >= 0 &&
            classes.max().item<int64_t>() < nll.input().sizes()[static_cast<std::size_t>(nll.class_dim())],
        nll.call.describe(), ": a target is none of the classes.");
  }
  auto weights = is_ignored.logical_not().to(dtype);
  if (nll.has_weight()) {
    weights = weights * local.arguments[nll.first + 2].toTensor().take(classes.to(at::kLong));
  }
  return {is_ignored, classes, weights};
}

/// The loss of each sample as far as this rank has its class.
at::Tensor looked_up(const NllCall& nll, const Layout& layout, const at::Tensor& part, const Targets& targets) {
  if (part.size(nll.class_dim()) == 0) return at::zeros(targets.classes.sizes(), part.options());
  const auto [positions, is_other] = positions_in_part(targets.classes.to(at::kLong), layout, nll.class_dim());
  const auto taken = at::gather(part, nll.class_dim(), positions.unsqueeze(nll.class_dim())).squeeze(nll.class_dim());
  return (-taken * targets.weights).masked_fill_(is_other.logical_or(targets.is_ignored), 0);
}

torch::jit::Stack nll_with_cut_classes(const NllCall& nll, LocalCall& local) {
  const auto& layout = *local.operands[nll.call.position_of(nll.first)];
  const auto part = local.arguments[nll.first].toTensor();
  const auto class_axes = axes_cutting(layout, nll.class_dim(), true);
  const auto targets = targets_of(nll, local, part.scalar_type());
  auto losses = looked_up(nll, layout, part, targets);
  if (nll.reduction() == at::Reduction::None) {
    return {reduced(losses, layout.mesh(), class_axes), at::zeros({}, part.options())};
  }
  const auto loss = reduced(losses.sum(), layout.mesh(), class_axes);
  const auto weight = targets.weights.sum();
  if (nll.reduction() == at::Reduction::Sum) return {loss, weight};
  const auto all = reduced(weight, layout.mesh(), axes_cutting(layout, nll.class_dim(), false));
  return {loss / all, all};
}

/// Each rank's sum, by the weight of the samples of all ranks.
torch::jit::Stack mean_of_cut_samples(const NllCall& nll, LocalCall& local, const std::vector<int64_t>& axes) {
  local.arguments[nll.first + 3] = static_cast<int64_t>(at::Reduction::Sum);
  auto results = local.run();
  const auto weight = reduced(results[1].toTensor(), nll.call.mesh(), axes);
  return {results[0].toTensor() / weight, weight};
}

Plan nll_loss(const RuleCall& call) {
  const NllCall nll{call, 0};
  nll.check_target();
  Plan plan;
  const bool is_none = nll.reduction() == at::Reduction::None;
  plan.result_sizes = {is_none ? nll.target().sizes() : Sizes(), Sizes()};
  plan.choices = [nll, is_none](int64_t axis) {
    const auto& call = nll.call;
    std::vector<Choice> choices;
    if (nll.cuts_classes(axis)) {
      auto choice = replicate_all(call, 2);
      choice.operands[call.position_of(0)] = nll.input().on(axis);
      choices.push_back(std::move(choice));
    }
    for (const auto& cut : nll.sample_cuts(axis)) {
      auto choice = replicate_all(call, 2);
      choice.operands[call.position_of(0)] = cut;
      choice.operands[call.position_of(1)] = cut_of(cut, nll.target_dim(*sharded_dim(cut)));
      if (is_none) {
        choice.results = {choice.operands[call.position_of(1)], Replicate()};
      } else {
        const bool is_mean = nll.reduction() == at::Reduction::Mean;
        choice.results = {Partial(), is_mean ? Placement(Replicate()) : Placement(Partial())};
      }
      choices.push_back(std::move(choice));
    }
    choices.push_back(replicate_all(call, 2));
    return choices;
  };
  plan.run = [nll](LocalCall& local) {
    const auto& layout = *local.operands[nll.call.position_of(0)];
    if (!axes_cutting(layout, nll.class_dim(), true).empty()) return nll_with_cut_classes(nll, local);
    const auto axes = axes_cutting(layout, nll.class_dim(), false);
    if (nll.reduction() == at::Reduction::Mean && !axes.empty()) return mean_of_cut_samples(nll, local, axes);
    return local.run();
  };
  return plan;
}

torch::jit::Stack nll_backward_with_cut_classes(const NllCall& nll, LocalCall& local) {
  const auto& layout = *local.operands[nll.call.position_of(1)];
  const auto part = local.arguments[1].toTensor();
  const auto targets = targets_of(nll, local, part.scalar_type());
  auto scale = local.arguments[0].toTensor();
  if (nll.reduction() == at::Reduction::Mean) scale = scale / local.arguments[6].toTensor();
  const auto sums = (-scale * targets.weights).masked_fill_(targets.is_ignored, 0);
  auto gradient = at::zeros_like(part);
  if (part.numel() > 0) {
    const auto [positions, is_other] = positions_in_part(targets.classes.to(at::kLong), layout, nll.class_dim());
    gradient.scatter_(nll.class_dim(), positions.unsqueeze(nll.class_dim()),
                      sums.masked_fill(is_other, 0).unsqueeze(nll.class_dim()));
  }
  remember_class_sums(gradient, sums.unsqueeze(nll.class_dim()));
  return {gradient};
}

/// grad_output, input, target, weight, reduction, ignore_index, total_weight.
Plan nll_loss_backward(const RuleCall& call) {
  const NllCall nll{call, 1};
  nll.check_target();
  Plan plan;
  plan.result_sizes = {nll.input().sizes()};
  plan.choices = [nll](int64_t axis) {
    const auto& call = nll.call;
    auto whole = replicate_all(call);
    // Only a mean needs it.
    if (nll.reduction() != at::Reduction::Mean) whole.operands[call.position_of(6)] = call.operand_of(6)->on(axis);
    std::vector<Choice> choices;
    if (nll.cuts_classes(axis)) {
      auto choice = whole;
      choice.operands[call.position_of(1)] = nll.input().on(axis);
      choice.results = {nll.input().on(axis)};
      choices.push_back(std::move(choice));
    }
    for (const auto& cut : nll.sample_cuts(axis)) {
      auto choice = whole;
      const auto of_target = cut_of(cut, nll.target_dim(*sharded_dim(cut)));
      choice.operands[call.position_of(1)] = cut;
      choice.operands[call.position_of(2)] = of_target;
      if (nll.reduction() == at::Reduction::None) choice.operands[call.position_of(0)] = of_target;
      choice.results = {cut};
      choices.push_back(std::move(choice));
    }
    choices.push_back(std::move(whole));
    return choices;
  };
  plan.run = [nll](LocalCall& local) {
    const auto& layout = *local.operands[nll.call.position_of(1)];
    if (axes_cutting(layout, nll.class_dim(), true).empty()) return local.run();
    return nll_backward_with_cut_classes(nll, local);
  };
  return plan;
}

}  // namespace

void remember_class_sums(const at::Tensor& gradient, at::Tensor sums) {
  class_sums().remember(gradient, std::move(sums));
}

at::Tensor take_class_sums(const at::Tensor& gradient) {
  return class_sums().take(gradient);
}

void add_loss_rules(RuleTable& table) {
  for (const auto* name : {"aten::nll_loss_forward.", "aten::nll_loss2d_forward."}) {
    table[name] = {.plan = &nll_loss, .takes_ordinary = true};
  }
  for (const auto* name : {"aten::nll_loss_backward.", "aten::nll_loss2d_backward."}) {
    table[name] = {.plan = &nll_loss_backward, .takes_ordinary = true};
  }
}

}  // namespace lockstep::detail
