// What PowerSGD hooks are told and remember: Python's PowerSGDState. One serves all buckets of one wrapper.
//
//   auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 2});
//   ddp.register_comm_hook(power_sgd_hook(state));
//
// Read it between steps. Every rank must make it with the same options.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/second_round.h"

namespace lockstep {

/// Python's arguments and defaults.
struct PowerSGDOptions {
  /// Null: the default group.
  GroupPtr process_group = nullptr;
  /// Columns of P and Q: more of them, less compression and less error.
  int64_t matrix_approximation_rank = 1;
  /// start_powerSGD_iter: until this many steps are over, gradients are averaged as they are. Above 1 with feedback or
  /// warm start, which remember things by bucket: buckets are laid out anew after the first step.
  int64_t start_power_sgd_iter = 1000;
  /// A tensor is compressed if it becomes smaller by more than this.
  double min_compression_rate = 2;
  /// What compression took away is added to the next step's gradients.
  bool use_error_feedback = true;
  /// Q starts from the last step's, not from random numbers.
  bool warm_start = true;
  /// Added to the length of columns, against division by zero. (Columns of zeros stay zeros without it.)
  double orthogonalization_epsilon = 0;
  uint32_t random_seed = 0;
  /// Steps between two lines in the log.
  int64_t compression_stats_logging_frequency = 10000;
  /// Matrices of the same shape are multiplied in one operation, at the price of a copy.
  bool batch_tensors_with_same_shape = false;
};

namespace detail {

/// A bucket's tensors between steps. Callbacks of a step use them; the next step's hook finds them finished.
struct PowerSGDMemory {
  /// Those of the bucket, to know it again; none if it was loaded.
  std::vector<const c10::TensorImpl*> parameters = {};
  at::Tensor error;
  at::Tensor p;
  at::Tensor q;
  at::Tensor rest;                 // what is not compressed, in one piece
  at::Tensor square;               // batched form: the padded bucket
  std::vector<at::Tensor> stacks;  // matrices of the same shape
};

}  // namespace detail

class PowerSGDState {
 public:
  /// Local. Refuses a rank below 1, and a start that is too early.
  explicit PowerSGDState(PowerSGDOptions options = {});

  const PowerSGDOptions& options() const { return options_; }
  /// Python's state.process_group = …; between steps.
  void set_process_group(GroupPtr group) { options_.process_group = std::move(group); }

  /// Steps seen so far; counted at a step's last bucket.
  int64_t iter() const { return iter_; }

  struct CompressionStats {
    double rate = 0;  // before / after
    int64_t numel_before = 0;
    int64_t numel_after = 0;
  };
  /// Of all compressed steps so far.
  CompressionStats compression_stats() const;

  /// By bucket: what is remembered between steps. Without warm start there are no P and Q.
  std::map<int64_t, at::Tensor> error_dict() const;
  std::map<int64_t, at::Tensor> p_memory_dict() const;
  std::map<int64_t, at::Tensor> q_memory_dict() const;

  /// Everything but the group, as bytes that torch::pickle_load() reads: a dictionary with Python's names.
  std::string save() const;
  /// The state goes on where it was saved, on `group`, or the default one. Local.
  static std::shared_ptr<PowerSGDState> load(const std::string& bytes, GroupPtr group = nullptr);

  // ---- for the hooks, which are called one after the other ----

  /// The one that was given, else the default one.
  GroupPtr group() const;
  /// The one that was given, else that of the wrapper whose bucket it is.
  GroupPtr group_for(const GradBucket& bucket) const;
  bool compresses() const { return iter_ >= options_.start_power_sgd_iter; }
  /// A bucket was seen; Python's maybe_increase_iter().
  void count(const GradBucket& bucket);
  void add_to_stats(int64_t numel_before, int64_t numel_after);
  /// Writes the statistics to the log if it is time.
  void report_stats(const GradBucket& bucket);
  const std::shared_ptr<detail::PowerSGDMemory>& memory_of(const GradBucket& bucket);
  /// The next of the seeds all ranks have in common; the one Python's state draws.
  uint64_t next_seed();
  detail::SecondRound& second_round() { return second_round_; }

 private:
  PowerSGDOptions options_;
  std::mt19937 seeds_;
  std::map<int64_t, std::shared_ptr<detail::PowerSGDMemory>> memory_;
  detail::SecondRound second_round_;
  int64_t iter_ = 0;
  int64_t numel_before_ = 0;
  int64_t numel_after_ = 0;
  int64_t next_stats_report_ = 0;
};

}  // namespace lockstep
