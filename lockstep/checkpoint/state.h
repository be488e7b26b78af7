// The state of a training run: what a checkpoint is made of, by name.
//
//   dcp::State state;
//   state.add("model", model)                     // a module as it is: plain, wrapped by DDP, FSDP, TP, or both
//       .add("optimizer", optimizer, *model)      // any optimizer, ZeRO's too; parameters are known by name
//       .add("schedule", schedule).add("scaler", scaler).add("sampler", sampler)
//       .add("random", dcp::random_state())       // generators, of every rank its own
//       .add("epoch", epoch);                     // numbers, text, tensors
//   dcp::save("run/step-100", state);
//
// Objects are borrowed. Anything else takes part as a Stateful, or by a function `stateful(object)` in its namespace
// that makes one.
#pragma once

#include <ATen/core/Generator.h>

#include <concepts>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/nn/module_cast.h"
#include "lockstep/nn/wrapped_module.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class LRScheduler;
class Optimizer;
}  // namespace torch::optim

namespace lockstep {
class DistributedSampler;
class GradScaler;
namespace optim {
class CurveLR;
}
}  // namespace lockstep

namespace lockstep::dcp {

using StatefulPtr = std::shared_ptr<Stateful>;

/// Parameters and buffers by their dotted names. Parameters may be divided in any way their layouts say, and on the
/// meta device: then loading gives them memory. Of buffers those of the first rank are saved.
StatefulPtr stateful(torch::nn::Module& module);
/// Options and state by the names that parameters have in `module`, which may be sharded.
StatefulPtr stateful(torch::optim::Optimizer& optimizer, const torch::nn::Module& module);
StatefulPtr stateful(GradScaler& scaler);
StatefulPtr stateful(optim::CurveLR& schedule);
/// How far a schedule of libtorch's has come; the rest is in the optimizer's options.
StatefulPtr stateful(torch::optim::LRScheduler& schedule);
StatefulPtr stateful(DistributedSampler& sampler);
StatefulPtr stateful(bool& value);
StatefulPtr stateful(int64_t& value);
StatefulPtr stateful(int& value);
StatefulPtr stateful(double& value);
/// Any bytes.
StatefulPtr stateful(std::string& bytes);
/// Of the first rank; loaded into the tensor, which has to fit.
StatefulPtr stateful(at::Tensor& tensor);
/// One that all ranks draw from alike. For the default ones see random_state().
StatefulPtr stateful(at::Generator& generator);
inline StatefulPtr stateful(Stateful& object) {
  return {std::shared_ptr<Stateful>(), &object};
}

/// The default generators of the CPU and of this rank's current GPU. Ranks that were not there when it was saved keep
/// theirs.
StatefulPtr random_state();

/// What differs between ranks, such as a data loader's place: each saves its own, and loads it if there were as many
/// ranks. With fewer or more of them, everybody keeps what they have, with a warning.
StatefulPtr per_rank(StatefulPtr object);

/// DistributedDataParallel and other wrappers have the names of what they wrap.
template <class M>
StatefulPtr stateful(WrappedModule<M>& wrapper) {
  return stateful(*lockstep::detail::as_module(wrapper.module()));
}
/// Holders and pointers.
template <class Holder>
  requires requires(Holder& holder) {
    { *holder } -> std::convertible_to<torch::nn::Module&>;
  }
StatefulPtr stateful(Holder& holder) {
  return stateful(*holder);
}
template <class Wrapper>
StatefulPtr stateful(torch::optim::Optimizer& optimizer, WrappedModule<Wrapper>& wrapper) {
  return stateful(optimizer, *lockstep::detail::as_module(wrapper.module()));
}
template <class Holder>
  requires requires(Holder& holder) {
    { *holder } -> std::convertible_to<const torch::nn::Module&>;
  }
StatefulPtr stateful(torch::optim::Optimizer& optimizer, Holder& holder) {
  return stateful(optimizer, *holder);
}

/// Of anything that stateful() takes: state.add("loader", dcp::per_rank(loader)).
template <class Object, class... With>
  requires(!std::convertible_to<Object&, StatefulPtr>)
StatefulPtr per_rank(Object& object, With&... with) {
  return per_rank(stateful(object, with...));
}

class State {
 public:
  /// Refuses a name that is there, and one with a dot at its end. With an empty name, which stands alone, names in the
  /// checkpoint are the object's own.
  State& add(const std::string& name, StatefulPtr object);
  template <class Object, class... With>
    requires(!std::convertible_to<Object&, StatefulPtr>)
  State& add(const std::string& name, Object& object, With&... with) {
    return add(name, stateful(object, with...));
  }

  const std::vector<std::pair<std::string, StatefulPtr>>& entries() const { return entries_; }

 private:
  std::vector<std::pair<std::string, StatefulPtr>> entries_;
};

}  // namespace lockstep::dcp
