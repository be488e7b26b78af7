// The second oracle: one process that has the batches of all ranks and no DistributedDataParallel.
#pragma once

#include <memory>
#include <string>

#include "tests/oracle/ddp/training.h"

namespace lockstep::ddp_oracle {

class OneProcess {
 public:
  /// With the weights that rank 0 began with.
  OneProcess(const Case& file_case, int world_size);

  /// Takes the same step, and expects the wrapped model's gradients to be its own if they are reduced ones.
  void run_step(std::size_t step, const torch::nn::Module& reduced);
  /// After the optimizers have stepped.
  void expect_same_parameters(const torch::nn::Module& trained) const;

 private:
  at::Tensor whole_loss(std::size_t step);

  const Case file_case_;
  const int world_size_;
  const std::shared_ptr<Model> model_;
  torch::optim::SGD optimizer_;
};

}  // namespace lockstep::ddp_oracle
