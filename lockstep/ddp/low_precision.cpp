#include "lockstep/ddp/low_precision.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>
#include <torch/serialize/output-archive.h>

#include "lockstep/base/str.h"

namespace lockstep::detail {
namespace {

bool is_castable(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type());
}

}  // namespace

LowPrecision::LowPrecision(const MixedPrecision& config, NamedTensors parameters, const NamedTensors& buffers)
    : config_(config) {
  for (auto& [name, tensor] : parameters) {
    if (is_castable(tensor)) parameters_.push_back({std::move(name), tensor, {}});
  }
  if (!config_.buffer_dtype) return;
  for (const auto& [name, buffer] : buffers) {
    if (!is_castable(buffer) || buffer.scalar_type() == *config_.buffer_dtype) continue;
    buffers_.emplace_back(buffer, buffer.scalar_type());
    buffer.set_data(buffer.to(*config_.buffer_dtype));
  }
}

LowPrecision::~LowPrecision() {
  restore();
}

void LowPrecision::attach(const std::shared_ptr<Reducer>& reducer) {
  reducer_ = reducer;
  managed_ = reducer->parameters();
  reducer->register_comm_hook({.name = "mixed precision",
                               .run = [this](GradBucket& bucket) { return reduce(bucket, reducer_.lock()->group()); }});
  reducer->set_finish_listener([this] { restore(); });
  if (!config_.param_dtype) return;
  // Its own hooks are those of full-precision accumulators, which never run.
  reducer->use_accumulators_of(hooks_);
}

FuturePtr LowPrecision::reduce(GradBucket& bucket, const GroupPtr& group) const {
  if (config_.reduce_dtype && bucket.buffer().scalar_type() != *config_.reduce_dtype) {
    bucket.set_buffer(bucket.buffer().to(*config_.reduce_dtype));
  }
  const auto ranks = group->getSize();
  return then(all_reduce_future(bucket.buffer(), group), [ranks](const at::Tensor& sum) { return sum.div_(ranks); });
}

void LowPrecision::cast_down() {
  // A backward that failed has not restored them.
  has_queued_restore_ = false;
  if (is_low_ || !config_.param_dtype) return;
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters_) {
    parameter.full = parameter.tensor.detach();
    parameter.tensor.set_data(parameter.full.to(*config_.param_dtype));
    auto& grad = parameter.tensor.mutable_grad();
    if (grad.defined()) grad = grad.to(*config_.param_dtype);
  }
  is_low_ = true;
  hooks_.add(managed_, [this](std::size_t index) { on_gradient(index); });
}

void LowPrecision::on_gradient(std::size_t index) {
  const auto reducer = reducer_.lock();
  if (!reducer) return;
  if (!has_queued_restore_) {
    has_queued_restore_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([this, weak = reducer_] {
      const auto still = weak.lock();
      // A backward that is reduced restores when its gradients are written.
      if (still && !still->is_armed()) restore();
    });
  }
  reducer->autograd_hook(index);
}

void LowPrecision::restore() {
  if (!is_low_) return;
  const at::NoGradGuard no_grad;
  hooks_.remove();
  for (auto& parameter : parameters_) {
    const auto dtype = parameter.full.scalar_type();
    parameter.tensor.set_data(parameter.full);
    parameter.full.reset();
    auto& grad = parameter.tensor.mutable_grad();
    if (grad.defined() && grad.scalar_type() != dtype) grad = grad.to(dtype);
  }
  is_low_ = false;
}

at::Tensor LowPrecision::cast_input(const at::Tensor& input) const {
  return config_.param_dtype && is_castable(input) ? input.to(*config_.param_dtype) : input;
}

at::Tensor LowPrecision::in_full(const at::Tensor& tensor) const {
  for (const auto& parameter : parameters_) {
    if (is_low_ && parameter.tensor.is_same(tensor)) return parameter.full;
  }
  for (const auto& [buffer, dtype] : buffers_) {
    if (buffer.is_same(tensor)) return buffer.to(dtype);
  }
  return tensor;
}

void LowPrecision::save(const torch::nn::Module& module, torch::serialize::OutputArchive& archive) const {
  // Not by casting for the time of a call: an archive reads its tensors when it is written out.
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    archive.write(parameter.key(), in_full(parameter.value()));
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    archive.write(buffer.key(), in_full(buffer.value()), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    save(*child.value(), inner);
    archive.write(child.key(), inner);
  }
}

}  // namespace lockstep::detail
