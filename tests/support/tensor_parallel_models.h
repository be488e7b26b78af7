// A small model that is tensor parallel by hand, and its training beside one process with the whole batch: what tests
// of FSDP over tensor parallelism share. Registered parameters are this rank's parts and carry layouts.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/fsdp/state_dict.h"
#include "lockstep/nn/functional_collectives.h"
#include "lockstep/shard/gather.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::tensor_parallel_models {

using fsdp_models::built_from_seed;
using testing::expect_error;

// Sizes that neither two nor three ranks divide evenly, and that leave the last of three with nothing of some parts.
constexpr int64_t kWidth = 6;
constexpr int64_t kHidden = 7;
constexpr int64_t kBatch = 12;

/// Either direction sums over the ranks, the other does nothing.
template <bool kSumsForward>
struct Conjugate : torch::autograd::Function<Conjugate<kSumsForward>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, const GroupPtr& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return kSumsForward ? functional::all_reduce(input, group) : input.view_as(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
    const auto& gradient = gradients[0];
    return {kSumsForward ? gradient : functional::all_reduce(gradient.contiguous(), group), at::Tensor()};
  }
};

/// Leaves this rank's part in the parameter's place, which stays the object that modules and registers hold.
inline void cut(const at::Tensor& parameter, const DeviceMesh& mesh, const Placements& placements) {
  const at::NoGradGuard no_grad;
  Layout layout(mesh, placements, parameter.sizes().vec());
  parameter.set_data(layout.cut(parameter.detach()).clone());
  set_layout(parameter, std::move(layout));
}

/// A norm, a layer cut by columns and one cut by rows, with a skip around them.
struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        up(register_module("up", torch::nn::Linear(kWidth, kHidden))),
        down(register_module("down", torch::nn::Linear(kHidden, kWidth))) {}

  at::Tensor forward(const at::Tensor& input) {
    auto hidden = norm->forward(input);
    if (group) hidden = Conjugate<false>::apply(hidden, group);
    auto sum = at::matmul(at::tanh(up->forward(hidden)), down->weight.t());
    if (group) sum = Conjugate<true>::apply(sum, group);
    return input + sum + down->bias;
  }

  GroupPtr group;
  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(ParallelBlock);

struct ParallelNetImpl : torch::nn::Module {
  ParallelNetImpl() : first(register_module("first", torch::nn::Linear(4, kWidth))) {
    for (int i = 0; i < 2; ++i) blocks.push_back(register_module("block" + std::to_string(i), ParallelBlock()));
    head = register_module("head", torch::nn::Linear(kWidth, 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    auto hidden = first->forward(input);
    for (auto& block : blocks) hidden = block->forward(hidden);
    return head->forward(hidden);
  }
  torch::nn::Linear first;
  std::vector<ParallelBlock> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ParallelNet);

inline ParallelNet whole_net(uint64_t seed = 5) {
  return built_from_seed([] { return ParallelNet(); }, seed);
}

/// On the axis "tp" of `mesh`, in which others, if it has some, replicate. The first layer stays plain if told so.
inline ParallelNet parallel_net(const DeviceMesh& mesh, bool has_plain = true, uint64_t seed = 5) {
  auto net = whole_net(seed);
  const auto& names = mesh.mesh_dim_names();
  const auto tp = static_cast<std::size_t>(std::find(names.begin(), names.end(), "tp") - names.begin());
  const auto on_tp = [&](const Placement& placement) {
    Placements placements(names.size(), Replicate());
    placements[tp] = placement;
    return placements;
  };
  for (auto& block : net->blocks) {
    block->group = mesh.get_group("tp");
    for (const auto& whole : {block->norm->weight, block->norm->bias, block->down->bias}) {
      cut(whole, mesh, on_tp(Replicate()));
    }
    cut(block->up->weight, mesh, on_tp(Shard(0)));
    cut(block->up->bias, mesh, on_tp(Shard(0)));
    cut(block->down->weight, mesh, on_tp(Shard(1)));
  }
  for (const auto& whole : net->head->parameters()) cut(whole, mesh, on_tp(Replicate()));
  if (has_plain) return net;
  for (const auto& whole : net->first->parameters()) cut(whole, mesh, on_tp(Replicate()));
  return net;
}

inline FsdpUnit shard_net(ParallelNet& net, const FullyShardOptions& options) {
  for (auto& block : net->blocks) fully_shard(block, options);
  return fully_shard(net, options);
}

inline DeviceMesh mesh_of(int64_t dp, int64_t tp) {
  return init_device_mesh("cpu", {dp, tp}, {.mesh_dim_names = {"dp", "tp"}});
}

/// The part of `index` of `count` ranks in the batch of a step.
inline at::Tensor part_of_batch(int step, int64_t index, int64_t count) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(7 + step));
  return at::randn({kBatch, 4}, generator, at::TensorOptions()).chunk(count)[static_cast<std::size_t>(index)];
}

inline at::Tensor loss_of(ParallelNet& net, const at::Tensor& batch) {
  return net->forward(batch).to(at::kFloat).pow(2).mean();
}

/// Losses by step.
inline std::vector<double> train_whole(ParallelNet& net, torch::optim::Optimizer& optimizer, int from, int to,
                                       double max_norm = 0) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(net, part_of_batch(step, 0, 1));
    loss.backward();
    if (max_norm > 0) clip_grad_norm_(net->parameters(), max_norm);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// The same over the ranks for data, which are `group`.
inline std::vector<double> train_parts(ParallelNet& net, torch::optim::Optimizer& optimizer, const GroupPtr& group,
                                       int from, int to, double max_norm = 0) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    const auto loss = loss_of(net, part_of_batch(step, group->getRank(), group->getSize()));
    loss.backward();
    if (max_norm > 0) clip_grad_norm_(net->parameters(), max_norm);
    optimizer.step();
    auto mean = loss.detach().to(at::kDouble) / group->getSize();
    all_reduce(mean, group);
    losses.push_back(mean.item<double>());
  }
  return losses;
}

/// Values, or gradients, of all parameters are those of the whole model.
inline void expect_same_net(const ParallelNet& net, const ParallelNet& whole, double tolerance, const std::string& what,
                            bool of_gradients = false) {
  const auto expected = whole->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const auto value = of_gradients ? item.value().grad() : item.value().detach();
    const auto wanted = of_gradients ? expected[item.key()].grad() : expected[item.key()].detach();
    ASSERT_TRUE(value.defined()) << what << " " << item.key();
    const auto layout = layout_of(item.value());
    const auto found = layout ? gather_whole(value, *layout) : value;
    ASSERT_EQ(found.sizes(), wanted.sizes()) << what << " " << item.key();
    EXPECT_TRUE(at::allclose(found, wanted, tolerance, tolerance))
        << what << (of_gradients ? " gradient of " : " ") << item.key() << ", off by "
        << (found - wanted).abs().max().item<float>();
  }
}

inline void expect_same_losses(const std::vector<double>& found, const std::vector<double>& wanted, double tolerance,
                               const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], wanted[i], tolerance) << what << ", step " << i;
}

/// An optimizer of either kind.
template <class Optimizer>
Optimizer optimizer_of(const ParallelNet& net);
template <>
inline torch::optim::Adam optimizer_of(const ParallelNet& net) {
  return torch::optim::Adam(net->parameters(), torch::optim::AdamOptions(0.01));
}
template <>
inline torch::optim::SGD optimizer_of(const ParallelNet& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// Three steps of a model on `mesh`, sharded as `options` say, and of one process with the whole batch.
template <class Optimizer>
void expect_trains_as_one(const DeviceMesh& mesh, ParallelNet net, const FullyShardOptions& options,
                          const std::string& what, double tolerance = 1e-5) {
  auto expected = whole_net();
  auto wanted = optimizer_of<Optimizer>(expected);
  const auto wanted_losses = train_whole(expected, wanted, 0, 3);
  const auto root = shard_net(net, options);
  auto optimizer = optimizer_of<Optimizer>(net);
  const auto& data = mesh.get_group("dp");
  expect_same_losses(train_parts(net, optimizer, data, 0, 3), wanted_losses, tolerance, what);
  expect_same_net(net, expected, tolerance, what, /*of_gradients=*/true);
  expect_same_net(net, expected, tolerance, what);
}

}  // namespace lockstep::tensor_parallel_models
