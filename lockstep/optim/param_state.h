// What the optimizers keep of a parameter: libtorch's type where libtorch has an optimizer of that name, else one of
// ours. Internal to optim.
#pragma once

#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include "lockstep/optim/rules.h"

namespace lockstep::optim::detail {

/// In archives like libtorch's: the steps, and those tensors that there are, by name.
template <class Rule>
struct SlotParamState final : torch::optim::OptimizerCloneableParamState<SlotParamState<Rule>>, SlotState {
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue saved;
    // Another kind's state may lack it, or have one of the names and not the others.
    TORCH_CHECK(archive.try_read("step", saved), Rule::kName, " needs 'step'");
    step = saved.toInt();
    int64_t missing = 0;
    int64_t found = 0;
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (Rule::kSlots[slot] == nullptr) continue;
      const bool is_there = archive.try_read(Rule::kSlots[slot], saved);
      ++(is_there ? found : missing);
      if (is_there) slots[slot] = saved.toTensor();
    }
    TORCH_CHECK(found == 0 || missing == 0, Rule::kName, " needs more");
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step));
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (slots[slot].defined()) archive.write(Rule::kSlots[slot], c10::IValue(slots[slot]));
    }
  }
};

template <class Rule>
struct ParamStateOf {
  using Type = SlotParamState<Rule>;
  static StateRef ref(Type& state) { return state.ref(); }
};

template <>
struct ParamStateOf<AdamRule> {
  using Type = torch::optim::AdamParamState;
  static StateRef ref(Type& state) {
    return {&state.step(), {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}};
  }
};

template <>
struct ParamStateOf<AdamWRule> {
  using Type = torch::optim::AdamWParamState;
  static StateRef ref(Type& state) {
    return {&state.step(), {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()}};
  }
};

template <>
struct ParamStateOf<SGDRule> {
  using Type = torch::optim::SGDParamState;
  static StateRef ref(Type& state) { return {nullptr, {&state.momentum_buffer()}}; }
};

template <>
struct ParamStateOf<AdagradRule> {
  using Type = torch::optim::AdagradParamState;
  static StateRef ref(Type& state) { return {&state.step(), {&state.sum()}}; }
};

template <>
struct ParamStateOf<RMSpropRule> {
  using Type = torch::optim::RMSpropParamState;
  static StateRef ref(Type& state) {
    return {&state.step(), {&state.square_avg(), &state.momentum_buffer(), &state.grad_avg()}};
  }
};

}  // namespace lockstep::optim::detail
