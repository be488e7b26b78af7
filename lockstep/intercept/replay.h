// Internal to intercept. Runs a part of a recording: what some storages need, and nothing else, in the recorded order.
//
// Random operators run once in their order, each remembering the generator's state before it; one that is needed again
// starts from that. So the numbers are those of an ordinary build whichever module comes first. What must run only to
// get past its numbers is thrown away at once.
#pragma once

#include <c10/core/Storage.h>

#include <map>
#include <set>
#include <vector>

#include "lockstep/intercept/recording.h"

namespace lockstep::detail {

/// A tensor there.
at::Tensor tensor_at(const c10::Storage& storage, const TensorPlace& place);

class Replay {
 public:
  explicit Replay(Recording& recording) : recording_(recording) {}

  /// Gives the storages memory, which lives as long as this or a tensor on it.
  void run_for(const std::vector<std::size_t>& storages);
  /// Runs all operators that draw random numbers and have not yet.
  void run_all_draws();

 private:
  void need_storage(std::size_t storage, std::size_t before);
  void need_operator(std::size_t position);
  void need_earlier_draws(std::size_t stream, std::size_t position);
  void note_last_uses();

  void run_planned();
  void run(std::size_t position);
  void draw(RecordedOperator& recorded, torch::jit::Stack& stack);
  torch::jit::Stack arguments_of(const RecordedOperator& recorded) const;
  at::Tensor tensor_of(const RecordedOperator& recorded, const RecordedOperand& operand) const;
  void take_results(const RecordedOperator& recorded, const torch::jit::Stack& results);

  Recording& recording_;
  std::set<std::size_t> planned_;                     // positions
  std::map<std::size_t, std::size_t> needed_before_;  // by storage: its writers before this position are planned
  std::map<std::size_t, std::size_t> planned_draws_;  // by stream: so many of its operators are planned or have run
  std::map<std::size_t, std::vector<std::size_t>> last_used_at_;  // by position: storages nobody needs after it
  std::set<std::size_t> wanted_;
  std::map<std::size_t, c10::Storage> memory_;
};

}  // namespace lockstep::detail
