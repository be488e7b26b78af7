#include "lockstep/checkpointing/surroundings.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>

#include "lockstep/nn/own_generators.h"

namespace lockstep::detail {
namespace {

/// With generators that functions draw from without being told to.
std::vector<at::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices{at::Device(at::kCPU)};
  const auto add = [&](at::Device device) {
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  };
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu() && !tensor.is_meta()) add(tensor.device());
  }
  // A function may compute there with arguments that are elsewhere. What nobody has used yet stays unused.
  if (const auto type = at::getAccelerator(/*checked=*/false)) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
    const auto current = hooks.isAvailable() ? hooks.getCurrentDevice() : at::DeviceIndex(-1);
    if (current >= 0 && hooks.hasPrimaryContext(current)) add(at::Device(*type, current));
  }
  return devices;
}

}  // namespace

GeneratorState state_of_generator(const at::Generator& generator) {
  auto same = generator;  // another handle: libtorch's is not const
  const std::lock_guard lock(same.mutex());
  return {.generator = generator, .state = same.get_state()};
}

void restore(const GeneratorState& state) {
  auto same = state.generator;
  const std::lock_guard lock(same.mutex());
  same.set_state(state.state);
}

Surroundings::Autocast Surroundings::autocast_of(at::DeviceType type) {
  return {.type = type,
          .is_enabled = at::autocast::is_autocast_enabled(type),
          .dtype = at::autocast::get_autocast_dtype(type)};
}

void Surroundings::set(const Autocast& autocast) {
  at::autocast::set_autocast_enabled(autocast.type, autocast.is_enabled);
  at::autocast::set_autocast_dtype(autocast.type, autocast.dtype);
}

Surroundings::Surroundings(const CheckpointOptions& options, const std::vector<at::Tensor>& tensors)
    : is_autocast_cached_(at::autocast::is_autocast_cache_enabled()), around_(around_forward()) {
  for (const auto& device : devices_of(tensors)) {
    if (options.preserve_rng_state) {
      generators_.push_back(state_of_generator(at::globalContext().defaultGenerator(device)));
    }
    const bool is_new = std::none_of(autocasts_.begin(), autocasts_.end(),
                                     [&](const Autocast& autocast) { return autocast.type == device.type(); });
    if (is_new && at::autocast::is_autocast_available(device.type())) autocasts_.push_back(autocast_of(device.type()));
  }
  if (options.preserve_rng_state) {
    for (const auto& generator : own_generators()) generators_.push_back(state_of_generator(generator));
  }
  for (const auto& generator : options.generators) generators_.push_back(state_of_generator(generator));
}

struct Surroundings::Again::State {
  std::vector<GeneratorState> generators;
  std::vector<Autocast> autocasts;
  bool is_autocast_cached = at::autocast::is_autocast_cache_enabled();
  at::AutoGradMode grad_mode{true};
  std::vector<std::shared_ptr<void>> around;
};

Surroundings::Again::Again() : state_(std::make_unique<State>()) {
  // Casts of this run end with it: weights change between steps.
  at::autocast::increment_nesting();
}

// What throws half-way is undone: the destructor runs.
Surroundings::Again::Again(const Surroundings& surroundings) : Again() {
  for (const auto& each : surroundings.generators_) {
    state_->generators.push_back(state_of_generator(each.generator));
    restore(each);
  }
  for (const auto& each : surroundings.autocasts_) {
    state_->autocasts.push_back(autocast_of(each.type));
    set(each);
  }
  at::autocast::set_autocast_cache_enabled(surroundings.is_autocast_cached_);
  for (const auto& reenter : surroundings.around_) state_->around.push_back(reenter());
}

Surroundings::Again::~Again() {
  while (!state_->around.empty()) state_->around.pop_back();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(state_->is_autocast_cached);
  for (const auto& each : state_->autocasts) set(each);
  for (const auto& each : state_->generators) restore(each);
}

}  // namespace lockstep::detail
