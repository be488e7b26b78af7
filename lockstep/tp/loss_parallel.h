// Cross entropy over classes that are cut among the ranks of an axis, without gathering the logits.
//
//   const lockstep::LossParallel loss_parallel;
//   auto loss = torch::nn::functional::cross_entropy(logits, target);   // logits: a DTensor, Shard(class dim)
//   loss.backward();
#pragma once

namespace lockstep {

/// While it lives, log_softmax of a DTensor that is cut in the dim it is taken over leaves it cut, and with it cross
/// entropy: Python's loss_parallel(). Ranks exchange two numbers per sample, and one for the loss; the backward needs
/// no collective, may run inside or outside of the scope, and gives a gradient cut as the logits are. The target is a
/// DTensor cut as the samples are, or an ordinary tensor if they are not cut. Of the thread that opens it. Local.
class LossParallel {
 public:
  LossParallel();
  ~LossParallel();
  LossParallel(const LossParallel&) = delete;
  LossParallel& operator=(const LossParallel&) = delete;
};

}  // namespace lockstep
