#include "lockstep/ddp/low_precision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace lockstep::detail {
namespace {

bool is_castable(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) && tensor.layout() == at::kStrided;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// `tensor` has the memory, the dtype and the geometry of `source` from now on. Its gradient, its accumulator and its
/// version stay.
void show(const at::Tensor& tensor, const at::Tensor& source) noexcept {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(source.getIntrusivePtr());
}

}  // namespace

LowPrecision::LowPrecision(const MixedPrecision& config, const NamedTensors& parameters, const NamedTensors& buffers)
    : config_(config) {
  const auto add = [&](const NamedTensors& tensors, std::optional<at::ScalarType> dtype, bool are_buffers) {
    for (const auto& [name, tensor] : tensors) {
      if (dtype && is_castable(tensor)) casts_.push_back({tensor, *dtype, are_buffers});
    }
  };
  add(parameters, config_.param_dtype, false);
  add(buffers, config_.buffer_dtype, true);
}

LowPrecision::Shown::Shown(const Cast& cast)
    : cast(cast),
      full(cast.tensor.variable_data()),
      low(full.to(cast.to)),
      version(version_of(cast.tensor)),
      accumulator(cast.tensor.requires_grad() && cast.tensor.is_leaf()
                      ? torch::autograd::impl::grad_accumulator(cast.tensor)
                      : nullptr) {}

/// The copies of a forward, shown while a part of it runs again.
class LowPrecision::ShownAgain {
 public:
  explicit ShownAgain(std::shared_ptr<const std::vector<Shown>> shown) : shown_(std::move(shown)) {
    for (const auto& each : *shown_) {
      before_.push_back(each.cast.tensor.variable_data());
      show(each.cast.tensor, each.low);
    }
  }
  ~ShownAgain() {
    for (std::size_t i = 0; i < before_.size(); ++i) show((*shown_)[i].cast.tensor, before_[i]);
  }
  ShownAgain(const ShownAgain&) = delete;
  ShownAgain& operator=(const ShownAgain&) = delete;

 private:
  const std::shared_ptr<const std::vector<Shown>> shown_;
  std::vector<at::Tensor> before_;
};

void LowPrecision::enter() {
  // Copies are ordinary tensors in InferenceMode too: the module's tensors are.
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  Forward forward{std::make_unique<SavesContents>(), std::make_shared<std::vector<Shown>>(), nullptr};
  for (const auto& cast : casts_) {
    // It is low already where a wrapper runs inside of another.
    if (cast.tensor.scalar_type() != cast.to && is_castable(cast.tensor)) forward.shown->emplace_back(cast);
  }
  forward.around =
      std::make_unique<AroundForward>([shown = forward.shown] { return std::make_shared<ShownAgain>(shown); });
  open_.push_back(std::move(forward));
  for (const auto& each : *open_.back().shown) show(each.cast.tensor, each.low);
}

void LowPrecision::leave() noexcept {
  auto forward = std::move(open_.back());
  open_.pop_back();
  written_.clear();
  for (auto& each : *forward.shown) {
    const auto& tensor = each.cast.tensor;
    // Kernels write running means without counting a version.
    if (each.cast.is_buffer || version_of(tensor) != each.version) {
      each.low = tensor.variable_data();
      written_.push_back(each);
    }
    show(tensor, each.full);
  }
}

void LowPrecision::keep_writes() {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  for (const auto& each : std::exchange(written_, {})) {
    const auto now = each.low.to(each.full.scalar_type());
    if (now.sizes() != each.full.sizes()) {
      show(each.cast.tensor, now);
      continue;
    }
    const auto is_as_before = each.low == each.full.to(each.low.scalar_type());
    each.full.copy_(at::where(is_as_before, each.full, now));
  }
}

at::Tensor LowPrecision::cast_input(const at::Tensor& input) const {
  return config_.param_dtype && is_castable(input) ? input.to(*config_.param_dtype) : input;
}

}  // namespace lockstep::detail
