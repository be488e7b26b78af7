// GradScaler: multiplies losses so that gradients of half types do not vanish, and leaves out steps in which they
// overflow. Python's torch.amp.GradScaler.
//
//   scaler.scale(loss).backward();
//   scaler.step(optimizer);         // or scaler.unscale_(optimizer), clip, and then step
//   scaler.update();
//
// Ranks that hold different gradients must agree on leaving out a step before any of them steps, else their parameters
// and scales part. Of a ShardedGradients the scaler knows with whom; of other optimizers `process_group` says it. For
// one thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/optim/sharded_gradients.h"

namespace lockstep {

struct GradScalerOptions {
  /// Whose gradients are scaled. Without CUDA, a scaler for it is disabled with a warning, as in Python.
  c10::DeviceType device = at::kCUDA;
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// False: everything passes through.
  bool enabled = true;
  /// Given: if the gradients of one of its ranks have overflowed, no rank steps. Collective: all ranks unscale the same
  /// optimizers in the same order, also those without a gradient. Null is refused: it is what new_group() gives to
  /// ranks that are not in it.
  std::optional<GroupPtr> process_group = std::nullopt;
};

namespace detail {
struct NoOption {
  NoOption() = delete;
};
}  // namespace detail

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  /// GradScaler scaler({}): else {} could be a GradScaler to copy as well.
  explicit GradScaler(std::initializer_list<detail::NoOption> /*none*/) : GradScaler() {}

  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients that the optimizer's step uses by the scale and notes whether they are finite. At most once
  /// between updates, and before step(): for programs that look at gradients or clip them. Collective and blocking if
  /// ranks must agree.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Unscales unless that is done, and steps if all gradients are finite. Returns what the optimizer's step() returned;
  /// undefined if it was left out. A step that is left out discards what a ShardedGradients holds outside of .grad.
  at::Tensor step(torch::optim::Optimizer& optimizer);

  /// Ends the iteration: shrinks the scale if a step was left out, and lets it grow after growth_interval that were
  /// not.
  void update();
  /// Ends the iteration and sets the scale: a number above 0, or a tensor of one.
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  /// 1 if disabled. Waits for the device.
  double get_scale() const;
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(int64_t interval) { options_.growth_interval = interval; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's five numbers by name; none if disabled. To be taken after update().
  std::map<std::string, double> state_dict() const;
  /// Does nothing if disabled. Throws if an entry is missing, having changed nothing.
  void load_state_dict(const std::map<std::string, double>& state);

 protected:
  bool keeps_dtype_ = false;  // of what is scaled

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct OptimizerState {
    Stage stage = Stage::kReady;
    at::Tensor found_inf = {};
  };

  /// The scale on that device; makes it at first use.
  at::Tensor scale_on(c10::Device device);
  void check_scale(const char* function) const;
  /// 1 if a gradient is not finite, on the scale's device; undefined if there is no gradient.
  at::Tensor unscale_gradients(const std::vector<GradientShard>& shards) const;
  /// With whom this rank must agree about gradients that are divided so: each group once, in the same order on all.
  std::vector<GroupPtr> groups_to_agree(torch::optim::Optimizer& optimizer,
                                        const std::vector<GradientShard>& shards) const;

  GradScalerOptions options_;
  // Numbers as long as the device is not known, then tensors there.
  double first_scale_;
  int64_t first_growth_tracker_ = 0;
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  // Since the last update.
  std::unordered_map<const torch::optim::Optimizer*, OptimizerState> optimizers_;
};

/// Python's name for one that works with sharded parameters, as any does here: it learns from their layouts with whom
/// to agree. As in Python, what it scales keeps its dtype: a loss in half precision is not promoted.
class ShardedGradScaler : public GradScaler {
 public:
  explicit ShardedGradScaler(GradScalerOptions options = {}) : GradScaler(std::move(options)) { keeps_dtype_ = true; }
  explicit ShardedGradScaler(std::initializer_list<detail::NoOption> /*none*/) : ShardedGradScaler() {}
};

}  // namespace lockstep
