// What a training loop may do, on a rank and in the one process that ranks are compared with. Internal to testing.
//
// The one process plays all ranks, one after the other, on one model, and adds up their gradients: for models that
// treat samples alike this is a step on the whole batch, and it also is what DDP promises where they do not (batch
// norm, branches by rank).
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/testing/combinations/program.h"

namespace lockstep::testing::combinations {

inline constexpr int kSteps = 5;
/// The first epoch ends before this step.
inline constexpr int kSecondEpoch = 3;
/// Of rank 0's weights, which the wrapper gives to the others.
inline constexpr uint64_t kFirstSeed = 7;
/// Steps that throw once, or leave the optimizer's step out.
inline bool is_special(int step) {
  return step == 0 || step == kSteps - 1;
}

/// A rank's inputs in a step, of which some loops take two.
at::Tensor batch_of(int step, int rank, int number = 0);

/// Values by name, of all nets.
using Snapshot = std::vector<std::pair<std::string, at::Tensor>>;

class Trainer {
 public:
  explicit Trainer(const Program& program) : program_(program) {}
  virtual ~Trainer() = default;

  /// Both epochs, and the event between.
  void train();

  // For loops: of the net whose turn it is, in the step and for the rank that is played.
  at::Tensor loss(int batch = 0);
  /// The loss, and how much it depends on the input: by a gradient with a graph.
  at::Tensor loss_with_input_penalty();
  /// Backward of a loss that is no rank's own: of the weights alone.
  virtual void penalize_weights() = 0;
  virtual void backward(const at::Tensor& loss) = 0;
  virtual void weighted_backward(const at::Tensor& loss) = 0;
  virtual void without_sync(const std::function<void()>& body) = 0;
  /// One that throws once in special steps, and is repeated.
  virtual void backward_with(Fault fault) = 0;
  void evaluate();
  void leave_step_out_if_special() { leaves_step_out_ = is_special(step_); }

  // For events.
  void load_first_model();
  void cast_there_and_back();
  void set_last_trainable(bool is_trainable);
  void add_last_to_optimizer();
  void wrap_again();
  void save_and_resume();

 protected:
  struct Part {
    AnyNet model = {};
    AnyDdp ddp = {};
    AnyOptimizer optimizer = {};
    std::string first = "";  // the model as it was at the beginning, as a file
  };

  /// Makes nets, wrappers and optimizers.
  void set_up(uint64_t seed);
  void run_epoch(int first_step, int end_step);
  void run_step(int step);
  Part& part() { return parts_[part_]; }
  void zero_grad();
  at::Tensor weight_penalty();
  /// What this rank has of them.
  Snapshot parameters() const;
  /// Parameters, and buffers if they count.
  Snapshot snapshot() const;

  void make_optimizer(Part& part);
  virtual void wrap(Part& part) = 0;
  /// Makes all of `part` anew, of `fresh`, and gives it the state it had.
  virtual void resume(Part& part, const AnyNet& fresh);
  virtual AnyOptimizer made_optimizer(const std::vector<at::Tensor>& parameters, const Part& part) = 0;
  /// The optimizer's state as a file.
  virtual std::string saved(const AnyOptimizer& optimizer) = 0;
  virtual const Forward& forward_of(const Part& part) const = 0;
  /// An epoch's steps on this side, in a Join scope if there is one.
  virtual void in_scope(const std::function<void()>& steps, int last_step) {
    steps();
    (void)last_step;
  }
  /// Runs the loop for every rank that is played here and has inputs.
  virtual void play_ranks() = 0;
  virtual bool has_step(int step) const = 0;
  virtual void on_parameters_changed() {}
  virtual void on_step(int step) = 0;
  virtual bool counts_buffers() const = 0;

  bool has_inputs(int rank, int step) const;
  /// The one whose buffers the others take.
  int leader() const { return program_.has_uneven_inputs ? program_.data_ranks - 1 : 0; }
  double weight_of(int rank) const { return rank + 1; }

  const Program& program_;
  std::vector<Part> parts_;
  std::size_t part_ = 0;
  int step_ = 0;
  int rank_ = 0;  // the one that is played
  bool leaves_step_out_ = false;

 private:
  at::Tensor loss_of(const at::Tensor& input);
};

std::string saved_optimizer(const torch::optim::Optimizer& optimizer);

/// The one process: the parameters after each step.
std::vector<Snapshot> train_in_one_process(const Program& program);

/// Where a rank's parameters are not those of the one process. Empty if they are.
std::string difference(const Snapshot& actual, const Snapshot& expected, double tolerance);

}  // namespace lockstep::testing::combinations
