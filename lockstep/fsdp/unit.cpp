#include "lockstep/fsdp/unit.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/fsdp/unit_tree.h"
#include "lockstep/intercept/key.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::detail {
namespace {

/// Lives with the whole parameter, which must not keep the unit alive.
class GradientArrived final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientArrived(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}

  void operator()(const at::Tensor& parameter) override {
    if (const auto unit = unit_.lock()) unit->tree().on_gradient(*unit, parameter);
  }

 private:
  const std::weak_ptr<Unit> unit_;
};

std::vector<std::weak_ptr<torch::nn::Module>> weak(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  return {modules.begin(), modules.end()};
}

std::optional<bool> reshards(const std::optional<ReshardAfterForward>& option) {
  if (!option) return std::nullopt;
  return option->ranks() != 1;
}

/// Running statistics, which the operator updates although its schema does not say so.
bool is_updated_statistic(const OperatorCall& call, std::size_t argument) {
  return call.schema().arguments()[argument].name().starts_with("running_");
}

bool is_written(const OperatorCall& call, std::size_t argument) {
  const auto* alias = call.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool is_other_floating(const c10::IValue& value, at::ScalarType dtype) {
  if (!value.isTensor()) return false;
  const auto& tensor = value.toTensor();
  return tensor.defined() && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype &&
         !is_marked_intercepted(tensor);
}

}  // namespace

Unit::Unit(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, FullyShardOptions options, DeviceMesh mesh)
    : modules_(weak(modules)),
      name_(modules.front()->name()),
      options_(std::move(options)),
      mesh_(std::move(mesh)),
      settings_{.reshard_after_forward = reshards(options_.reshard_after_forward)} {}

void Unit::shard(const std::vector<std::pair<DeviceMesh, WholeParameter>>& parameters) {
  struct Bin {
    DeviceMesh mesh;
    at::ScalarType dtype;
    std::vector<WholeParameter> parameters;
  };
  std::vector<Bin> bins;
  for (const auto& [mesh, parameter] : parameters) {
    const auto dtype = parameter.tensor.scalar_type();
    const auto& wanted = mesh;
    auto bin = std::find_if(bins.begin(), bins.end(),
                            [&](const Bin& some) { return some.dtype == dtype && some.mesh == wanted; });
    if (bin == bins.end()) bin = bins.insert(bin, {mesh, dtype, {}});
    bin->parameters.push_back(parameter);
  }
  for (const auto& bin : bins) {
    groups_.push_back(std::make_unique<ParameterGroup>(bin.parameters, bin.mesh, options_, shared_from_this()));
    for (const auto& each : bin.parameters) {
      torch::autograd::impl::set_post_acc_grad_hooks(each.tensor, std::make_unique<GradientArrived>(weak_from_this()));
    }
  }
  set_name(name_);
}

void Unit::set_name(const std::string& name) {
  name_ = name;
  for (const auto& group : groups_) group->set_unit_name(name);
}

bool Unit::has_several_meshes() const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) { return !(group->mesh() == mesh_); });
}

std::vector<GroupPtr> Unit::groups_before() const {
  std::vector<GroupPtr> found;
  for (const auto& group : groups_) {
    for (const auto& member : group->members()) {
      if (!member.cut_before) continue;
      for (const auto& each : member.cut_before->mesh().get_all_groups()) {
        if (std::find(found.begin(), found.end(), each) == found.end()) found.push_back(each);
      }
    }
  }
  return found;
}

void Unit::before_operator(OperatorCall& call, c10::ArrayRef<TouchedTensor> touched) {
  cast_inputs(call);
  tree_->begin_operator(*this, call, touched);
}

void Unit::after_operator(const OperatorCall& /*call*/) noexcept {
  tree_->end_operator(*this);
}

bool Unit::wants_full_precision() const {
  if (!options_.mp_policy.full_precision_in_eval) return false;
  const auto alive = module();
  return alive && !alive->is_training();
}

void Unit::cast_inputs(OperatorCall& call) const {
  const auto& policy = options_.mp_policy;
  if (!policy.param_dtype || !policy.cast_forward_inputs || is_plain_backward()) return;
  // What runs again does so in the precision of its forward.
  const bool is_full = is_recomputing() ? is_full_precision_.load() : wants_full_precision();
  const auto dtype = is_full ? groups_.front()->members().front().shard.scalar_type() : *policy.param_dtype;
  for (std::size_t i = 0; i < call.argument_count(); ++i) {
    auto& value = call.argument(i);
    if (!is_other_floating(value, dtype) || is_written(call, i) || is_updated_statistic(call, i)) continue;
    value = value.toTensor().to(dtype);
  }
}

void Unit::on_result(OperatorCall& call) {
  const auto& dtype = options_.mp_policy.output_dtype;
  if (!dtype || is_plain_backward()) return;
  for (std::size_t i = 0; i < call.result_count(); ++i) {
    auto& value = call.result(i);
    // Views of parameters are no outputs.
    if (is_other_floating(value, *dtype)) value = value.toTensor().to(*dtype);
  }
}

bool Unit::is_inside(const Unit& other) const {
  for (auto above = parent_.lock(); above; above = above->parent_.lock()) {
    if (above.get() == &other) return true;
  }
  return false;
}

std::string Unit::who() const {
  return str("[lockstep/fsdp] rank ", mesh_.get_rank(), ": unit '", name_, "'");
}

Event Unit::describe() const {
  Event event{.unit = name_, .group_size = static_cast<int>(mesh_.size())};
  for (const auto& group : groups_) event.bytes += static_cast<std::size_t>(group->whole_bytes());
  if (!groups_.empty()) event.dtype = groups_.front()->describe().dtype;
  return event;
}

}  // namespace lockstep::detail
