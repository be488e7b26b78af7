// Which parameters a step uses: found in the graph before backward, and agreed on by all ranks after it. Internal to
// ddp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "lockstep/comm/pending.h"
#include "lockstep/ddp/reducer_setup.h"

namespace lockstep::detail {

/// Indices of the accumulators that a backward from `outputs` would not reach, in order.
std::vector<std::size_t> find_unused(const std::vector<at::Tensor>& outputs,
                                     const std::unordered_map<const torch::autograd::Node*, std::size_t>& accumulators);

/// A mark per parameter: used by this rank, then by how many. The marks of all ranks are summed behind the last bucket,
/// while it is still on its way, and waited for with the buckets.
class UsedMap {
 public:
  UsedMap(std::size_t parameters, c10::Device device);

  void mark(std::size_t parameter);
  /// Not used, but this rank has a gradient of it: zeros, or that of an earlier step. For ranks that mirror the step.
  void mark_kept(std::size_t parameter);
  void unmark(std::size_t parameter);
  /// Adds up the marks of all ranks. Collective; does not wait.
  void launch(const GroupPtr& group);
  /// By any rank. Local and quick if this rank has; else waits for the others' marks.
  bool is_used(std::size_t parameter);
  /// How many ranks have a gradient of a parameter that is not used by any. Known once is_used() said so.
  int kept_by(std::size_t parameter) const;
  /// By this rank, before the marks are added up.
  bool is_marked(std::size_t parameter) const;
  /// Waits for what is under way: is_used() does not fail afterwards.
  void wait();
  /// The step is over. All ranks end one with it, so that no sum meets the next one.
  void finish();
  void clear();
  /// This rank's marks, to be put aside.
  at::Tensor marks() const { return marks_.clone(); }
  void set_marks(const at::Tensor& marks) { marks_.copy_(marks); }
  /// No mark is set, and what is under way meets none that will be.
  void give_up();

 private:
  void fetch();

  at::Tensor marks_;      // int32, on the host
  at::Tensor on_device_;  // what is summed
  Pending pending_;
  bool is_under_way_ = false;
};

/// What a reducer knows of unused parameters, from step to step.
struct UnusedParameters {
  /// `setup` outlives it.
  explicit UnusedParameters(const ReducerSetup& setup)
      : used(setup.parameters.size(), setup.parameters.at(0).device()), setup_(setup) {}

  /// Of a step: those that a backward from `outputs` would not reach. Collective if buckets without any other are
  /// skipped, in the first step and while debugging: ranks that skip different ones would wait for each other.
  void search(const std::vector<at::Tensor>& outputs,
              const std::unordered_map<const torch::autograd::Node*, std::size_t>& accumulators);
  bool contains(std::size_t parameter) const;

  std::vector<std::size_t> of_step = {};  // in order
  bool is_same_in_all_steps = true;
  UsedMap used;

 private:
  void compare_skipped(bool is_first);

  const ReducerSetup& setup_;
  bool has_searched_ = false;
  bool has_warned_of_needless_search_ = false;
  bool has_warned_of_changed_skips_ = false;
};

}  // namespace lockstep::detail
