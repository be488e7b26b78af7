// Which modules become units: rules that pick them out of a tree of modules, as Python's auto wrap policies do.
//
//   lockstep::shard_by_policy(*model, lockstep::module_wrap_policy<torch::nn::TransformerEncoderLayerImpl>());
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/fsdp/fully_shard.h"

namespace lockstep {

/// Looked at from the leaves to the root; a module that is used twice is looked at once.
struct PolicyQuestion {
  const torch::nn::Module& module;
  std::string name;                // dotted
  int64_t unwrapped_elements = 0;  // of parameters below it that are in no unit yet
};

/// Whether a module becomes a unit: no, yes, or yes with options of its own.
struct PolicyAnswer {
  bool is_unit = false;
  std::optional<FullyShardOptions> options = std::nullopt;

  PolicyAnswer(bool yes) : is_unit(yes) {}  // NOLINT(google-explicit-constructor): policies return bool
  PolicyAnswer(FullyShardOptions own)
      : is_unit(true), options(std::move(own)) {}  // NOLINT(google-explicit-constructor)
};
using WrapPolicy = std::function<PolicyAnswer(const PolicyQuestion& question)>;

/// Every module that can be called.
WrapPolicy always_wrap_policy();
/// Modules of these types: module_wrap_policy<torch::nn::LinearImpl, MyBlockImpl>().
template <class... Modules>
WrapPolicy module_wrap_policy() {
  return [](const PolicyQuestion& question) {
    return PolicyAnswer(((dynamic_cast<const Modules*>(&question.module) != nullptr) || ...));
  };
}
/// Modules with at least so many elements that are in no unit yet. Not attention's children.
WrapPolicy size_based_wrap_policy(int64_t min_num_params = 100'000'000);

/// fully_shard() of all modules below `root` that the policy picks, then of `root` itself. Containers that only hold
/// modules, and modules that are units already, are passed over. Collective as fully_shard() is.
FsdpUnit shard_by_policy(torch::nn::Module& root, const WrapPolicy& policy, const FullyShardOptions& options = {});
template <class Holder>
  requires requires(Holder& holder) { *holder; }
FsdpUnit shard_by_policy(Holder root, const WrapPolicy& policy, const FullyShardOptions& options = {}) {
  return shard_by_policy(*root, policy, options);
}

}  // namespace lockstep
