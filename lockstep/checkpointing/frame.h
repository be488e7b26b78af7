// One run of a checkpointed function: what it takes to run it again, and the tensors that came of that until backward
// has fetched them. Internal to checkpointing. docs/checkpointing.md tells the rules, which are Python's.
//
// A *slot* stands for a tensor that forward would have saved, in the order of saving. The hooks that autograd keeps in
// its place own the frame: it goes with the last of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/checkpointing/selective.h"
#include "lockstep/checkpointing/surroundings.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::detail {

/// What the program called, for errors.
class OperatorLog;

class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  CheckpointFrame(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors,
                  CheckpointedRun::Recompute recompute);

  /// For the forward.
  std::shared_ptr<SavingRule> dropping();
  /// Null without a policy.
  std::shared_ptr<OperatorScope> saving() { return kept_ ? kept_->saving() : nullptr; }
  /// Null without debug.
  std::shared_ptr<OperatorScope> logging() const;
  void complete_forward();

 private:
  class Dropped;
  class DroppingRule;
  class Recomputed;
  class RecomputingRule;

  struct Geometry {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;

    explicit Geometry(const at::Tensor& tensor);
    bool operator==(const Geometry&) const = default;
    std::string to_string() const;
  };
  struct Slot {
    Geometry geometry;
    c10::VariableVersion versions;  // the tensor's own counter, which lives on without it
    uint32_t version;
    std::size_t position;  // in the log
    bool is_wanted = true;
  };
  /// What came of running again for one backward.
  struct Round {
    std::vector<at::Tensor> tensors;  // by slot; undefined: not wanted, or fetched
    bool is_complete = false;
    std::weak_ptr<void> backward;  // expires with it
    // While it runs.
    std::size_t next = 0;
    std::vector<bool> wanted;
    std::size_t last_wanted = 0;
    std::vector<std::string> differences;
  };

  std::size_t add_slot(const at::Tensor& tensor);
  void forget(std::size_t slot) noexcept;
  at::Tensor fetch(std::size_t slot);
  Round& round_of(int task);
  void recompute(Round& round, std::size_t slot);
  void add_recomputed(Round& round, const at::Tensor& tensor);
  void check(const Round& round, bool has_stopped, const OperatorLog* log) const;
  void check_version(std::size_t slot) const;
  std::string who() const;
  std::string name_of(std::size_t slot) const;

  const CheckpointOptions options_;
  const CheckpointedRun::Recompute recompute_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  const Surroundings surroundings_;
  const std::shared_ptr<KeptResults> kept_;
  const std::shared_ptr<OperatorLog> log_;

  // Guarded by mutex_, also while the function runs again: backward may use several threads.
  std::recursive_mutex mutex_;
  std::vector<Slot> slots_;
  bool is_complete_ = false;
  std::map<int, Round> rounds_;  // by libtorch's number of the backward
};

}  // namespace lockstep::detail
