// DistributedOptimizer: one optimizer for parameters of many workers. Each owner has its own part of it, which steps
// with the gradients of one distributed autograd context and nothing else.
//
//     rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters, torch::optim::SGDOptions(0.05));
//     …
//     optimizer.step(context.id());
//
// Optimizers: all of torch::optim that have a functional form and all of lockstep::optim, and others once every worker
// has called register_optimizer().
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/functional_registry.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/rpc/call.h"

namespace lockstep::rpc {

namespace detail {

/// The options an optimizer takes: those of lockstep::optim are plain structs.
template <class Optimizer>
struct OptionsOf {
  using Type = typename Optimizer::Options;
};
template <>
struct OptionsOf<torch::optim::Adagrad> {
  using Type = torch::optim::AdagradOptions;
};
template <>
struct OptionsOf<torch::optim::Adam> {
  using Type = torch::optim::AdamOptions;
};
template <>
struct OptionsOf<torch::optim::AdamW> {
  using Type = torch::optim::AdamWOptions;
};
template <>
struct OptionsOf<torch::optim::RMSprop> {
  using Type = torch::optim::RMSpropOptions;
};
template <>
struct OptionsOf<torch::optim::SGD> {
  using Type = torch::optim::SGDOptions;
};

using Parameters = std::vector<RRef<at::Tensor>>;

/// Options as bytes.
at::Tensor pack(const torch::optim::OptimizerOptions& options);
void unpack(const at::Tensor& bytes, torch::optim::OptimizerOptions& options);

template <class Options>
using Carried = std::conditional_t<std::derived_from<Options, torch::optim::OptimizerOptions>, Options,
                                   optim::GroupOptions<Options>>;

template <class Options>
at::Tensor packed(const Options& options) {
  if constexpr (std::same_as<Carried<Options>, Options>) {
    return pack(options);
  } else {
    return pack(Carried<Options>(options));
  }
}

template <class Options>
Carried<Options> unpacked(const at::Tensor& bytes) {
  const auto make = [] {
    if constexpr (std::default_initializable<Carried<Options>>) {
      return Carried<Options>();
    } else {
      return Carried<Options>(/*lr=*/0.0);
    }
  };
  auto options = make();
  unpack(bytes, options);
  return options;
}

/// Steps parameters of this worker with gradients that are given to it.
using Stepper = std::function<void(const std::vector<at::Tensor>& gradients)>;
using StepperMaker = std::function<Stepper(std::vector<at::Tensor> parameters, const at::Tensor& options)>;

void register_stepper(const std::string& key, StepperMaker maker);

/// By functional form.
template <class Options>
StepperMaker functional_stepper(const std::string& key) {
  return [key](std::vector<at::Tensor> parameters, const at::Tensor& bytes) -> Stepper {
    const std::shared_ptr<optim::FunctionalOptimizer> optimizer =
        optim::functional_form_of(key, std::move(parameters), unpacked<Options>(bytes));
    return [optimizer](const std::vector<at::Tensor>& gradients) { optimizer->step(gradients); };
  };
}

/// Lets `step` see the gradients as .grad; what was there before is there after it.
void with_gradients(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& gradients,
                    const std::function<void()>& step);

/// What an owner has of a DistributedOptimizer.
class OwnedOptimizer {
 public:
  OwnedOptimizer(const std::string& key, const at::Tensor& options, const Parameters& parameters);
  /// One at a time on a worker.
  void step(std::int64_t context_id);

 private:
  std::vector<at::Tensor> parameters_;
  Stepper stepper_;
};

/// One part per owner. Throws listing every worker that failed.
std::vector<RRef<OwnedOptimizer>> make_parts(const std::string& key, const at::Tensor& options,
                                             const Parameters& parameters);
void step_all(const std::vector<RRef<OwnedOptimizer>>& parts, std::int64_t context_id);

}  // namespace detail

/// For an optimizer without a functional form: a class of yours, or torch::optim::LBFGS's kin. On every worker, before
/// it is used.
template <class Optimizer, class Options>
void register_optimizer() {
  detail::register_stepper(optim::functional_key<Optimizer>(),
                           [](std::vector<at::Tensor> parameters, const at::Tensor& bytes) -> detail::Stepper {
                             auto optimizer = std::make_shared<Optimizer>(parameters, detail::unpacked<Options>(bytes));
                             return [optimizer, parameters](const std::vector<at::Tensor>& gradients) {
                               detail::with_gradients(parameters, gradients, [&] { optimizer->step(); });
                             };
                           });
}

template <class Optimizer, class Options = typename detail::OptionsOf<Optimizer>::Type>
class DistributedOptimizer {
 public:
  /// Makes a part on each owner of a parameter, and waits for all. References may be to this worker's tensors too.
  explicit DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters)
    requires std::default_initializable<Options>
      : DistributedOptimizer(parameters, Options()) {}
  DistributedOptimizer(const std::vector<RRef<at::Tensor>>& parameters, const Options& options)
      : parts_(detail::make_parts(optim::functional_key<Optimizer>(), detail::packed(options), parameters)) {}

  /// Applies the context's gradients, on all owners; waits for all, then throws if any failed, listing them. Parameters
  /// without a gradient in it stay as they are. `.grad` is neither used nor changed.
  void step(std::int64_t context_id) { detail::step_all(parts_, context_id); }

 private:
  std::vector<RRef<detail::OwnedOptimizer>> parts_;
};

}  // namespace lockstep::rpc
