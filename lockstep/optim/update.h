// What the update rules of this folder (adam.h, sgd.h, …) take and share.
//
// A rule updates a list of parameters in place, without autograd, and knows nothing of groups, archives or where state
// is kept: it gets pointers to it. Lists go to at::_fused_*_ kernels where those take them, else to at::_foreach_*
// ones. Rules may run at the same time on lists that share no parameter.
//
// A rule is a struct of static members: Options, kName, kSlots (the names Python gives the tensors of a state),
// kCountsSteps, kTakesSparse, check(options), which throws Python's complaint about a bad value, and
// update(updates, options), which makes the state of parameters that have none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <vector>

namespace lockstep::optim {

inline constexpr std::size_t kSlotCount = 3;

/// Where a parameter's state is kept. Slots are the rule's tensors, in the order of its kSlots; an undefined one has
/// not been needed yet.
struct StateRef {
  int64_t* step = nullptr;
  std::array<at::Tensor*, kSlotCount> slots = {};
};

/// One parameter's part of a step: its gradient must be defined.
struct ParameterUpdate {
  at::Tensor parameter = {};
  at::Tensor gradient = {};
  StateRef state = {};
};
using ParameterUpdates = c10::ArrayRef<ParameterUpdate>;

/// What a rule keeps of a parameter, where nothing else prescribes a form.
struct SlotState {
  int64_t step = 0;
  std::array<at::Tensor, kSlotCount> slots = {};

  StateRef ref() { return {&step, {&slots[0], &slots[1], &slots[2]}}; }
};

namespace detail {

/// Updates of one device and dtype, as kernels take them. Complex tensors are here as real ones.
struct UpdateLists {
  /// The fused kernels may have them: they are dense and laid out alike, each with its gradient and state.
  bool is_fusable = false;
  /// None of them is worth a second thread.
  bool is_small = false;
  std::vector<at::Tensor> parameters = {};
  std::vector<at::Tensor> gradients = {};
  std::array<std::vector<at::Tensor>, kSlotCount> slots = {};
  std::vector<int64_t> steps = {};

  /// The steps as tensors on the parameters' device, those of equal value being one tensor.
  std::vector<at::Tensor> step_tensors() const;
};

/// Which slots a rule uses with its present options. The others stay as they are.
using SlotsUsed = std::array<bool, kSlotCount>;

/// Sorts dense updates whose used slots have been made.
std::vector<UpdateLists> lists_of(ParameterUpdates updates, const SlotsUsed& used);

/// Gradients as a loop needs them: negated, and with `weight_decay` times the parameters. Not to be written to: they
/// are the caller's own if neither was asked for.
std::vector<at::Tensor> loop_gradients(const UpdateLists& lists, bool maximize, double weight_decay);

/// Multiplies all by a number.
void scale(const std::vector<at::Tensor>& tensors, double factor);

/// Gives an empty slot a tensor of this value, laid out like the parameter.
void fill_slot(const at::Tensor& parameter, at::Tensor& slot, double value = 0);
/// Zeros for the used slots that are empty.
void fill_slots(ParameterUpdates updates, const SlotsUsed& used);

/// Counts the step of each.
void advance(ParameterUpdates updates);

/// Throws if a gradient does not fit its parameter, or is sparse and those are not taken.
void check_gradients(ParameterUpdates updates, const char* rule, bool takes_sparse);

/// Throws, naming both positions, if a parameter is listed twice: it would be stepped twice, by kernels at once.
void check_listed_once(c10::ArrayRef<at::Tensor> parameters, const char* rule);

/// Throws unless the value is >= 0, which NaN is not: "AdamW: Invalid epsilon value: -1".
void check_not_negative(const char* rule, const char* what, double value);
/// Throws unless both are in [0, 1).
void check_betas(const char* rule, double beta1, double beta2);

}  // namespace detail

/// Throws if the rule refuses one of the gradients; update() asks first, callers with several lists ask for all before.
template <class Rule>
void check_gradients(ParameterUpdates updates, const typename Rule::Options& options) {
  bool takes_sparse = false;
  // Decay would make them dense.
  if constexpr (Rule::kTakesSparse) takes_sparse = options.weight_decay == 0;
  detail::check_gradients(updates, Rule::kName, takes_sparse);
}

}  // namespace lockstep::optim
