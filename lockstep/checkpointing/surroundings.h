// What surrounds a function and decides what it computes, besides its arguments: random numbers, autocast, the grad
// mode, and what wrappers put around forwards. Internal to checkpointing.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::detail {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};
GeneratorState state_of_generator(const at::Generator& generator);
void restore(const GeneratorState& state);

/// Taken before the function runs. Local.
class Surroundings {
 public:
  Surroundings(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors);

  /// They are as they were, with gradients on, until it is destroyed.
  class Again {
   public:
    explicit Again(const Surroundings& surroundings);
    ~Again();
    Again(const Again&) = delete;
    Again& operator=(const Again&) = delete;

   private:
    Again();

    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Autocast {
    at::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };
  static Autocast autocast_of(at::DeviceType type);
  static void set(const Autocast& autocast);

  std::vector<GeneratorState> generators_;
  std::vector<Autocast> autocasts_;
  bool is_autocast_cached_;
  std::vector<Reenter> around_;
};

}  // namespace lockstep::detail
