// The kinds of models that training programs are composed of: small, and each with one trait that wrappers and
// optimizers have to cope with. A model's type is known here only; loops see AnyNet.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/ddp/ddp_base.h"
#include "lockstep/fsdp/fully_shard.h"
#include "lockstep/tp/parallelize_module.h"

namespace lockstep::testing::combinations {

/// Where a step throws, once.
enum class Fault { kNone, kInForward, kInLoss, kInBackward };

struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// All kinds have layers "first" and "last", which events freeze, add later and so on.
struct Net : torch::nn::Module {
  /// Throws the fault that was set, or lets backward throw it.
  at::Tensor probe(const at::Tensor& hidden);
  /// Parameters, each once. (Module::parameters() lists tied ones twice.)
  std::vector<at::Tensor> unique_parameters() const;
  std::vector<std::pair<std::string, at::Tensor>> last_layer() const;

  Fault fault = Fault::kNone;
};

/// What else than tensors its forward depends on.
std::string capture_guard(const Net& net);

/// The module's forward, its output made one tensor. `choice` is for kinds with branches.
using Forward = std::function<at::Tensor(const at::Tensor& input, int64_t choice)>;

/// What makes ranks train together: a DistributedDataParallel, units of fully_shard(), or layers that are divided.
struct AnyDdp {
  std::shared_ptr<torch::nn::Module> wrapper = nullptr;
  DdpBase* base = nullptr;                      // of a wrapper
  std::optional<FsdpUnit> root = std::nullopt;  // of units
  GroupPtr group = nullptr;                     // of ranks with different batches
  Forward forward = nullptr;
  std::function<void()> compile = nullptr;  // of a wrapper
};

struct AnyNet {
  std::shared_ptr<Net> net = nullptr;
  Forward forward = nullptr;
  std::function<AnyDdp(const DdpOptions& options)> wrap = nullptr;
  std::function<Forward()> compile = nullptr;  // the forward, through a compiler of its own
};

struct ModelKind {
  std::string name;
  /// In a program's text.
  std::string type;
  /// The nets that train together: one, or discriminator and generator.
  std::function<std::vector<AnyNet>()> make;
  /// Which branch a forward takes.
  std::function<int64_t(int step, int rank)> choice = [](int, int) { return 0; };
  at::ScalarType dtype = at::kFloat;
  at::ScalarType wide_dtype = at::kDouble;
  bool is_sparse = false;
};

const std::vector<ModelKind>& model_kinds();

/// How its layers are divided.
ParallelPlan plan_of(const Net& net);

/// The nets of a kind with weights drawn from the seed.
std::vector<AnyNet> make_nets(const ModelKind& kind, uint64_t seed);

}  // namespace lockstep::testing::combinations
