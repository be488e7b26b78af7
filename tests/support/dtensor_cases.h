// Conformance of operators on DTensors: an operator is described once, by a function and sizes of inputs, and runs with
// every placement of every input. Values, gradients of all inputs and layouts must be those of one device; what is
// refused must be refused as the case foretells it, by an error that names operator and placements.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/checks.h"

namespace lockstep::dtensor_cases {

using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

struct OperatorCase {
  std::string name;
  std::function<Tensors(const Tensors& inputs)> run;
  /// Sizes of all inputs, by sample.
  std::vector<std::vector<Sizes>> samples;
  /// One letter per input: 'g' values of both signs with a gradient, 'p' positive ones with a gradient, 'v' without,
  /// 'b' bools, 'i' small whole numbers, 'f' positive ones in float, without a gradient.
  std::string inputs;
  /// Whether an axis with these placements of the inputs is refused. Empty: never.
  std::function<bool(const Placements& of_inputs)> is_refused = {};
  /// All assignments of placements on two ranks, up to 100; else a few, drawn at random: for those that share a rule
  /// with one that is.
  bool is_thorough = false;
};

inline at::Tensor values_of(char kind, const Sizes& sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto options = at::TensorOptions(at::kDouble);
  switch (kind) {
    case 'b':
      return at::rand(sizes, generator, options) < 0.5;
    case 'i':
      return at::randint(-4, 5, sizes, generator, at::TensorOptions(at::kLong));
    case 'p':
      return at::rand(sizes, generator, options) + 0.5;
    case 'f':
      return ((at::rand(sizes, generator, options) * 8).ceil() / 8 + 0.5).to(at::kFloat);  // sums of terms are exact
    default:
      return at::randn(sizes, generator, options);
  }
}

inline bool has_gradient(char kind) {
  return kind == 'g' || kind == 'p';
}

/// The term of the `index`-th of `count` ranks: together they make `value`. Drawn, so that no rank holds what it could
/// pass for.
inline at::Tensor term_of(const at::Tensor& value, ReduceOp op, int64_t index, int64_t count) {
  if (op == ReduceOp::MAX) {
    const auto order = at::arange(value.numel(), at::kLong).view(value.sizes());
    return value - ((order + index) % count).to(value.scalar_type());
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(value.numel() + 17));
  auto rest = at::zeros_like(value);
  at::Tensor term;
  for (int64_t rank = 0; rank < count; ++rank) {
    term = at::randint(-5, 6, value.sizes(), generator, at::TensorOptions(at::kLong)).to(value.scalar_type());
    if (rank == count - 1) term = (op == ReduceOp::AVG ? value * count : value) - rest;
    if (rank == index) return term;
    rest = rest + term;
  }
  return term;
}

/// A DTensor of `layout` with the values of `whole`.
inline at::Tensor distributed(const at::Tensor& whole, const Layout& layout) {
  const auto& mesh = layout.mesh();
  auto local = whole.detach();
  if (!mesh.is_member()) {
    local = local.flatten().narrow(0, 0, 0);
  } else {
    for (std::size_t axis = 0; axis < layout.placements().size(); ++axis) {
      const auto* partial = std::get_if<Partial>(&layout.placements()[axis]);
      if (partial == nullptr) continue;
      local = term_of(local, partial->op, (*mesh.get_coordinate())[axis], mesh.size(static_cast<int64_t>(axis)));
    }
    local = layout.cut(local).clone(at::MemoryFormat::Contiguous);
  }
  return DTensor::from_local(
             local, mesh, layout.placements(),
             {.shape = whole.sizes().vec(), .stride = at::empty(whole.sizes(), at::kMeta).strides().vec()})
      .tensor();
}

/// Placements of one axis that an input may have.
inline Placements candidates(char kind, int64_t dims) {
  Placements all = {Replicate()};
  for (int64_t dim = 0; dim < dims; ++dim) all.emplace_back(Shard(dim));
  if (dims > 0) all.emplace_back(StridedShard(0, 2));
  if (kind != 'b') all.emplace_back(Partial());
  if (kind != 'b' && kind != 'i') all.emplace_back(Partial(ReduceOp::AVG));
  if (kind != 'b') all.emplace_back(Partial(ReduceOp::MAX));
  return all;
}

/// What one input may have on all axes of a mesh.
inline std::vector<Placements> layouts_of(const DeviceMesh& mesh, char kind, const Sizes& sizes) {
  std::vector<Placements> all = {{}};
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    std::vector<Placements> longer;
    for (const auto& begun : all) {
      for (const auto& each : candidates(kind, static_cast<int64_t>(sizes.size()))) {
        longer.push_back(begun);
        longer.back().push_back(each);
      }
    }
    all = std::move(longer);
  }
  std::erase_if(all, [&](const Placements& placements) {
    bool has_max = false;
    bool has_sum = false;
    for (const auto& each : placements) {
      const auto* partial = std::get_if<Partial>(&each);
      if (partial != nullptr) (partial->op == ReduceOp::MAX ? has_max : has_sum) = true;
    }
    return has_max && has_sum;  // these do not mix
  });
  return all;
}

/// Runs cases on a mesh and keeps count. Every rank of the mesh's world makes one, with equal arguments.
class Conformance {
 public:
  explicit Conformance(DeviceMesh mesh) : mesh_(std::move(mesh)) {}

  void run(const std::vector<OperatorCase>& cases) {
    for (const auto& each : cases) {
      for (std::size_t sample = 0; sample < each.samples.size(); ++sample) run_sample(each, sample);
    }
  }

  std::size_t count() const { return count_; }
  /// By operator.
  const std::map<std::string, std::size_t>& refused() const { return refused_; }

  /// Throws the first failures, if there were any.
  void check() const {
    if (failures_.empty()) return;
    std::string text = lockstep::str(failures_.size(), " of ", count_, " failed:\n");
    for (std::size_t i = 0; i < std::min<std::size_t>(failures_.size(), 12); ++i) text += failures_[i] + "\n";
    throw testing::CheckFailure(text);
  }

 private:
  struct Reference {
    Tensors inputs;
    Tensors results;
    Tensors gradients;  // of the results
  };

  Reference one_device(const OperatorCase& each, const std::vector<Sizes>& sizes) const {
    Reference reference;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      reference.inputs.push_back(values_of(each.inputs[i], sizes[i], 10 + i));
      if (has_gradient(each.inputs[i])) reference.inputs.back().requires_grad_();
    }
    reference.results = each.run(reference.inputs);
    Tensors differentiable;
    Tensors gradients;
    for (std::size_t i = 0; i < reference.results.size(); ++i) {
      reference.gradients.push_back(values_of('g', reference.results[i].sizes().vec(), 100 + i));
      if (!reference.results[i].requires_grad()) continue;
      differentiable.push_back(reference.results[i]);
      gradients.push_back(reference.gradients.back().to(reference.results[i].scalar_type()));
      reference.gradients.back() = gradients.back();
    }
    if (!differentiable.empty()) torch::autograd::backward(differentiable, gradients);
    return reference;
  }

  void run_sample(const OperatorCase& each, std::size_t sample) {
    const auto& sizes = each.samples[sample];
    const auto reference = one_device(each, sizes);
    std::vector<std::vector<Placements>> options;
    std::size_t product = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      options.push_back(layouts_of(mesh_, each.inputs[i], sizes[i]));
      product *= options.back().size();
    }
    const auto most = most_of(each);
    std::mt19937 random(static_cast<unsigned>(sample));  // alike on all ranks
    for (std::size_t number = 0; number < std::min(product, most); ++number) {
      std::vector<Placements> assignment;
      auto rest = number;
      for (const auto& of_input : options) {
        const auto index = product <= most ? rest % of_input.size() : random() % of_input.size();
        assignment.push_back(of_input[index]);
        rest /= of_input.size();
      }
      run_assignment(each, reference, assignment, random);
    }
  }

  std::size_t most_of(const OperatorCase& each) const {
    if (mesh_.size() > 2) return each.is_thorough ? 12 : 2;
    return each.is_thorough ? 100 : 5;
  }

  static std::string describe(const OperatorCase& each, const Reference& reference,
                              const std::vector<Placements>& assignment) {
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < assignment.size(); ++i) {
      texts.push_back(lockstep::str(reference.inputs[i].sizes(), " ", to_string(assignment[i])));
    }
    return lockstep::str(each.name, "(", join(texts, ", "), ")");
  }

  bool is_refused(const OperatorCase& each, const std::vector<Placements>& assignment) const {
    if (!each.is_refused) return false;
    for (int64_t axis = 0; axis < mesh_.ndim(); ++axis) {
      Placements of_axis;
      for (const auto& placements : assignment) of_axis.push_back(placements[static_cast<std::size_t>(axis)]);
      if (each.is_refused(of_axis)) return true;
    }
    return false;
  }

  static std::string text_of(const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    return known != nullptr ? known->what_without_backtrace() : error.what();
  }

  void fail(const std::string& what) { failures_.push_back(what); }

  void run_assignment(const OperatorCase& each, const Reference& reference, const std::vector<Placements>& assignment,
                      std::mt19937& random) {
    ++count_;
    const auto what = describe(each, reference, assignment);
    Tensors inputs;
    for (std::size_t i = 0; i < assignment.size(); ++i) {
      const Layout layout(mesh_, assignment[i], reference.inputs[i].sizes().vec());
      inputs.push_back(distributed(reference.inputs[i], layout));
      if (has_gradient(each.inputs[i])) inputs.back().requires_grad_();
    }
    const bool must_refuse = is_refused(each, assignment);
    Tensors results;
    try {
      results = each.run(inputs);
    } catch (const std::exception& error) {
      const auto text = text_of(error);
      ++refused_[each.name];
      const bool names_it =
          text.find("aten::") != std::string::npos && text.find("[lockstep/dtensor]") == 0 &&
          text.find(to_string(Layout(mesh_, assignment[0], reference.inputs[0].sizes().vec()).placements())) !=
              std::string::npos;
      if (!must_refuse || !names_it) fail(what + " threw: " + text);
      return;
    }
    if (must_refuse) return fail(what + " was not refused");
    for (std::size_t i = 0; i < results.size(); ++i) {
      check_tensor(lockstep::str(what, ", result ", i), results[i], reference.results[i]);
    }
    try {
      run_backward(what, reference, results, random);
    } catch (const std::exception& error) {
      return fail(what + ", backward threw: " + text_of(error));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto& expected = reference.inputs[i].grad();
      if (!expected.defined()) continue;
      if (!inputs[i].grad().defined()) {
        fail(lockstep::str(what, ": input ", i, " has no gradient"));
        continue;
      }
      check_tensor(lockstep::str(what, ", gradient ", i), inputs[i].grad(), expected);
    }
  }

  /// Gradients come in placements of their own: those of the result, or others.
  void run_backward(const std::string& what, const Reference& reference, const Tensors& results, std::mt19937& random) {
    Tensors differentiable;
    Tensors gradients;
    for (std::size_t i = 0; i < results.size(); ++i) {
      const bool is_natural = random() % 2 == 0;
      const auto draw = random();
      if (results[i].requires_grad() != reference.results[i].requires_grad()) {
        fail(lockstep::str(what, ": result ", i, " should ", results[i].requires_grad() ? "not " : "",
                           "have a gradient"));
      }
      if (!results[i].requires_grad() || !is_dtensor(results[i])) continue;
      const auto sizes = results[i].sizes().vec();
      auto placements = DTensor(results[i]).placements();
      for (auto& each : placements) {
        if (std::holds_alternative<Partial>(each)) each = Replicate();
      }
      const auto others = layouts_of(mesh_, 'g', sizes);
      if (!is_natural) placements = others[draw % others.size()];
      differentiable.push_back(results[i]);
      gradients.push_back(distributed(reference.gradients[i], Layout(mesh_, placements, sizes)));
    }
    if (!differentiable.empty()) torch::autograd::backward(differentiable, gradients);
  }

  void check_tensor(const std::string& what, const at::Tensor& actual, const at::Tensor& expected) {
    if (!is_dtensor(actual)) return fail(what + " is no DTensor");
    const at::NoGradGuard no_grad;
    const DTensor tensor(actual);
    const auto local = tensor.to_local();
    if (local.sizes() != at::IntArrayRef(tensor.layout().local_sizes())) {
      fail(lockstep::str(what, ": ", tensor.to_string(), " has a local tensor of ", local.sizes()));
    }
    if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
      return fail(
          lockstep::str(what, ": ", tensor.to_string(), " instead of ", expected.scalar_type(), expected.sizes()));
    }
    const auto full = tensor.full_tensor();
    if (!mesh_.is_member()) return;
    const bool is_exact = !at::isFloatingType(expected.scalar_type());
    const double tolerance = expected.scalar_type() == at::kDouble ? 1e-9 : 1e-4;
    const auto whole = expected.detach();
    if (is_exact ? !at::equal(full, whole) : !at::allclose(full, whole, tolerance, tolerance, /*equal_nan=*/true)) {
      fail(lockstep::str(what, ": ", tensor.to_string(), " differs by ",
                         (full.to(at::kDouble) - whole.to(at::kDouble)).abs().max().item<double>()));
    }
  }

  const DeviceMesh mesh_;
  std::size_t count_ = 0;
  std::map<std::string, std::size_t> refused_;
  std::vector<std::string> failures_;
};

// What cases refuse, by placements of their inputs on one axis.

inline bool is_terms(const Placement& placement) {
  return std::holds_alternative<Partial>(placement);
}

/// Written in place, and terms cannot be: of any reduction.
inline bool first_is_terms(const Placements& of_inputs) {
  return is_terms(of_inputs.front());
}

/// The same, but sums and averages can.
inline bool first_is_maximum(const Placements& of_inputs) {
  return of_inputs.front() == Placement(Partial(ReduceOp::MAX));
}

}  // namespace lockstep::dtensor_cases
