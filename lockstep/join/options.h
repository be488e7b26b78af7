// What a user may say when a Join scope is opened. JoinOptions goes to every joinable as it is; JoinSettings holds it
// and what the scope itself follows. All ranks give the same.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace lockstep {

/// Handed unchanged to every joinable's join_hook(): each takes what it knows and ignores the rest.
struct JoinOptions {
  /// DDP: gradients are divided by the size of the group, also when some ranks have joined. False: by the number of
  /// ranks that have inputs, or gradients that were not reduced yet.
  bool divide_by_initial_world_size = true;
  /// DDP: live ranks call backward(loss, weight), so that gradients are averaged over samples, of which ranks that ran
  /// out have none.
  bool weighted = false;
  /// For joinables of your own: {{"num_allreduces", 2}}.
  std::map<std::string, c10::IValue> extra = {};

  /// The value under `key`, or `fallback`. Throws, naming the key, if it is of another type.
  template <class T>
  T get(const std::string& key, const T& fallback) const {
    const auto found = extra.find(key);
    if (found == extra.end()) return fallback;
    // Asked beforehand: to IValue a wrong type is an internal error, and its message names no key.
    const auto wanted = c10::IValue(fallback).tagKind();
    TORCH_CHECK(found->second.tagKind() == wanted, "[lockstep/join] option '", key, "' is a ", found->second.tagKind(),
                ", not a ", wanted);
    return found->second.to<T>();
  }
};

class Joinable;

/// What a live rank does around the step of one joinable.
struct MirroredStep {
  std::function<void()> before = nullptr;
  std::function<void()> after = nullptr;
};

struct JoinSettings {
  /// False: the scope does nothing at all. All ranks promise to have the same number of iterations.
  bool enable = true;
  /// All ranks stop, by an error, where the first one ran out of inputs: nothing is mirrored. For models with
  /// collectives that cannot be mirrored. Every live rank then waits for the control message of each iteration.
  bool throw_on_early_termination = false;
  JoinOptions options = {};
  /// Called on a joined rank in each mirrored iteration in which gradients are reduced, when they are there and before
  /// a joinable of JoinPhase::kStep steps: what a live rank does between backward and step(), such as clipping.
  std::function<void()> before_mirrored_step = nullptr;
  /// Called on a joined rank after the main hooks of such an iteration: what a live rank does after step(), such as
  /// advancing a learning rate. Ranks that stepped with different ones throw. Plain optimizers: see Join::mirror().
  std::function<void()> on_mirrored_step = nullptr;
  /// All ranks stop, by an error naming the ranks that ran out long ago, when one would have to mirror more than this.
  /// Costs the same wait as throw_on_early_termination.
  std::optional<int64_t> max_mirrored_iterations = std::nullopt;
  /// For lists of several models, [ddpG, zeroG, ddpD, zeroD]: the same two callbacks for each joinable that steps,
  /// called around its main hook. before_mirrored_step is refused there: it could not say whose gradients are meant.
  std::map<const Joinable*, MirroredStep> mirrored_steps = {};
};

}  // namespace lockstep
