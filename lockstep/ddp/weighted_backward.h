// Backwards whose gradients count by the number of samples behind them: what the sum over the ranks is divided by is
// the sum of the weights. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/ddp/gradient_witness.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep::detail {

class WeightedBackward {
 public:
  /// `delayed` are parameters that are not the reducer's: whoever reduces them divides by the number of ranks. `fail`
  /// throws its message, and tells whoever has to know.
  WeightedBackward(std::shared_ptr<Reducer> reducer, std::vector<at::Tensor> delayed,
                   std::function<void(const std::string&)> fail);
  ~WeightedBackward();
  WeightedBackward(const WeightedBackward&) = delete;
  WeightedBackward& operator=(const WeightedBackward&) = delete;

  /// This rank's gradients count `weight` times: the average is the weighted one, over all ranks and all backwards
  /// since the last reduced one. Collective if the backward is reduced. If it throws, no weight is left of it.
  void run(const at::Tensor& loss, double weight, bool is_reduced);

  /// Weights of backwards whose gradients were zeroed since, and so are not waiting any more, are dropped.
  void forget_zeroed();

  /// Of backwards that were not reduced.
  double waiting_weight() const { return so_far_; }
  /// Nothing waits: gradients were dropped.
  void forget() { so_far_ = 0; }

  /// For a reduction without run(): the weight of this backward and of those before it. Collective.
  double reduced_weight_with(double weight) { return reduced(std::exchange(so_far_, 0) + weight); }
  /// For a rank that takes part with zeros: what it has not reduced is dropped, so its weight must not count.
  double reduced_weight_without_own() {
    so_far_ = 0;
    return reduced(0);
  }

 private:
  /// The sum of the ranks' weights, of which this one's is given. Collective.
  double reduced(double weight) const;
  std::string who() const;
  /// A backward failed: no weight is left of it, and gradients of earlier ones are what they were.
  void undo(double before, bool is_reduced, double factor);
  /// While it is set, gradients of a backward count as zeros, whatever they are: NaN too.
  void set_zeroes_gradients(bool zeroes);

  const std::shared_ptr<Reducer> reducer_;
  const std::vector<at::Tensor> delayed_;
  const std::vector<at::Tensor> all_;  // the reducer's, and the delayed ones
  const std::function<void(const std::string&)> fail_;
  double so_far_ = 0;        // of backwards since the last reduced one
  GradientWitness waiting_;  // what the last of them left
  const std::shared_ptr<bool> zeroes_ = std::make_shared<bool>(false);
  std::vector<std::pair<at::Tensor, unsigned>> zeroing_hooks_;  // there from the first weight of zero on
};

}  // namespace lockstep::detail
