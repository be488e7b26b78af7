// Backwards whose gradients count by the number of samples behind them: what the sum over the ranks is divided by is
// the sum of the weights. Internal to ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/ddp/reducer.h"

namespace lockstep::detail {

class WeightedBackward {
 public:
  /// `fail` throws its message, and tells whoever has to know.
  WeightedBackward(std::shared_ptr<Reducer> reducer, std::function<void(const std::string&)> fail)
      : reducer_(std::move(reducer)), fail_(std::move(fail)) {}

  /// This rank's gradients count `weight` times: the average is the weighted one, over all ranks and all backwards
  /// since the last reduced one. Collective if the backward is reduced.
  void run(const at::Tensor& loss, double weight, bool is_reduced);

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
  void scale_gradients(double factor) const;

  const std::shared_ptr<Reducer> reducer_;
  const std::function<void(const std::string&)> fail_;
  double so_far_ = 0;  // of backwards since the last reduced one
};

}  // namespace lockstep::detail
