// The kit's models for sharded training: what they are made of, and that they train.
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "lockstep/testing/fsdp/delay_models.h"
#include "lockstep/testing/fsdp/parity.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/fsdp/states.h"
#include "lockstep/testing/fsdp/transformer.h"

namespace lockstep::fsdp_models_test {

using namespace testing;
using namespace std::chrono_literals;

using Names = std::vector<std::string>;

TestModelOptions recursive() {
  return {.fsdp_init_mode = FsdpInitMode::kRecursive, .deterministic = true};
}

FullyShardOptions on(const World& world) {
  return with_mesh({}, world.group());
}

/// Names of the units below the module, sorted; the root's is "".
Names unit_names(const torch::nn::Module& model) {
  Names names;
  for (const auto& item : model.named_modules("", /*include_self=*/true)) {
    if (unit_of(*item.value())) names.push_back(item.key());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::map<std::string, std::vector<int64_t>> sizes_of(const torch::nn::Module& model) {
  std::map<std::string, std::vector<int64_t>> sizes;
  for (const auto& item : model.named_parameters()) sizes[item.key()] = item.value().sizes().vec();
  return sizes;
}

void on_one_to_four_ranks(const RankBody& body) {
  for (const int size : {1, 2, 3, 4}) run_threads_in_gtest({.world_size = size}, body);
}

// TEST-27, TEST-28
LOCKSTEP_THREAD_TEST(FsdpModels, RefuseUnknownModes, 2) {
  const auto unknown = static_cast<FsdpInitMode>(7);
  expect_error([&] { NestedWrappedModule::init(world.group(), {.fsdp_init_mode = unknown}); },
               {"unknown FsdpInitMode 7"});
  expect_error([&] { TransformerWithSharedParams::init(world.group(), {.fsdp_init_mode = unknown}); },
               {"unknown FsdpInitMode 7"});
  expect_error([&] { NestedWrappedModule::init(world.group(), {.device_init_mode = static_cast<DeviceInitMode>(5)}); },
               {"unknown DeviceInitMode 5"});
  expect_error([&] { test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp_init_mode = FsdpInitMode::kNoFsdp}); },
               {"kNoFsdp would compare a model with itself"});
  for (const auto mode : {DeviceInitMode::kBefore, DeviceInitMode::kAfter, DeviceInitMode::kNever}) {
    auto options = recursive();
    options.device_init_mode = mode;
    const auto model = NestedWrappedModule::init(world.group(), options);
    EXPECT_EQ(model->parameters()[0].device(), mode == DeviceInitMode::kNever ? at::kCPU : compute_device());
  }
}

template <class Model>
void expect_seeds_hold(const World& world) {
  const auto one = Model::init(world.group(), TestModelOptions{.deterministic = true});
  const auto two = Model::init(world.group(), TestModelOptions{.deterministic = true});
  const auto expected = one->named_parameters();
  for (const auto& item : two->named_parameters()) EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
  const auto other = Model::init(world.group(), TestModelOptions{});
  EXPECT_FALSE(other->parameters()[0].equal(one->parameters()[0]));
  // Not deterministic, but alike on all ranks.
  assert_module_states(*other, world.group(), [](const std::string& name, const auto& first, const auto& each) {
    if (!std::is_same_v<Model, MixtureOfExperts>) check_equal(name, each, first);
  });
  const auto inputs = one->get_input(compute_device());
  EXPECT_TRUE(inputs[0].equal(one->get_input(compute_device())[0]));
}

// TEST-29, TEST-23
LOCKSTEP_THREAD_TEST(FsdpModels, AreTheSameInEveryBuildAndOnEveryRank, 2) {
  expect_seeds_hold<TransformerWithSharedParams>(world);
  expect_seeds_hold<NestedWrappedModule>(world);
  expect_seeds_hold<NonUniformReqGradNWM>(world);
  expect_seeds_hold<MixtureOfExperts>(world);
  const auto model = NestedWrappedModule::init(world.group(), {.deterministic = true});
  const auto seed = static_cast<uint64_t>(1 + world.rank());
  EXPECT_TRUE(model->get_input(compute_device())[0].equal(at::rand({4, 8}, at::detail::createCPUGenerator(seed))));
  torch::nn::Linear first{nullptr};
  build_deterministically([&] { first = torch::nn::Linear(8, 4); });
  EXPECT_TRUE(model->parameters()[0].equal(first->weight));
}

// FSDP-91, TEST-30
LOCKSTEP_THREAD_TEST(FsdpModels, TransformerHasTiesBuffersAndUnits, 4) {
  const auto whole = TransformerWithSharedParams::init(world.group(), {.deterministic = true});
  EXPECT_EQ(whole->embed_tokens->weight.sizes(), at::IntArrayRef({23, 16}));
  EXPECT_TRUE(whole->output_proj->weight.is_same(whole->embed_tokens->weight));
  EXPECT_TRUE(whole->named_parameters()["output_proj.weight"].is_same(whole->embed_tokens->weight));
  EXPECT_EQ(sizes_of(*whole)["transformer.encoder.layers.1.linear1.weight"], (std::vector<int64_t>{8, 16}));
  EXPECT_EQ(sizes_of(*whole)["bn.weight"], std::vector<int64_t>{2});
  EXPECT_EQ(whole->long_buffer.scalar_type(), at::kLong);
  EXPECT_EQ(whole->vocab_bias.scalar_type(), at::kFloat);
  EXPECT_FALSE(whole->is_training());
  EXPECT_TRUE(TransformerWithSharedParams::init(world.group(), {})->is_training());
  const auto inputs = whole->get_input(compute_device());
  EXPECT_EQ(inputs[0][5][1].item<int64_t>(), 11);
  EXPECT_EQ(inputs[1].sizes(), at::IntArrayRef({4, 2}));

  const auto sharded = TransformerWithSharedParams::init(world.group(), recursive());
  EXPECT_EQ(unit_names(*sharded), (Names{"", "transformer.decoder.layers.0", "transformer.decoder.layers.1",
                                         "transformer.encoder.layers.0", "transformer.encoder.layers.1"}));
  const auto shards = sharded->named_parameters();
  EXPECT_TRUE(shards["output_proj.weight"].is_same(shards["embed_tokens.weight"]));
  EXPECT_TRUE(
      sharded->get_loss(inputs, sharded->forward(inputs)).equal(whole->get_loss(inputs, whole->forward(inputs))));

  const auto bare = TransformerWithSharedParams::init(
      world.group(), recursive(),
      {.auto_wrap_policy = module_wrap_policy<torch::nn::TransformerEncoderLayerImpl>(), .add_bn = false});
  EXPECT_EQ(unit_names(*bare).size(), 3U);
  EXPECT_FALSE(bare->bn);

  // A pair of groups is a mesh, the shard group inside.
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
  const auto hybrid =
      TransformerWithSharedParams::init({mesh.get_group("shard"), mesh.get_group("replicate")}, recursive());
  EXPECT_EQ(unit_of(*hybrid)->options().mesh->ranks(), mesh.ranks());
  EXPECT_EQ(unit_of(*hybrid)->options().mesh->shape(), mesh.shape());
  EXPECT_TRUE(hybrid->get_loss(inputs, hybrid->forward(inputs)).equal(whole->get_loss(inputs, whole->forward(inputs))));

  // With one group the library makes the mesh: ranks of one host are one replica.
  for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
    auto options = recursive();
    options.fsdp.sharding_strategy = strategy;
    const auto by_hosts = TransformerWithSharedParams::init(world.group(), options);
    EXPECT_EQ(unit_of(*by_hosts)->options().mesh->shape(), (std::vector<int64_t>{1, 4}));
    EXPECT_TRUE(
        by_hosts->get_loss(inputs, by_hosts->forward(inputs)).equal(whole->get_loss(inputs, whole->forward(inputs))));
    expect_error([&] { NestedWrappedModule::init(world.group(), options); }, {"needs a mesh of two named axes"});
  }

  const auto plain = TransformerWithSharedParams::init(world.group(), {.deterministic = true});
  auto ignoring = on(world);
  ignoring.ignored_modules = plain->get_ignored_modules();
  const auto names = fully_shard(*plain, ignoring).parameter_names();
  EXPECT_EQ(names, (Names{"embed_tokens.weight", "output_proj.bias", "bn.weight", "bn.bias"}));
}

// TEST-31
LOCKSTEP_THREAD_TEST(FsdpModels, TransformerDrivesItsLayersAsLibtorchDoes, 1) {
  const auto model = TransformerWithSharedParams::init(world.group(), {.deterministic = true});
  const auto inputs = model->get_input(compute_device());
  const auto source = model->embed_tokens->forward(inputs[0]) + model->vocab_bias;
  const auto target = model->bn->forward(model->embed_tokens->forward(inputs[1]));
  const auto expected = model->output_proj->forward(model->transformer->forward(source, target));
  EXPECT_TRUE(model->forward(inputs).equal(expected));
}

// FSDP-92, FSDP-93, TEST-32, TEST-33
LOCKSTEP_THREAD_TEST(FsdpModels, NestedOnesDifferInTheirUnits, 2) {
  const auto nested = NestedWrappedModule::init(world.group(), recursive());
  EXPECT_EQ(unit_names(*nested), (Names{"module.1", "module.1.0", "module.2"}));
  const auto always = AlwaysWrapNestedWrappedModule::init(world.group(), recursive());
  EXPECT_EQ(unit_names(*always),
            (Names{"", "module", "module.0", "module.1", "module.1.0", "module.1.1", "module.2", "module.3"}));
  EXPECT_TRUE(unit_names(*AlwaysWrapNestedWrappedModule::init(world.group(), {})).empty());
  const auto whole = NestedWrappedModule::init(world.group(), {.deterministic = true});
  EXPECT_EQ(sizes_of(*whole), (std::map<std::string, std::vector<int64_t>>{{"module.0.bias", {4}},
                                                                           {"module.0.weight", {4, 8}},
                                                                           {"module.1.0.bias", {16}},
                                                                           {"module.1.0.weight", {16, 4}},
                                                                           {"module.1.1.bias", {16}},
                                                                           {"module.1.1.weight", {16, 16}},
                                                                           {"module.2.bias", {4}},
                                                                           {"module.2.weight", {4, 16}},
                                                                           {"module.3.bias", {8}},
                                                                           {"module.3.weight", {8, 4}}}));
  EXPECT_EQ(always->named_parameters().keys(), whole->named_parameters().keys());
  const auto output = whole->forward(whole->get_input(compute_device()));
  EXPECT_TRUE(whole->get_loss({}, output).equal(output.sum()));

  const auto partly = NonUniformReqGradNWM::init(world.group(), recursive());
  EXPECT_EQ(unit_names(*partly), (Names{"module.1", "module.1.0", "module.2"}));
  for (const auto& model : {partly, NonUniformReqGradNWM::init(world.group(), {.deterministic = true})}) {
    Names trained;
    for (const auto& item : model->named_parameters()) {
      if (item.value().requires_grad()) trained.push_back(item.key());
    }
    EXPECT_EQ(trained, (Names{"module.2.1.weight", "module.2.1.bias"}));
  }
}

// FSDP-94, TEST-34, TEST-60
LOCKSTEP_THREAD_TEST(FsdpModels, DelaysChangeNothingButTime, 2) {
  const auto quick = NestedWrappedModuleWithDelay::init(world.group(), recursive());
  fully_shard(*quick, on(world));
  const auto expected = train_for_several_steps(*quick, 2);
  const auto late = ModuleWithDelay::init<NestedWrappedModule>(world.group(), recursive(),
                                                               {.after_loss = 10ms, .before_reduction = 5ms});
  fully_shard(*late, on(world));
  const auto start = std::chrono::steady_clock::now();
  const auto loss = train_for_several_steps(*late, 2);
  // Two losses, and a reduction for each of four units in two steps.
  EXPECT_GE(std::chrono::steady_clock::now() - start, 2 * (10ms + 4 * 5ms));
  EXPECT_TRUE(loss.equal(expected));
  const auto params = get_full_params(*quick);
  for (const auto& [name, tensor] : get_full_params(*late)) EXPECT_TRUE(tensor.equal(params.at(name))) << name;
  test_fsdp_parity<NestedWrappedModuleWithDelay>(world.group(), {}, ModelDelays{.before_reduction = 2ms});
}

// FSDP-95, TEST-35
TEST(FsdpModels, ExpertsAreNeverAveraged) {
  on_one_to_four_ranks([](const World& world) {
    const auto with_dummy = [](const std::shared_ptr<FsdpTestModel>& model) -> ModelForward {
      const auto dummy = std::make_shared<DummyDDP<std::shared_ptr<FsdpTestModel>>>(model);
      EXPECT_EQ(dummy->module(), model);
      return [dummy](const std::vector<at::Tensor>& input) { return dummy->forward(input); };
    };
    test_fsdp_parity<MixtureOfExperts>(world.group(), {.ref_init_fn = with_dummy});
    test_fsdp_parity<MixtureOfExperts>(world.group(), {.ref_init_fn = with_dummy}, 2ms);

    const auto model = MixtureOfExperts::init(world.group(), recursive());
    EXPECT_EQ(unit_names(*model), (Names{"module.1", "module.2"}));
    EXPECT_EQ(unit_of(model->module->at(2))->options().mesh->size(), 1);
    EXPECT_EQ(unit_of(model->module->at(1))->options().mesh->size(), world.world_size());
    EXPECT_EQ(model->named_parameters()["module.2.weight"].sizes(), at::IntArrayRef({12, 23}));
    torch::nn::Linear expert{nullptr};
    build_deterministically([&] { expert = torch::nn::Linear(23, 12); }, 42 + static_cast<uint64_t>(world.rank()));
    EXPECT_TRUE(model->named_parameters()["module.2.weight"].equal(expert->weight));
  });
}

/// One step of SGD sharded and with DDP: same shards, same gradients. `shard` makes units of all the module.
template <class Make, class Shard>
void expect_step_as_ddp(const World& world, int64_t width, const Make& make, const Shard& shard,
                        bool has_unused = false) {
  const auto input = at::randn({3, width}, input_generator(world));
  const auto train = [&](auto& forward, const std::vector<at::Tensor>& parameters) {
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
    at::Tensor loss = at::zeros({});
    for (const auto& output : forward(input)) loss = loss + output.pow(2).sum();
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
  const auto list_of = [](const auto& output) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(output)>, at::Tensor>)
      return std::vector{output};
    else
      return output;
  };
  auto whole = build_deterministically_as(make);
  DistributedDataParallel ddp(whole, DdpOptions{.process_group = world.group(), .find_unused_parameters = has_unused});
  auto model = build_deterministically_as(make);
  shard(model);
  const auto with_ddp = [&](const at::Tensor& x) { return list_of(ddp(x)); };
  const auto with_units = [&](const at::Tensor& x) { return list_of(model->forward(x)); };
  const auto expected = train(with_ddp, ddp.parameters());
  EXPECT_TRUE(train(with_units, model->parameters()).equal(expected));
  check_sharded_parity(*whole, *model);
  check_units_are_idle(*model);
}

// FSDP-96, TEST-36, TEST-51
TEST(FsdpModels, SmallOnesTrainOnOneToFourRanks) {
  on_one_to_four_ranks([](const World& world) {
    const auto options = on(world);
    const auto as_one = [&](auto model) { fully_shard(model, options); };
    for (const bool bias : {false, true}) {
      expect_step_as_ddp(world, 5, [&] { return MLP(5, MLPOptions{.bias = bias, .with_buffer = true}); }, as_one);
    }
    for (const bool has_norm : {false, true}) {
      expect_step_as_ddp(
          world, 5, [&] { return MLPStack(5, has_norm); },
          [&](MLPStack model) { model->parallelize(std::nullopt, *options.mesh, false); });
    }
    for (const bool uses_second : {false, true}) {
      const auto layers_too = [&](DoubleLinear model) {
        fully_shard(model->lin1, options);
        fully_shard(model->lin2, options);
        fully_shard(model, options);
      };
      expect_step_as_ddp(world, 6, [&] { return DoubleLinear(6, uses_second); }, as_one, !uses_second);
      expect_step_as_ddp(world, 6, [&] { return DoubleLinear(6, uses_second); }, layers_too, !uses_second);
    }
    expect_step_as_ddp(world, 10, [] { return SkipModule(); }, as_one);
    expect_step_as_ddp(world, 10, [] { return NestedLinear(); }, as_one);
    for (const bool nests_twice : {false, true}) {
      expect_step_as_ddp(
          world, 10, [] { return SkipModel(); },
          [&](SkipModel model) {
            model->wrap(nests_twice, options);
            fully_shard(model, options);
            EXPECT_EQ(unit_names(*model), nests_twice ? (Names{"", "nested_linear", "nested_linear.nested_linear"})
                                                      : (Names{"", "nested_linear"}));
          });
    }
  });
}

// FSDP-96
LOCKSTEP_THREAD_TEST(FsdpModels, SmallOnesAreMadeOfThis, 2) {
  MLP mlp(4, MLPOptions{.with_buffer = true});
  EXPECT_EQ(mlp->in_proj->weight.sizes(), at::IntArrayRef({16, 4}));
  const auto before = mlp->buffer.clone();
  mlp->reset_parameters();
  EXPECT_FALSE(mlp->buffer.equal(before));
  EXPECT_TRUE(MLP(4)->named_buffers().is_empty());
  MLPStack stack(4, true);
  EXPECT_EQ(stack->mlps[0]->in_proj->weight.size(0), 12);
  EXPECT_EQ(stack->mlps[1]->in_proj->weight.size(0), 16);
  EXPECT_TRUE(stack->named_parameters().contains("3.weight"));
  EXPECT_FALSE(stack->named_parameters().contains("3.bias"));
  const auto mesh = *on(world).mesh;
  EXPECT_EQ(stack->parallelize(std::nullopt, mesh, false).parameter_names(), Names{"3.weight"});
  EXPECT_EQ(DoubleLinear(3)->forward(at::ones({1, 3})).size(), 2U);
  EXPECT_EQ(DoubleLinear(3, false)->forward(at::ones({1, 3})).size(), 1U);
}

}  // namespace lockstep::fsdp_models_test
