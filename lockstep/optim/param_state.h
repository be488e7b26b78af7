// What the optimizers keep of a parameter: libtorch's type where libtorch has an optimizer of that name, else one of
// ours. Internal to optim.
#pragma once

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
    archive.read("step", saved);
    step = saved.toInt();
    for (std::size_t slot = 0; slot < kSlotCount; ++slot) {
      if (Rule::kSlots[slot] != nullptr && archive.try_read(Rule::kSlots[slot], saved)) slots[slot] = saved.toTensor();
    }
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
