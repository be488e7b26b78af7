// convert_sync_batchnorm(): what is replaced, what is carried over, what is refused.
#include "lockstep/ddp/convert_sync_batchnorm.h"

#include <torch/library.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/checkpointing/checkpointed.h"
#include "lockstep/ddp/sync_batch_norm.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;

torch::nn::Sequential made_net() {
  return torch::nn::Sequential(torch::nn::Conv2d(2, 4, 3), torch::nn::BatchNorm2d(4), torch::nn::ReLU(),
                               torch::nn::Conv2d(4, 3, 1),
                               torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(3).momentum(std::nullopt)));
}

at::Tensor made_images() {
  return at::randn({6, 2, 5, 5}, at::detail::createCPUGenerator(3), at::TensorOptions(at::kDouble));
}

/// A sum, so that gradients of ranks add up; small enough for steps that do not blow rounding up.
at::Tensor summed_loss(const at::Tensor& output) {
  return output.pow(2).sum() / 100;
}

class ConvertSyncBatchnorm : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ConvertSyncBatchnorm, ::testing::Values(1, 2, 3));

// DDP-99: a converted net on many ranks trains as the plain one does on one, by an optimizer made before
TEST_P(ConvertSyncBatchnorm, TrainsAsOneProcessWithTheWholeBatch) {
  constexpr int kSteps = 3;
  const auto images = made_images();
  auto reference = seeded(made_net());
  reference->to(at::kDouble);
  torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    reference_optimizer.zero_grad();
    summed_loss(reference->forward(images + step)).backward();
    reference_optimizer.step();
  }
  testing::run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    auto net = seeded(made_net());
    net->to(at::kDouble);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    convert_sync_batchnorm(*net);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      summed_loss(net->forward(my_rows(images, world) + step)).backward();
      for (auto& param : net->parameters()) all_reduce(param.mutable_grad(), world.group());
      optimizer.step();
    }
    expect_close(net->parameters(), reference->parameters(), 1e-10);
    expect_close(net->buffers(), reference->buffers(), 1e-10);
  });
}

// DDP-99: a layer without weights trains over the whole batch, and one without statistics is the plain layer in
// evaluation
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, WithoutWeightsOrStatisticsDoAsPythonsDo, 2) {
  const auto whole = at::arange(24, at::kDouble).sin().view({6, 4});
  const auto mine = whole.narrow(0, 3 * world.rank(), 3).clone().requires_grad_();
  auto plain = torch::nn::Sequential(torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
  auto net = torch::nn::Sequential(torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)));
  plain->to(at::kDouble);
  net->to(at::kDouble);
  convert_sync_batchnorm(*net, world.group());
  const auto input = whole.clone().requires_grad_();
  plain->forward(input).pow(3).sum().backward();
  net->forward(mine).pow(3).sum().backward();
  EXPECT_TRUE(at::allclose(mine.grad(), input.grad().narrow(0, 3 * world.rank(), 3)));

  auto without =
      torch::nn::Sequential(torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).track_running_stats(false)));
  without->to(at::kDouble);
  convert_sync_batchnorm(*without, world.group());
  without->eval();
  // On one rank alone: nothing is communicated.
  if (world.rank() == 0) {
    const auto expected = at::batch_norm(mine, {}, {}, {}, {}, true, 0.1, 1e-5, false);
    EXPECT_TRUE(at::allclose(without->forward(mine), expected));
  }
}

// DDP-99: options, tensors, mode and names are those of the layer that was there
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, KeepTensorsOptionsAndMode, 2) {
  auto net = torch::nn::Sequential(
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).eps(0.5).momentum(std::nullopt)),
      torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(4).affine(false)),
      torch::nn::BatchNorm3d(torch::nn::BatchNormOptions(4).track_running_stats(false).momentum(0.3)));
  net->to(at::kDouble);
  net[0]->as<torch::nn::BatchNorm1d>()->weight.requires_grad_(false);
  net[1]->eval();
  const auto params = net->named_parameters();
  const auto buffers = net->named_buffers();
  const auto subgroup = new_subgroups(world.group(), {{0}, {1}});
  convert_sync_batchnorm(*net, subgroup);

  std::vector<SyncBatchNormImpl*> layers;
  for (std::size_t i = 0; i < net->size(); ++i) {
    layers.push_back(&net->at<SyncBatchNormImpl>(i));
    EXPECT_EQ(net->children()[i].get(), layers.back());
    EXPECT_EQ(layers.back()->process_group, subgroup);
  }
  EXPECT_EQ(layers[0]->options.eps(), 0.5);
  EXPECT_FALSE(layers[0]->options.momentum().has_value());
  EXPECT_FALSE(layers[0]->weight.requires_grad());
  EXPECT_TRUE(layers[0]->bias.requires_grad());
  EXPECT_FALSE(layers[1]->options.affine());
  EXPECT_FALSE(layers[1]->is_training());
  EXPECT_TRUE(layers[0]->is_training());
  EXPECT_FALSE(layers[2]->running_mean.defined());
  EXPECT_EQ(layers[2]->options.momentum(), 0.3);
  EXPECT_EQ(layers[0]->weight.scalar_type(), at::kDouble);
  ASSERT_EQ(net->named_parameters().keys(), params.keys());
  ASSERT_EQ(net->named_buffers().keys(), buffers.keys());
  for (const auto& param : params) EXPECT_TRUE(net->named_parameters()[param.key()].is_same(param.value()));
  for (const auto& buffer : buffers) EXPECT_TRUE(net->named_buffers()[buffer.key()].is_same(buffer.value()));

  // Converted ones are left, but for their group; a copy of the net has converted ones too.
  convert_sync_batchnorm(*net, world.group());
  EXPECT_EQ(&net->at<SyncBatchNormImpl>(0), layers[0]);
  EXPECT_EQ(layers[0]->process_group, world.group());
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  EXPECT_EQ(copy->at<SyncBatchNormImpl>(0).process_group, world.group());
}

/// Containers in containers, in a class.
struct NestedImpl : torch::nn::Module {
  NestedImpl() {
    const auto shared = torch::nn::BatchNorm1d(3);
    list->push_back(torch::nn::Sequential(torch::nn::Linear(3, 3), shared));
    list->push_back(shared);
    dict->update({{"norm", torch::nn::BatchNorm1d(3).ptr()}});
    register_module("list", list);
    register_module("dict", dict);
    register_module("norm", norm);
  }
  torch::nn::ModuleList list;
  torch::nn::ModuleDict dict;
  SyncBatchNorm norm{3};
};
TORCH_MODULE(Nested);

// DDP-99: every container is gone through; a layer in two places stays one
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, AreFoundInEveryContainer, 2) {
  Nested net;
  const Warnings warnings;
  convert_sync_batchnorm(*net, world.group());
  int synced = 0;
  for (const auto& module : net->modules(/*include_self=*/false)) {
    EXPECT_EQ(module->as<torch::nn::BatchNorm1d>(), nullptr);
    if (const auto* layer = module->as<SyncBatchNorm>()) {
      ++synced;
      EXPECT_EQ(layer->process_group, world.group());
    }
  }
  EXPECT_EQ(synced, 4);
  const auto in_sequential = net->list[0]->as<torch::nn::Sequential>()->ptr(1);
  EXPECT_EQ(in_sequential, net->list->ptr(1));
  EXPECT_NE(net->dict["norm"]->as<SyncBatchNorm>(), nullptr);
  EXPECT_EQ(warnings.count("somebody else"), 0);
}

/// A layer that is a member of a class, beside one that could be replaced.
struct MemberImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return norm->forward(layers->forward(input)); }
  torch::nn::Sequential layers =
      register_module("layers", torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3)));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(3));
};
TORCH_MODULE(Member);

// DDP-99: what cannot be converted is named with the remedy, and then nothing is
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, MembersOfClassesAreRefusedByName, 2) {
  torch::nn::Sequential net{Member(), Member()};
  expect_error([&] { convert_sync_batchnorm(*net, world.group()); },
               {"'0.norm', '1.norm'", "members", "lockstep::SyncBatchNorm"});
  EXPECT_NE(net->at<MemberImpl>(0).layers->ptr(1)->as<torch::nn::BatchNorm1d>(), nullptr) << "some were converted";

  torch::nn::Sequential checkpointed(Checkpointed<torch::nn::BatchNorm1d>(3));
  expect_error([&] { convert_sync_batchnorm(*checkpointed, world.group()); }, {"'0'", "Checkpointed", "derived"});
}

// DDP-99: a layer that a container and somebody else hold
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, OtherHoldersAreWarnedOf, 2) {
  const torch::nn::BatchNorm1d norm(3);
  torch::nn::Sequential net(torch::nn::Linear(3, 3), norm);
  const Warnings warnings;
  convert_sync_batchnorm(*net, world.group());
  EXPECT_EQ(warnings.count("somebody else holds '1'"), 1);
}

// DDP-99: a module that is a BatchNorm itself
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, TheModuleItselfIsReturned, 2) {
  torch::nn::BatchNorm2d norm(3);
  const auto synced = convert_sync_batchnorm(norm.ptr(), world.group());
  ASSERT_NE(synced->as<SyncBatchNorm>(), nullptr);
  EXPECT_TRUE(synced->as<SyncBatchNorm>()->weight.is_same(norm->weight));
  expect_error([&] { convert_sync_batchnorm(*norm, world.group()); }, {"shared_ptr"});
  const auto net = made_net().ptr();
  EXPECT_EQ(convert_sync_batchnorm(net, world.group()), net);
}

// DDP-99: too few values are an error on all ranks, whatever each of them has
LOCKSTEP_THREAD_TEST(ConvertSyncBatchnormLayers, OneValueOnAllRanksTogetherIsRefused, 3) {
  SyncBatchNorm norm(2);
  expect_error([&] { norm->forward(at::ones({world.rank() == 1 ? 1 : 0, 2})); }, {"1 value per channel"});
  EXPECT_TRUE(norm->forward(at::ones({world.rank() == 1 ? 2 : 0, 2})).defined());
}

/// The one operator of a step that libtorch has no meta kernel of; over all dims but 1, without a correction.
std::tuple<at::Tensor, at::Tensor> var_mean_on_meta(const at::Tensor& input, at::OptionalIntArrayRef /*dims*/,
                                                    const std::optional<at::Scalar>& /*correction*/, bool /*keepdim*/) {
  return {at::empty({input.size(1)}, input.options()), at::empty({input.size(1)}, input.options())};
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("var_mean.correction", &var_mean_on_meta);
}

// DDP-99: off the CPU no step asks a tensor for a number, which would make the host wait: meta tensors have none to
// give
LOCKSTEP_THREAD_TEST(SyncBatchNormSteps, AskAnAcceleratorForNoNumber, 2) {
  const auto no_gather = testing::drop_calls(CallKind::kAllGatherSingle);
  const auto no_sum = testing::drop_calls(CallKind::kAllReduce);
  for (const auto momentum : {std::optional<double>(0.1), std::optional<double>()}) {
    const auto vector = [] { return at::empty({4}, at::kMeta); };
    SyncBatchNorm norm(torch::nn::BatchNormOptions(4).momentum(momentum), world.group(),
                       BatchNormTensors{vector().requires_grad_(), vector().requires_grad_(), vector(), vector(),
                                        at::empty({}, at::TensorOptions(at::kLong).device(at::kMeta))});
    const auto input = at::empty({3, 4, 5}, at::kMeta).requires_grad_();
    norm->forward(input).sum().backward();
    EXPECT_EQ(input.grad().sizes(), input.sizes());
    expect_error([&] { norm->running_mean.sum().item(); }, {"_local_scalar_dense"});
  }
}

}  // namespace
}  // namespace lockstep
