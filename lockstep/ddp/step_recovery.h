// What a reduction that failed because a peer died has left on this rank, so that those who are left can finish it or
// begin it again together. Internal to ddp; see docs/ddp.md, "After a failed step".
//
// A reduction ends in two phases. First every bucket arrives; then the ranks vote, and only after the vote is anything
// written. So if one rank has come through the vote, every other one has all sums, whatever happened to it afterwards:
// nobody is ever ahead of another by more than what the other can write by itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::detail {

/// What became of a reduction on one rank.
struct FailedReduction {
  enum class Left {
    kNothing,  // it had not come to the end of backward, or had not begun
    kDone,     // it ended, and no forward has begun since: gradients are as they should be
    kLocal,    // this rank's own gradients are whole
    kSums,     // and so are the sums over all ranks
  };
  Left left = Left::kNothing;
  int64_t finished = 0;  // reductions before it
  double weight = 1;     // of this rank's gradients in the average
};

/// What survivors do together.
enum class Repair {
  kKeep,         // this rank: nothing, its gradients are averages
  kWriteSums,    // this rank: what arrived is written, as the others have done
  kReduceAgain,  // all: the gradients of those who are left
  kRepeatStep,   // this rank: its gradients are dropped
};

/// The same decision on all ranks, as far as it is common. `all` are the survivors', by rank; `mine` is one of them.
Repair repair_for(const FailedReduction& mine, const std::vector<FailedReduction>& all);

std::string encode(const FailedReduction& failed);
FailedReduction decode_failed_reduction(const std::string& text);

class StepRecovery {
 public:
  /// A sum that arrived, of the parameter with this index.
  struct Sum {
    std::size_t parameter = 0;
    at::Tensor gradient = {};
  };

  /// A bucket could not be launched because a peer is gone: backward goes on, so that gradients are whole, and fails at
  /// its end. True if this is such an error; else it is to be thrown.
  bool puts_off(const std::exception_ptr& error);
  bool has_put_off() const { return put_off_ != nullptr; }

  /// Backward has computed everything: fails now with what was put off. `left` is what the step leaves if it fails
  /// before all buckets are there.
  void begin_end(FailedReduction::Left left);
  /// All buckets have arrived. Collective; after it the step cannot fail on any rank.
  void vote(const GroupPtr& group, c10::Device device, std::vector<Sum> sums);
  /// This rank takes part in the step without gradients of its own.
  void set_gives_zeros(bool gives_zeros) { gives_zeros_ = gives_zeros; }
  bool gives_zeros() const { return gives_zeros_; }
  /// The gradients are written.
  void end();
  /// The step is repeated from its beginning, or was never begun.
  void forget();

  /// A forward begins whose gradients are added to those there are, or come in their place.
  void begin_forward();

  FailedReduction failed() const { return {left_, finished_, weight_}; }
  const std::vector<Sum>& sums() const { return sums_; }
  void set_weight(double weight) { weight_ = weight; }

 private:
  std::exception_ptr put_off_;
  FailedReduction::Left left_ = FailedReduction::Left::kNothing;
  std::vector<Sum> sums_;
  int64_t finished_ = 0;
  double weight_ = 1;
  bool gives_zeros_ = false;
};

}  // namespace lockstep::detail
