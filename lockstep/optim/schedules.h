// Learning rates as functions of the step: Python's LinearLR (for warming up), CosineAnnealingLR and SequentialLR, for
// every torch::optim::Optimizer.
//
//   optim::SequentialLR schedule(optimizer, {optim::LinearLROptions{.start_factor = 0.01, .total_iters = 100},
//                                            optim::CosineAnnealingLROptions{.T_max = 900}}, {100});
//
// Unlike libtorch's schedulers, which begin with their first step(), they set the learning rates when they are made, as
// Python's do: whatever the groups' learning rates are then is what the functions are given.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace lockstep::optim {

/// The learning rate after `steps` steps of a group that was made with `base_lr`. Pure.
using LRCurve = std::function<double(double base_lr, int64_t steps)>;

/// From base_lr * start_factor to base_lr * end_factor in total_iters steps, and stays there.
struct LinearLROptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1.0;
  int64_t total_iters = 5;

  double operator()(double base_lr, int64_t steps) const;
};

/// Half a cosine from base_lr to eta_min in T_max steps, and back again.
struct CosineAnnealingLROptions {
  int64_t T_max = 0;  // NOLINT(readability-identifier-naming): Python's name
  double eta_min = 0;

  double operator()(double base_lr, int64_t steps) const;
};

/// Follows a curve. Borrows the optimizer. Local: every rank steps it.
class CurveLR : public torch::optim::LRScheduler {
 public:
  CurveLR(torch::optim::Optimizer& optimizer, LRCurve curve);

  /// How often step() was called.
  int64_t last_epoch() const { return step_count_; }
  std::vector<double> last_lr() const { return get_current_lrs(); }

  /// "last_epoch" and "base_lr.0", "base_lr.1", … for a checkpoint.
  std::map<std::string, double> state_dict() const;
  /// Sets the learning rates, too: may come before or after the optimizer's state. Throws for another number of groups.
  void load_state_dict(const std::map<std::string, double>& state);

 protected:
  std::vector<double> get_lrs() override;

 private:
  std::vector<double> lrs_at(int64_t steps) const;
  void set_lrs();

  torch::optim::Optimizer& optimizer_;
  const LRCurve curve_;
  std::vector<double> base_lrs_;
};

class LinearLR : public CurveLR {
 public:
  explicit LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options = {});
};

class CosineAnnealingLR : public CurveLR {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, CosineAnnealingLROptions options);
};

/// The first curve until the first milestone, from where the second one begins at its step 0, and so on. Curves are
/// options, as in the example above, or any function.
class SequentialLR : public CurveLR {
 public:
  SequentialLR(torch::optim::Optimizer& optimizer, std::vector<LRCurve> curves, std::vector<int64_t> milestones);
};

}  // namespace lockstep::optim
