#include "lockstep/optim/grad_scaler.h"

#include <ATen/Context.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/comm/call.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/state/optimizer_state.h"

namespace lockstep {
namespace {

std::vector<GradientShard> gradients_of(torch::optim::Optimizer& optimizer) {
  if (auto* sharded = dynamic_cast<ShardedGradients*>(&optimizer)) return sharded->own_gradients();
  return shards_by_layout(optimized_parameters(optimizer));
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)), first_scale_(options_.init_scale) {
  if (options_.enabled && options_.device == at::kCUDA && !at::hasCUDA()) {
    TORCH_WARN(
        "[lockstep/optim] a GradScaler for CUDA is disabled: there is no CUDA. For the CPU, give device = at::kCPU");
    options_.enabled = false;
  }
  if (!options_.enabled) return;
  if (options_.process_group) check_member(*options_.process_group);
  TORCH_CHECK(options_.growth_factor > 1, "[lockstep/optim] the growth factor must be > 1, not ",
              options_.growth_factor);
  TORCH_CHECK(options_.backoff_factor < 1, "[lockstep/optim] the backoff factor must be < 1, not ",
              options_.backoff_factor);
}

at::Tensor GradScaler::scale_on(c10::Device device) {
  if (!scale_.defined()) {
    scale_ = at::full({}, first_scale_, at::TensorOptions(device).dtype(at::kFloat));
    growth_tracker_ = at::full({}, first_growth_tracker_, at::TensorOptions(device).dtype(at::kInt));
  }
  return scale_.to(device, /*non_blocking=*/true);
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!options_.enabled) return output;
  const auto scaled = output.mul(scale_on(output.device()));
  return keeps_dtype_ ? scaled.to(output.scalar_type()) : scaled;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const auto& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::check_scale(const char* function) const {
  TORCH_CHECK(scale_.defined(), "[lockstep/optim] GradScaler: ", function,
              "() before there is a scale. Multiply the loss by scale() first.");
}

at::Tensor GradScaler::unscale_gradients(const std::vector<GradientShard>& shards) const {
  // Kernels take lists of one device and dtype.
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> lists;
  for (const auto& shard : shards) {
    for (const auto& gradient : shard.gradients) {
      TORCH_CHECK(gradient.scalar_type() != at::kHalf,
                  "[lockstep/optim] GradScaler: gradients of type float16 cannot be unscaled: keep parameters in "
                  "float32");
      const auto values = gradient.is_sparse() ? gradient._values() : gradient;
      lists[{gradient.device().str(), gradient.scalar_type()}].push_back(values);
    }
  }
  // As in Python, exactly: 1 / scale is rounded to float once.
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor found_inf;
  for (const auto& [kind, gradients] : lists) {
    const auto device = gradients.front().device();
    auto found = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device, /*non_blocking=*/true));
    found = found.to(scale_.device(), /*non_blocking=*/true);
    found_inf = found_inf.defined() ? at::maximum(found_inf, found) : found;
  }
  return found_inf;
}

std::vector<GroupPtr> GradScaler::groups_to_agree(torch::optim::Optimizer& optimizer,
                                                  const std::vector<GradientShard>& shards) const {
  std::vector<GroupPtr> groups;
  const auto add = [&](const GroupPtr& group) {
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  };
  if (const auto& given = options_.process_group) add(*given);
  for (const auto& shard : shards) std::for_each(shard.groups.begin(), shard.groups.end(), add);
  if (const auto* sharded = dynamic_cast<const ShardedGradients*>(&optimizer)) {
    for (const auto& group : sharded->stepping_groups()) add(group);
  }
  return groups;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  check_scale("unscale_");
  auto& state = optimizers_[&optimizer];
  TORCH_CHECK(
      state.stage != Stage::kUnscaled,
      "[lockstep/optim] GradScaler: unscale_() has already been called on this optimizer since the last update()");
  TORCH_CHECK(state.stage != Stage::kStepped, "[lockstep/optim] GradScaler: unscale_() is being called after step()");
  const at::NoGradGuard no_grad;
  const auto shards = gradients_of(optimizer);
  auto found_inf = unscale_gradients(shards);
  for (const auto& group : groups_to_agree(optimizer, shards)) {
    if (!found_inf.defined()) found_inf = at::zeros({}, scale_.options());
    all_reduce(found_inf, group, ReduceOp::MAX);
  }
  state = {.stage = Stage::kUnscaled, .found_inf = found_inf};
}

at::Tensor GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step();
  check_scale("step");
  auto& state = optimizers_[&optimizer];
  TORCH_CHECK(state.stage != Stage::kStepped,
              "[lockstep/optim] GradScaler: step() has already been called since the last update()");
  if (state.stage == Stage::kReady) unscale_(optimizer);
  TORCH_CHECK(state.found_inf.defined(),
              "[lockstep/optim] GradScaler: step() of an optimizer none of whose parameters has a gradient");
  at::Tensor loss;
  if (state.found_inf.item<float>() == 0) {
    loss = optimizer.step();
  } else if (auto* sharded = dynamic_cast<ShardedGradients*>(&optimizer)) {
    // The next backward would add to them.
    sharded->discard_gradients();
  }
  state.stage = Stage::kStepped;
  return loss;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  check_scale("update");
  at::Tensor found_inf;
  for (const auto& [optimizer, state] : optimizers_) {
    if (!state.found_inf.defined()) continue;
    found_inf = found_inf.defined() ? at::maximum(found_inf, state.found_inf) : state.found_inf;
  }
  TORCH_CHECK(found_inf.defined(), "[lockstep/optim] GradScaler: update() without a step() or unscale_() before it");
  const at::NoGradGuard no_grad;
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
                         options_.growth_interval);
  optimizers_.clear();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  check_scale("update");
  TORCH_CHECK(std::isfinite(new_scale) && new_scale > 0, "[lockstep/optim] GradScaler: update() was given a scale of ",
              new_scale, ". Give a number above 0.");
  scale_.fill_(new_scale);
  optimizers_.clear();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled) return;
  const bool is_number = new_scale.defined() && new_scale.numel() == 1 && new_scale.is_floating_point();
  TORCH_CHECK(is_number && !new_scale.requires_grad(), "[lockstep/optim] GradScaler: update() was given ",
              describe(new_scale), new_scale.defined() && new_scale.requires_grad() ? " that requires a gradient" : "",
              " as the scale. Give one floating-point number, detached.");
  update(new_scale.item<double>());
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<float>() : first_scale_;
}

std::map<std::string, double> GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  const auto tracker = growth_tracker_.defined() ? growth_tracker_.item<int>() : first_growth_tracker_;
  return {{"scale", get_scale()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker", static_cast<double>(tracker)}};
}

void GradScaler::load_state_dict(const std::map<std::string, double>& state) {
  if (!options_.enabled) return;
  TORCH_CHECK(!state.empty(), "[lockstep/optim] GradScaler: the state is empty, as that of a disabled one is");
  for (const auto* name : {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}) {
    TORCH_CHECK(state.count(name) == 1, "[lockstep/optim] GradScaler: the state has no '", name, "'");
  }
  first_scale_ = state.at("scale");
  first_growth_tracker_ = static_cast<int64_t>(state.at("_growth_tracker"));
  options_.growth_factor = state.at("growth_factor");
  options_.backoff_factor = state.at("backoff_factor");
  options_.growth_interval = static_cast<int64_t>(state.at("growth_interval"));
  if (!scale_.defined()) return;
  scale_.fill_(first_scale_);
  growth_tracker_.fill_(first_growth_tracker_);
}

}  // namespace lockstep
