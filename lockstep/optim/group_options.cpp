#include "lockstep/optim/group_options.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

namespace lockstep::optim {
namespace {

/// False if libtorch's options are not those of this optimizer.
template <class Options>
bool take_from_libtorch(const torch::optim::OptimizerOptions& /*from*/, Options& /*into*/) {
  return false;
}

/// libtorch's two are as alike as ours.
template <class Theirs, class Options>
bool take_adam(const torch::optim::OptimizerOptions& from, Options& into) {
  const auto* theirs = dynamic_cast<const Theirs*>(&from);
  if (theirs == nullptr) return false;
  into.lr = theirs->lr();
  into.betas = theirs->betas();
  into.eps = theirs->eps();
  into.weight_decay = theirs->weight_decay();
  into.amsgrad = theirs->amsgrad();
  return true;
}

template <>
bool take_from_libtorch(const torch::optim::OptimizerOptions& from, AdamOptions& into) {
  return take_adam<torch::optim::AdamOptions>(from, into);
}

template <>
bool take_from_libtorch(const torch::optim::OptimizerOptions& from, AdamWOptions& into) {
  return take_adam<torch::optim::AdamWOptions>(from, into);
}

template <>
bool take_from_libtorch(const torch::optim::OptimizerOptions& from, SGDOptions& into) {
  const auto* theirs = dynamic_cast<const torch::optim::SGDOptions*>(&from);
  if (theirs == nullptr) return false;
  into.lr = theirs->lr();
  into.momentum = theirs->momentum();
  into.dampening = theirs->dampening();
  into.weight_decay = theirs->weight_decay();
  into.nesterov = theirs->nesterov();
  return true;
}

template <>
bool take_from_libtorch(const torch::optim::OptimizerOptions& from, AdagradOptions& into) {
  const auto* theirs = dynamic_cast<const torch::optim::AdagradOptions*>(&from);
  if (theirs == nullptr) return false;
  into.lr = theirs->lr();
  into.lr_decay = theirs->lr_decay();
  into.weight_decay = theirs->weight_decay();
  into.initial_accumulator_value = theirs->initial_accumulator_value();
  into.eps = theirs->eps();
  return true;
}

template <>
bool take_from_libtorch(const torch::optim::OptimizerOptions& from, RMSpropOptions& into) {
  const auto* theirs = dynamic_cast<const torch::optim::RMSpropOptions*>(&from);
  if (theirs == nullptr) return false;
  into.lr = theirs->lr();
  into.alpha = theirs->alpha();
  into.eps = theirs->eps();
  into.weight_decay = theirs->weight_decay();
  into.momentum = theirs->momentum();
  into.centered = theirs->centered();
  return true;
}

void add_number(std::vector<std::pair<const char*, double>>& numbers, const char* name, double value) {
  numbers.emplace_back(name, value);
}

void add_number(std::vector<std::pair<const char*, double>>& numbers, const char* name,
                const std::tuple<double, double>& values) {
  numbers.emplace_back(name, std::get<0>(values));
  numbers.emplace_back(name, std::get<1>(values));
}

/// False if they are no options of this optimizer, ours or libtorch's.
template <class Options>
bool add_numbers(std::vector<std::pair<const char*, double>>& numbers, const torch::optim::OptimizerOptions& options) {
  Options copy;
  const auto* ours = dynamic_cast<const GroupOptions<Options>*>(&options);
  if (ours != nullptr) copy = *ours;
  if (ours == nullptr && !take_from_libtorch(options, copy)) return false;
  Options::visit(copy, [&](const char* name, const auto& value) { add_number(numbers, name, value); });
  return true;
}

template <class... Options>
bool add_numbers_of_any(std::vector<std::pair<const char*, double>>& numbers,
                        const torch::optim::OptimizerOptions& options) {
  return (add_numbers<Options>(numbers, options) || ...);
}

}  // namespace

std::vector<std::pair<const char*, double>> numbers_of(const torch::optim::OptimizerOptions& options) {
  std::vector<std::pair<const char*, double>> numbers;
  if (add_numbers_of_any<AdamWOptions, AdamOptions, SGDOptions, RMSpropOptions, AdagradOptions, AdamaxOptions,
                         AdadeltaOptions, RpropOptions>(numbers, options)) {
    return numbers;
  }
  try {
    numbers.emplace_back("lr", options.get_lr());
    // NOLINTNEXTLINE(bugprone-empty-catch): a user's own options need have none
  } catch (const c10::Error&) {
  }
  return numbers;
}

template <class Options>
Options options_from(const torch::optim::OptimizerOptions& options, Options otherwise) {
  if (const auto* ours = dynamic_cast<const GroupOptions<Options>*>(&options)) return *ours;
  TORCH_CHECK(take_from_libtorch(options, otherwise), "[lockstep/optim] ", c10::demangle_type<Options>(),
              " cannot be made from ", c10::demangle(typeid(options).name()),
              ": these are options of another optimizer");
  return otherwise;
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  Options::visit(static_cast<Options&>(*this), [&]<class Value>(const char* name, Value& value) {
    c10::IValue saved;
    if (archive.try_read(name, saved)) value = saved.to<Value>();
  });
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::OutputArchive& archive) const {
  Options::visit(static_cast<const Options&>(*this),
                 [&](const char* name, const auto& value) { archive.write(name, c10::IValue(value)); });
}

#define LOCKSTEP_INSTANTIATE(Options)    \
  template struct GroupOptions<Options>; \
  template Options options_from<Options>(const torch::optim::OptimizerOptions& options, Options otherwise)

LOCKSTEP_INSTANTIATE(AdadeltaOptions);
LOCKSTEP_INSTANTIATE(AdagradOptions);
LOCKSTEP_INSTANTIATE(AdamOptions);
LOCKSTEP_INSTANTIATE(AdamaxOptions);
LOCKSTEP_INSTANTIATE(AdamWOptions);
LOCKSTEP_INSTANTIATE(RMSpropOptions);
LOCKSTEP_INSTANTIATE(RpropOptions);
LOCKSTEP_INSTANTIATE(SGDOptions);

#undef LOCKSTEP_INSTANTIATE

}  // namespace lockstep::optim
