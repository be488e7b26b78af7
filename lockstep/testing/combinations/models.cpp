#include "lockstep/testing/combinations/models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/real.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <set>
#include <tuple>

#include "lockstep/base/str.h"
#include "lockstep/checkpointing/checkpoint.h"
#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/graph/compiled.h"

namespace lockstep::testing::combinations {

at::Tensor Net::probe(const at::Tensor& hidden) {
  if (fault == Fault::kInForward) {
    fault = Fault::kNone;
    throw InjectedFault("injected fault in forward");
  }
  if (fault == Fault::kInBackward && hidden.requires_grad()) {
    fault = Fault::kNone;
    hidden.register_hook([](const at::Tensor&) { throw InjectedFault("injected fault in backward"); });
  }
  return hidden;
}

std::string capture_guard(const Net& net) {
  return str(static_cast<int>(net.fault));
}

std::vector<at::Tensor> Net::unique_parameters() const {
  std::vector<at::Tensor> result;
  std::set<const void*> seen;
  for (const auto& parameter : parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) result.push_back(parameter);
  }
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> Net::last_layer() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& parameter : named_parameters()) {
    if (parameter.key().starts_with("last")) result.emplace_back(parameter.key(), parameter.value());
  }
  return result;
}

namespace {

using torch::nn::Linear;

constexpr int64_t kInputs = 4;
constexpr int64_t kHidden = 6;
constexpr int64_t kOutputs = 2;

/// "first" and "last", which kinds put something between.
struct TwoLayers : Net {
  explicit TwoLayers(int64_t last_inputs = kHidden, int64_t outputs = kOutputs)
      : first(register_module("first", Linear(kInputs, kHidden))),
        last(register_module("last", Linear(last_inputs, outputs))) {}
  at::Tensor begin(const at::Tensor& input) { return probe(at::tanh(first->forward(input))); }

  Linear first;
  Linear last;
};

struct PlainNet : TwoLayers {
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    return last->forward(at::tanh(middle->forward(begin(input))));
  }
  Linear middle = register_module("middle", Linear(kHidden, kHidden));
};

/// One parameter under two names, used twice.
struct TiedNet : TwoLayers {
  TiedNet() : TwoLayers(kInputs) { register_parameter("again", first->weight); }
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    return last->forward(at::tanh(at::matmul(begin(input), first->weight)));
  }
};

/// Two parameters over the same memory.
struct SharedStorageNet : TwoLayers {
  SharedStorageNet() : TwoLayers(kInputs) {
    mirror = register_parameter("mirror", first->weight.detach().requires_grad_());
  }
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    return last->forward(at::tanh(at::matmul(begin(input), mirror)));
  }
  at::Tensor mirror;
};

struct SparseNet : TwoLayers {
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    // By signs, which stay the same in low precision.
    const auto signs = (input.detach().narrow(1, 0, 3) > 0).to(at::kLong);
    const auto rows = signs.select(1, 0) * 4 + signs.select(1, 1) * 2 + signs.select(1, 2);
    return last->forward(at::tanh(begin(input) + table->forward(rows)));
  }
  static constexpr int64_t kRows = 8;
  torch::nn::Embedding table =
      register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(kRows, kHidden).sparse(true)));
};

/// Smooth: tanh of complex numbers has poles, and abs() a kink, where rounding becomes a difference.
at::Tensor length(const at::Tensor& values) {
  return at::sqrt(at::real(values * values.conj()) + 1);
}

struct ComplexNet : Net {
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    const auto hidden = at::matmul(input.to(first.scalar_type()), first.conj());
    return length(at::matmul(probe(hidden / length(hidden)), last));
  }
  at::Tensor first = register_parameter("first", at::randn({kInputs, kHidden}, at::kComplexFloat));
  at::Tensor last = register_parameter("last", at::randn({kHidden, kOutputs}, at::kComplexFloat));
};

struct BatchNormNet : TwoLayers {
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    return last->forward(at::tanh(norm->forward(begin(input))));
  }
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(kHidden));
};

/// Its first two layers run again in backward, the second one inside of the first one's checkpoint.
struct CheckpointedNet : TwoLayers {
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) {
    // Ranks may be threads, which share the default generator; there is nothing random in it.
    const CheckpointOptions options{.preserve_rng_state = false};
    const auto inner = [this](const at::Tensor& hidden) { return at::tanh(middle->forward(hidden)); };
    const auto outer = [this, options, inner](const at::Tensor& in) { return checkpoint(options, inner, begin(in)); };
    return last->forward(checkpoint(options, outer, input));
  }
  Linear middle = register_module("middle", Linear(kHidden, kHidden));
};

struct BranchyNet : TwoLayers {
  at::Tensor forward(const at::Tensor& input, int64_t choice) {
    return last->forward(at::tanh((choice == 0 ? left : right)->forward(begin(input))));
  }
  Linear left = register_module("left", Linear(kHidden, kHidden));
  Linear right = register_module("right", Linear(kHidden, kHidden));
};

struct TupleNet : TwoLayers {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, int64_t /*choice*/) {
    const auto hidden = begin(input);
    return {last->forward(hidden), hidden};
  }
};

struct NamedOutput {
  at::Tensor logits;
  at::Tensor hidden;
};
template <class Visit>
void for_each_tensor(NamedOutput& output, Visit&& visit) {
  visit_tensors(output.logits, visit);
  visit_tensors(output.hidden, visit);
}

struct StructNet : TwoLayers {
  NamedOutput forward(const at::Tensor& input, int64_t /*choice*/) {
    const auto hidden = begin(input);
    return {last->forward(hidden), hidden};
  }
};

/// An output whose tensors the wrapper cannot see.
struct OpaqueOutput {
  at::Tensor logits;
};

struct OpaqueNet : TwoLayers {
  OpaqueOutput forward(const at::Tensor& input, int64_t /*choice*/) { return {last->forward(begin(input))}; }
};

struct Discriminator : TwoLayers {
  Discriminator() : TwoLayers(kHidden, 1) {}
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) { return last->forward(begin(input)); }
};

struct Generator : TwoLayers {
  Generator() : TwoLayers(kHidden, kInputs) {}
  at::Tensor forward(const at::Tensor& input, int64_t /*choice*/) { return last->forward(begin(input)); }
};

at::Tensor one_tensor(const at::Tensor& output) {
  return output;
}
at::Tensor one_tensor(const std::tuple<at::Tensor, at::Tensor>& output) {
  return std::get<0>(output) + 0.5 * std::get<1>(output).narrow(1, 0, kOutputs);
}
at::Tensor one_tensor(const NamedOutput& output) {
  return output.logits + 0.5 * output.hidden.narrow(1, 0, kOutputs);
}
at::Tensor one_tensor(const OpaqueOutput& output) {
  return output.logits;
}

template <class N>
AnyNet any_net() {
  const auto net = std::make_shared<N>();
  const auto wrap = [net](const DdpOptions& options) {
    const auto ddp = std::make_shared<DistributedDataParallel<std::shared_ptr<N>>>(net, options);
    auto* inside = ddp.get();
    return AnyDdp{
        .wrapper = ddp,
        .base = inside,
        .group = options.process_group.value_or(nullptr),
        .forward = [inside](const at::Tensor& input, int64_t choice) { return one_tensor((*inside)(input, choice)); },
        .compile = [inside] { lockstep::compile(*inside, {.keeps_regions = true}); }};
  };
  const auto compile = [net = net.get()]() -> Forward {
    using Output = decltype(net->forward(at::Tensor(), 0));
    const auto compiler = std::make_shared<graph::Compiler>(CompileOptions(), net->name());
    return [net, compiler](const at::Tensor& input, int64_t choice) {
      return one_tensor(graph::detail::run_compiled<Output>(
          *compiler, *net, capture_guard(*net),
          [net](const at::Tensor& each, int64_t chosen) { return net->forward(each, chosen); }, input, choice));
    };
  };
  return {.net = net,
          .forward = [net = net.get()](const at::Tensor& input,
                                       int64_t choice) { return one_tensor(net->forward(input, choice)); },
          .wrap = wrap,
          .compile = compile};
}

template <class... Nets>
std::vector<AnyNet> nets_of() {
  return {any_net<Nets>()...};
}

}  // namespace

const std::vector<ModelKind>& model_kinds() {
  static const std::vector<ModelKind> kinds = {
      {"plain", "PlainNet", nets_of<PlainNet>},
      {"tied", "TiedNet", nets_of<TiedNet>},
      {"shared storage", "SharedStorageNet", nets_of<SharedStorageNet>},
      {.name = "sparse", .type = "SparseNet", .make = nets_of<SparseNet>, .is_sparse = true},
      {.name = "complex",
       .type = "ComplexNet",
       .make = nets_of<ComplexNet>,
       .dtype = at::kComplexFloat,
       .wide_dtype = at::kComplexDouble},
      {"batch norm", "BatchNormNet", nets_of<BatchNormNet>},
      {"checkpointed", "CheckpointedNet", nets_of<CheckpointedNet>},
      {"branches by step", "BranchyNet /* left or right by step */", nets_of<BranchyNet>,
       [](int step, int) { return step % 2; }},
      {"branches by rank", "BranchyNet /* left or right by rank */", nets_of<BranchyNet>,
       [](int, int rank) { return rank % 2; }},
      {"tuple output", "TupleNet", nets_of<TupleNet>},
      {"struct output", "StructNet", nets_of<StructNet>},
      {"opaque output", "OpaqueNet", nets_of<OpaqueNet>},
      {"two models", "Discriminator", nets_of<Discriminator, Generator>},
  };
  return kinds;
}

ParallelPlan plan_of(const Net& net) {
  const auto children = net.named_children();
  const ColwiseParallel whole_output({.output_layouts = Replicate()});
  if (children.contains("middle")) {
    return {{"first", ColwiseParallel()}, {"middle", RowwiseParallel()}, {"last", whole_output}};
  }
  ParallelPlan plan = {{"first", whole_output}, {"last", RowwiseParallel({.input_layouts = Replicate()})}};
  if (children.contains("left")) plan.insert(plan.end(), {{"left", whole_output}, {"right", whole_output}});
  return plan;
}

std::vector<AnyNet> make_nets(const ModelKind& kind, uint64_t seed) {
  auto nets = kind.make();
  auto generator = at::detail::createCPUGenerator(seed);
  const at::NoGradGuard no_grad;
  for (auto& each : nets) {
    for (auto& parameter : each.net->parameters()) parameter.normal_(0, 0.4, generator);
  }
  return nets;
}

}  // namespace lockstep::testing::combinations
