#include "lockstep/optim/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "lockstep/base/str.h"

namespace lockstep::optim {
namespace {

std::string base_key(std::size_t group) {
  return str("base_lr.", group);
}

LinearLROptions checked(LinearLROptions options) {
  TORCH_CHECK(options.start_factor > 0 && options.start_factor <= 1,
              "[lockstep/optim] LinearLR: start_factor must be above 0 and at most 1, got ", options.start_factor);
  TORCH_CHECK(options.end_factor >= 0 && options.end_factor <= 1,
              "[lockstep/optim] LinearLR: end_factor must be from 0 to 1, got ", options.end_factor);
  TORCH_CHECK(options.total_iters > 0, "[lockstep/optim] LinearLR: total_iters must be positive, got ",
              options.total_iters);
  return options;
}

CosineAnnealingLROptions checked(CosineAnnealingLROptions options) {
  TORCH_CHECK(options.T_max > 0, "[lockstep/optim] CosineAnnealingLR: T_max must be positive, got ", options.T_max);
  return options;
}

LRCurve checked(LRCurve curve) {
  TORCH_CHECK(curve, "[lockstep/optim] SequentialLR: a curve is empty");
  if (const auto* linear = curve.target<LinearLROptions>()) checked(*linear);
  if (const auto* cosine = curve.target<CosineAnnealingLROptions>()) checked(*cosine);
  return curve;
}

LRCurve sequence_of(std::vector<LRCurve> curves, std::vector<int64_t> milestones) {
  TORCH_CHECK(curves.size() == milestones.size() + 1, "[lockstep/optim] SequentialLR: ", curves.size(),
              " curves need one milestone less, got ", milestones.size());
  TORCH_CHECK(std::is_sorted(milestones.begin(), milestones.end()),
              "[lockstep/optim] SequentialLR: milestones must rise, got ", join(milestones, ", "));
  for (const auto& each : curves) checked(each);
  return [curves = std::move(curves), milestones = std::move(milestones)](double base_lr, int64_t steps) {
    const auto next = std::upper_bound(milestones.begin(), milestones.end(), steps);
    const auto at = static_cast<std::size_t>(next - milestones.begin());
    return curves[at](base_lr, at == 0 ? steps : steps - milestones[at - 1]);
  };
}

}  // namespace

double LinearLROptions::operator()(double base_lr, int64_t steps) const {
  const auto done = static_cast<double>(std::min(steps, total_iters)) / static_cast<double>(total_iters);
  return base_lr * (start_factor + (end_factor - start_factor) * done);
}

double CosineAnnealingLROptions::operator()(double base_lr, int64_t steps) const {
  const auto angle = std::numbers::pi * static_cast<double>(steps) / static_cast<double>(T_max);
  return eta_min + (base_lr - eta_min) * (1 + std::cos(angle)) / 2;
}

CurveLR::CurveLR(torch::optim::Optimizer& optimizer, LRCurve curve)
    : LRScheduler(optimizer), optimizer_(optimizer), curve_(std::move(curve)), base_lrs_(get_current_lrs()) {
  TORCH_CHECK(curve_, "[lockstep/optim] a schedule needs a curve");
  set_lrs();
}

std::vector<double> CurveLR::lrs_at(int64_t steps) const {
  std::vector<double> lrs;
  for (const double base : base_lrs_) lrs.push_back(curve_(base, steps));
  return lrs;
}

// Step() asks before it counts.
std::vector<double> CurveLR::get_lrs() {
  // Groups that were added since begin where they are.
  const auto current = get_current_lrs();
  base_lrs_.insert(base_lrs_.end(), current.begin() + static_cast<std::ptrdiff_t>(base_lrs_.size()), current.end());
  return lrs_at(static_cast<int64_t>(step_count_) + 1);
}

void CurveLR::set_lrs() {
  const auto lrs = lrs_at(step_count_);
  for (std::size_t i = 0; i < lrs.size(); ++i) optimizer_.param_groups()[i].options().set_lr(lrs[i]);
}

std::map<std::string, double> CurveLR::state_dict() const {
  std::map<std::string, double> state = {{"last_epoch", static_cast<double>(step_count_)}};
  for (std::size_t i = 0; i < base_lrs_.size(); ++i) state[base_key(i)] = base_lrs_[i];
  return state;
}

void CurveLR::load_state_dict(const std::map<std::string, double>& state) {
  const auto groups = optimizer_.param_groups().size();
  TORCH_CHECK(state.size() == groups + 1 && state.contains("last_epoch"),
              "[lockstep/optim] the schedule's state is of ", state.empty() ? 0 : state.size() - 1,
              " parameter groups, the optimizer has ", groups);
  std::vector<double> bases;
  for (std::size_t i = 0; i < groups; ++i) bases.push_back(state.at(base_key(i)));
  base_lrs_ = std::move(bases);
  step_count_ = static_cast<unsigned>(state.at("last_epoch"));
  set_lrs();
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options)
    : CurveLR(optimizer, checked(options)) {}

CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer, CosineAnnealingLROptions options)
    : CurveLR(optimizer, checked(options)) {}

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, std::vector<LRCurve> curves,
                           std::vector<int64_t> milestones)
    : CurveLR(optimizer, sequence_of(std::move(curves), std::move(milestones))) {}

}  // namespace lockstep::optim
