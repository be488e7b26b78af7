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
  const torch::nn::Module* parent = nullptr;
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
/// modules, and ignored modules, are passed over; a module that is a unit already is refused. With a low precision,
/// modules that need a high one become units of their own (MixedPrecisionPolicy::is_full_precision_module). A hybrid
/// strategy without a mesh shards within hosts. Collective as fully_shard() is.
FsdpUnit shard_by_policy(torch::nn::Module& root, const WrapPolicy& policy, const FullyShardOptions& options = {});
template <class Holder>
  requires requires(Holder& holder) { *holder; }
FsdpUnit shard_by_policy(Holder root, const WrapPolicy& policy, const FullyShardOptions& options = {}) {
  return shard_by_policy(*root, policy, options);
}

/// While it lives, wrap() on this thread makes units, with these options. Not inside of another one.
///
///   const lockstep::EnableWrap scope({.mesh = mesh});
///   layer = register_module("layer", lockstep::wrap(torch::nn::Linear(8, 8)));
class EnableWrap {
 public:
  explicit EnableWrap(FullyShardOptions options = {});
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;

 private:
  const FullyShardOptions options_;
};

namespace detail {
void wrap_module(torch::nn::Module& module, const std::optional<FullyShardOptions>& options);
}

/// fully_shard() of a module inside of an EnableWrap scope, with the scope's options or its own; nothing outside of
/// one.
template <class Holder>
Holder wrap(Holder module, const std::optional<FullyShardOptions>& options = std::nullopt) {
  detail::wrap_module(*module, options);
  return module;
}

}  // namespace lockstep
