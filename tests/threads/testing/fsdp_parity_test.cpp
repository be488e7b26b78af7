// The kit's helpers and loops for sharded training, and that a broken library does not get past them.
#include "lockstep/nn/module_access.h"
#include "lockstep/testing/fsdp/delay_models.h"
#include "lockstep/testing/fsdp/parity.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "lockstep/testing/fsdp/states.h"
#include "lockstep/testing/fsdp/transformer.h"
#include "lockstep/testing/interpose.h"
#include "lockstep/testing/recorder.h"

namespace lockstep::fsdp_parity_test {

using namespace testing;
using ::testing::HasSubstr;

std::shared_ptr<NestedWrappedModule> sharded_model(const World& world, const FullyShardOptions& fsdp = {}) {
  auto model = NestedWrappedModule::init(
      world.group(), {.fsdp_init_mode = FsdpInitMode::kRecursive, .fsdp = fsdp, .deterministic = true});
  fully_shard(*model, with_mesh(fsdp, world.group()));
  return model;
}

void same(const std::string& name, const at::Tensor& first, const at::Tensor& other) {
  check_equal(name, other, first);
}

// TEST-37
LOCKSTEP_THREAD_TEST(FsdpStates, NameTheRankAndTheBufferThatDiffer, 4) {
  auto model = build_deterministically_as([] { return MLP(4, MLPOptions{.with_buffer = true}); });
  assert_module_states(*model, world.group(), same);
  if (world.rank() == 3) model->buffer.add_(1);
  expect_error([&] { assert_module_states(*model, world.group(), same); },
               {"'buffer' of rank 3", "largest difference"});
  if (world.rank() == 3) model->buffer.sub_(1);
  fully_shard(model, with_mesh({}, world.group()));
  expect_error([&] { assert_module_states(*model, world.group(), same); }, {"of rank 1"});
}

// TEST-38
LOCKSTEP_THREAD_TEST(FsdpStates, AreZeroedAndGathered, 2) {
  const auto whole = NestedWrappedModule::init(world.group(), {.deterministic = true});
  const auto expected = whole->named_parameters();
  for (const bool summons : {false, true}) {
    // Once with shards that are to be on the host: there they are anyway here. FsdpOnGpu has a device.
    const auto model =
        sharded_model(world, summons ? FullyShardOptions{.offload_policy = CPUOffloadPolicy{}} : FullyShardOptions{});
    auto params = get_full_params(*model);
    EXPECT_EQ(params.size(), expected.size());
    for (const auto& item : expected) check_parameter(item.key(), params.at(item.key()), item.value());
    params = get_full_params(*model, /*recurse=*/false);
    EXPECT_EQ(params.at("module.0.weight").sizes(), at::IntArrayRef({4, 8}));
    EXPECT_EQ(params.at("module.2.weight").sizes(), at::IntArrayRef({2, 16}));
    params.at("module.2.weight").fill_(7);  // a copy
    zero_model(*model, {.summon = summons});
    for (const auto& [name, tensor] : get_full_params(*model)) EXPECT_TRUE(tensor.eq(0).all().item<bool>()) << name;
    EXPECT_TRUE(model->forward(model->get_input(compute_device())).eq(0).all().item<bool>());
  }
  auto mlp = build_deterministically_as([] { return MLP(4, MLPOptions{.with_buffer = true}); });
  zero_model(*mlp);
  EXPECT_TRUE(mlp->in_proj->weight.eq(0).all().item<bool>());
  EXPECT_FALSE(mlp->buffer.eq(0).all().item<bool>());
  zero_model(*mlp, {.zero_buffers = true});
  EXPECT_TRUE(mlp->buffer.eq(0).all().item<bool>());
}

// TEST-39
LOCKSTEP_THREAD_TEST(FsdpStates, TravelFromRankZero, 3) {
  const auto model = sharded_model(world);
  const auto half = state_dict(*model, {.cpu_offload = true, .half = true});
  EXPECT_EQ(half.at("module.0.bias").scalar_type(), at::kHalf);
  EXPECT_EQ(half.at("module.0.bias").device(), at::kCPU);
  const auto state = state_dict(*model);
  EXPECT_EQ(state.at("module.0.bias").scalar_type(), at::kFloat);
  const ModuleState mine = world.rank() == 0 ? state : ModuleState{{"other", at::ones({1})}};
  const auto received = broadcast_state_dict(mine, world.group());
  ASSERT_EQ(received.size(), state.size());
  for (const auto& [name, tensor] : state) check_equal(name, received.at(name), tensor);
  zero_model(*model);
  load_full_state_dict(*model, received);
  check_sharded_parity(*NestedWrappedModule::init(world.group(), {.deterministic = true}), *model);
}

// TEST-40
LOCKSTEP_THREAD_TEST(FsdpStates, OptionsAreReadBackFromEveryUnit, 2) {
  const auto model = sharded_model(world, {.reshard_after_forward = false});
  EXPECT_EQ(units_of(*model).size(), 4U);
  EXPECT_TRUE(units_of(*model).back().is_root());
  const auto keeps = [](const FullyShardOptions& options) { return options.reshard_after_forward == false; };
  check_units(*model, "no resharding", keeps);
  auto mixed = NestedWrappedModule::init(world.group(), {.fsdp_init_mode = FsdpInitMode::kRecursive});
  fully_shard(*mixed, with_mesh({.reshard_after_forward = false}, world.group()));
  expect_error([&] { check_units(*mixed, "no resharding", keeps); },
               {"no resharding does not hold for unit 'module.2', unit 'module.1.0', unit 'module.1'"});
  const auto prefetching = sharded_model(world, {.offload_policy = CPUOffloadPolicy{},
                                                 .forward_prefetch = false,
                                                 .backward_prefetch = BackwardPrefetch::kBackwardPost});
  check_units(*prefetching, "offload", [](const auto& options) { return options.offload_policy.has_value(); });
  check_units(*prefetching, "no forward prefetch", [](const auto& options) { return !options.forward_prefetch; });
  check_units(*prefetching, "backward prefetch",
              [](const auto& options) { return options.backward_prefetch == BackwardPrefetch::kBackwardPost; });
  const auto whole = NestedWrappedModule::init(world.group(), {});
  expect_error([&] { check_units(*whole, "no resharding", keeps); }, {"is a unit"});
  wrap_if(false, *whole, {});
  EXPECT_FALSE(unit_of(*whole));
  wrap_if(true, *whole, with_mesh({}, world.group()));
  EXPECT_TRUE(unit_of(*whole));
  move_if(true, *whole);
}

// TEST-41, TEST-42, TEST-45
LOCKSTEP_THREAD_TEST(FsdpParity, LoopTrainsWithMomentum, 2) {
  const auto model = sharded_model(world);
  const auto loss = train_for_several_steps(*model, 3, {.save_model = true});
  EXPECT_FALSE(loss.requires_grad());
  auto whole = NestedWrappedModule::init(world.group(), {.deterministic = true});
  DistributedDataParallel ddp(whole, DdpOptions{.process_group = world.group()});
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  at::Tensor expected;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    expected = ddp.forward(whole->get_input(compute_device())).sum();
    expected.backward();
    optimizer.step();
  }
  EXPECT_TRUE(loss.equal(expected.detach()));
  for (const auto& parameter : model->parameters()) parameter.mutable_grad().reset();
  for (const auto& parameter : whole->parameters()) parameter.mutable_grad().reset();
  check_sharded_parity(*whole, *model);
}

// TEST-46, TEST-47, TEST-48, TEST-50
TEST(FsdpParity, HoldsForAllModelsOnOneToFourRanks) {
  for (const int size : {1, 2, 3, 4}) {
    run_threads_in_gtest({.world_size = size}, [](const World& world) {
      for (const auto reshards : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
        const ParityOptions options{.fsdp = {.reshard_after_forward = reshards}};
        test_fsdp_parity<TransformerWithSharedParams>(world.group(), options);
        test_fsdp_parity<NestedWrappedModule>(world.group(), options);
        test_fsdp_parity<AlwaysWrapNestedWrappedModule>(world.group(), options);
        test_fsdp_parity<NonUniformReqGradNWM>(world.group(), options);
      }
      test_fsdp_parity<TransformerWithSharedParams>(world.group(), {.num_iters = 4, .save_model = false},
                                                    TransformerOptions{.add_bn = false});
      test_fsdp_parity<NestedWrappedModule>(world.group(), {.device_init_mode = DeviceInitMode::kAfter});
    });
  }
}

std::vector<std::pair<std::string, FullyShardOptions>> option_sets() {
  return {{"FULL_SHARD", {.sharding_strategy = ShardingStrategy::kFullShard}},
          {"SHARD_GRAD_OP", {.sharding_strategy = ShardingStrategy::kShardGradOp}},
          {"halves between forward and backward", {.reshard_after_forward = 2}},
          {"flat", {.use_orig_params = false}},
          {"flat, whole until backward", {.reshard_after_forward = false, .use_orig_params = false}},
          {"synced", {.sync_module_states = true}},
          {"no prefetch", {.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::kNone}},
          {"prefetch behind the gradients", {.backward_prefetch = BackwardPrefetch::kBackwardPost}},
          {"all ahead", {.limit_all_gathers = false}},
          {"offloaded", {.offload_policy = CPUOffloadPolicy{.pin_memory = false}}}};
}

// TEST-46, TEST-49
TEST(FsdpParity, HoldsUnderEveryOption) {
  for (const int size : {2, 4}) {
    for (const auto& [name, fsdp] : option_sets()) {
      SCOPED_TRACE(name);
      run_threads_in_gtest({.world_size = size}, [&fsdp = fsdp](const World& world) {
        const ParityOptions options{.fsdp = fsdp};
        test_fsdp_parity<NestedWrappedModule>(world.group(), options);
        test_fsdp_parity<TransformerWithSharedParams>(world.group(), options);
      });
    }
  }
  run_threads_in_gtest({.world_size = 1}, [](const World& world) {
    test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp = {.force_sharding = true}});
  });
}

// TEST-28, TEST-49: a model that computes on the host is where it shall be in every mode, so nothing fails.
TEST(FsdpParity, HoldsInEveryDeviceMode) {
  for (const auto mode : {DeviceInitMode::kBefore, DeviceInitMode::kAfter, DeviceInitMode::kNever}) {
    for (const bool offloads : {false, true}) {
      run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
        ParityOptions options{.device_init_mode = mode};
        if (offloads) options.fsdp.offload_policy = CPUOffloadPolicy{.pin_memory = false};
        test_fsdp_parity<NestedWrappedModule>(world.group(), options);
        test_fsdp_parity<TransformerWithSharedParams>(world.group(), options);
        test_fsdp_parity<NestedWrappedModuleWithDelay>(world.group(), options, ModelDelays{});
      });
    }
  }
}

// TEST-46: what a parity test does if it is told nothing.
TEST(FsdpParity, HasTheseDefaults) {
  const ParityOptions options;
  EXPECT_EQ(options.fsdp_init_mode, FsdpInitMode::kRecursive);
  EXPECT_EQ(options.device_init_mode, DeviceInitMode::kBefore);
  EXPECT_EQ(options.num_iters, 2);
  EXPECT_TRUE(options.save_model);
  EXPECT_FALSE(options.ref_init_fn);
  EXPECT_FALSE(options.enable_grad_scaler);
  EXPECT_FALSE(options.use_pure_fp16);
  EXPECT_EQ(options.tolerance, 0);
  EXPECT_FALSE(options.fsdp.offload_policy);
  EXPECT_FALSE(options.fsdp.sharding_strategy);
  EXPECT_FALSE(options.fsdp.mp_policy.param_dtype);
  // As fully_shard() has them, not as Python's older wrapper: "flat" and "no prefetch" are option sets of their own.
  EXPECT_TRUE(options.fsdp.use_orig_params);
  EXPECT_TRUE(options.fsdp.forward_prefetch);
  // The reference is DDP, with two iterations on one batch each.
  run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    Recorder recorder;
    test_fsdp_parity<NestedWrappedModule>(world.group());
    expect_count(recorder.events("launch"), "bucket(bucket 0)", 2);
    expect_count(recorder.events("backward"), "post_backward(module.2)", 2);
  });
}

/// A model that goes wrong where the loop looks.
struct Wrong {
  bool moves_parameter = false;  // away from the host, behind backward
  std::optional<at::ScalarType> loss_dtype = std::nullopt;
};
class WrongModel final : public NestedWrappedModule {
 public:
  WrongModel(const GroupPtr& group, const Wrong& wrong) : NestedWrappedModule(group, true), wrong_(wrong) {}
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override {
    const auto loss = NestedWrappedModule::get_loss(input, output);
    return wrong_.loss_dtype ? loss.to(*wrong_.loss_dtype) : loss;
  }
  void run_backward(const at::Tensor& loss) override {
    loss.backward();
    if (!wrong_.moves_parameter) return;
    lockstep::detail::ModuleAccess::parameters_of(module->at(0))["bias"] = at::empty({4}, at::TensorOptions(at::kMeta));
  }

 private:
  const Wrong wrong_;
};

// TEST-44: the loop does check what it says it checks.
LOCKSTEP_THREAD_TEST(FsdpParity, LoopChecksDevicesAndDtypes, 2) {
  const auto trains = [&](const Wrong& wrong, const TrainOptions& training, FullyShardOptions fsdp) {
    const auto model = std::make_shared<WrongModel>(world.group(), wrong);
    fsdp = with_mesh(fsdp, world.group());
    if (training.use_pure_fp16) model->to(at::kHalf);
    fully_shard(*model, fsdp);
    train_for_several_steps(*model, 1, training);
  };
  const FullyShardOptions offloaded{.offload_policy = CPUOffloadPolicy{.pin_memory = false}};
  trains({}, {}, offloaded);
  expect_error([&] { trains({.moves_parameter = true}, {}, offloaded); },
               {"parameter 'module.0.bias' is on meta after backward; it should be in host memory"});
  expect_error([&] { trains({.loss_dtype = at::kDouble}, {}, {}); }, {"the loss is Double, expected Float"});
  trains({}, {.use_pure_fp16 = true}, {});
  expect_error([&] { trains({.loss_dtype = at::kFloat}, {.use_pure_fp16 = true}, {}); },
               {"the loss is Float, expected Half"});
  const MixedPrecisionPolicy low{.param_dtype = at::kBFloat16};
  trains({}, {.mixed_precision = low}, {.mp_policy = low});
  expect_error([&] { trains({.loss_dtype = at::kFloat}, {.mixed_precision = low}, {.mp_policy = low}); },
               {"the loss is Float, expected BFloat16"});
  // The reference of such a run, which is not sharded: float, or what autocast on the host gives.
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    WrongModel model(world.group(), {.loss_dtype = dtype});
    const auto train = [&] { train_for_several_steps(model, 1, {.autocast = true, .mixed_precision = low}); };
    if (dtype == at::kDouble) {
      expect_error(train, {"the loss is Double, expected BFloat16"});
    } else {
      train();
    }
  }
}

// TEST-30, TEST-46
LOCKSTEP_THREAD_TEST(FsdpParity, HoldsOnAMesh, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
  for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
    test_fsdp_parity<NestedWrappedModule>(world.group(),
                                          {.fsdp = {.mesh = mesh, .sharding_strategy = strategy}, .tolerance = 1e-6});
  }
  test_fsdp_parity<NestedWrappedModule>(world.group(),
                                        {.fsdp = {.sharding_strategy = ShardingStrategy::kNoShard}, .tolerance = 1e-6});
  test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp = {.mesh = mesh}, .tolerance = 1e-6});
  test_fsdp_parity<TransformerWithSharedParams>(world.group(), {.fsdp = {.mesh = mesh}, .tolerance = 1e-6});
  // One group, and a mesh that the library makes.
  test_fsdp_parity<TransformerWithSharedParams>(
      world.group(), {.fsdp = {.sharding_strategy = ShardingStrategy::kHybridShard}, .tolerance = 1e-6});
}

// TEST-43, TEST-44, TEST-45
TEST(FsdpParity, HoldsInLowPrecisionAndWithAScaler) {
  run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto scaled = [](ParityOptions options) {
      options.enable_grad_scaler = true;
      options.grad_scaler.init_scale = 4;
      return options;
    };
    test_fsdp_parity<NestedWrappedModule>(world.group(), scaled({}));
    test_fsdp_parity<NonUniformReqGradNWM>(world.group(), scaled({}));
    for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
      const ParityOptions low{.fsdp = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce}}};
      test_fsdp_parity<NestedWrappedModule>(world.group(), low);
      test_fsdp_parity<TransformerWithSharedParams>(world.group(), low);
      test_fsdp_parity<NestedWrappedModule>(world.group(), scaled(low));
    }
    test_fsdp_parity<NestedWrappedModule>(world.group(), {.use_pure_fp16 = true});
  });
}

// TEST-48
LOCKSTEP_THREAD_TEST(FsdpParity, NamesTheModelThatCannotBeMade, 2) {
  const auto mesh = init_device_mesh("cpu", {2, 1});
  expect_error([&] { test_fsdp_parity<NestedWrappedModule>(world.group(), {.fsdp = {.mesh = mesh}}); },
               {"making lockstep::testing::NestedWrappedModule", "needs names"});
}

// TEST-51
LOCKSTEP_THREAD_TEST(FsdpParity, OfShardsIsCheckedByNameValueAndGradient, 2) {
  const auto whole = NestedWrappedModule::init(world.group(), {.deterministic = true});
  const auto model = sharded_model(world);
  check_sharded_parity(*whole, *model);
  expect_error([&] { check_sharded_parity(*whole, *whole); }, {"'module.0.weight' is not a shard"});
  const auto other = MixtureOfExperts::init(world.group(), {});
  expect_error([&] { check_sharded_parity(*other, *model); }, {"has 10 parameters, the other 8"});
  const auto prefixed = NestedWrappedModuleWithDelay::init(
      world.group(), {.fsdp_init_mode = FsdpInitMode::kRecursive, .deterministic = true});
  fully_shard(*prefixed, with_mesh({}, world.group()));
  expect_error([&] { check_sharded_parity(*whole, *prefixed); },
               {"parameter 0 is 'module.module.0.weight', expected 'module.0.weight'"});
  check_sharded_parity(*whole->module, *prefixed, {"module."});

  model->forward(model->get_input(compute_device())).sum().backward();
  expect_error([&] { check_sharded_parity(*whole, *model); }, {"gradient of 'module.0.weight': defined"});
  DistributedDataParallel ddp(whole, DdpOptions{.process_group = world.group()});
  ddp.forward(whole->get_input(compute_device())).sum().backward();
  check_sharded_parity(*whole, *model);
  model->parameters()[0].mutable_grad().mul_(1.5);
  expect_error([&] { check_sharded_parity(*whole, *model); }, {"gradient of 'module.0.weight': largest difference"});
  const at::NoGradGuard no_grad;
  model->parameters()[0].add_(1e-6);
  expect_error([&] { check_sharded_parity(*whole, *model); }, {"parameter 'module.0.weight': largest difference"});
}

/// Its third layer stays whole after backward, as if the library had forgotten to free it.
struct ForgetsToReshard {
  static std::shared_ptr<NestedWrappedModule> init(const TestGroups& groups, const TestModelOptions& options) {
    auto model = NestedWrappedModule::init(groups, options);
    if (auto unit = unit_of(model->module->at(2))) unit->set_reshard_after_backward(false);
    return model;
  }
};

/// Its first layer does not reduce, as if its gradients were not seen.
struct ForgetsToReduce {
  static std::shared_ptr<NestedWrappedModule> init(const TestGroups& groups, const TestModelOptions& options) {
    auto model = NestedWrappedModule::init(groups, options);
    if (auto unit = unit_of(model->module->at(2))) unit->set_requires_gradient_sync(false);
    return model;
  }
};

Pending swap_first_two(const Call& call, const NextCall& next, int ranks) {
  auto pending = next(call);
  pending.wait();
  const at::NoGradGuard no_grad;
  for (const auto& output : call.outputs) {
    const auto pieces = output.view({ranks, -1});
    const auto first = pieces[0].clone();
    pieces[0].copy_(pieces[1]);
    pieces[1].copy_(first);
  }
  return pending;
}

std::string parity_report(const std::function<InterposerScope(const World& world)>& breaks) {
  const auto report = run_threads({.world_size = 3}, [&](const World& world) {
    const auto broken = breaks(world);
    test_fsdp_parity<NestedWrappedModule>(world.group(), {.num_iters = 1, .save_model = false});
  });
  return report.has_passed() ? "passed" : report.describe();
}

// TEST-52
TEST(FsdpParity, CatchesABrokenLibrary) {
  const auto nothing = [](const World&) {
    return InterposerScope([](const Call& call, const GroupPtr&, const NextCall& next) { return next(call); });
  };
  EXPECT_EQ(parity_report(nothing), "passed");
  const auto drops = [](const World&) { return drop_calls(CallKind::kReduceScatterSingle); };
  EXPECT_THAT(parity_report(drops), HasSubstr("does not train as the reference"));
  const auto divides_wrongly = [](const World&) {
    return replace_calls(CallKind::kReduceScatterSingle, [](const Call& call, const NextCall& next) {
      const at::NoGradGuard no_grad;
      call.inputs[0].mul_(1.5);
      return next(call);
    });
  };
  EXPECT_THAT(parity_report(divides_wrongly), HasSubstr("does not train as the reference: parameter '"));
  const auto swaps = [](const World& world) {
    return replace_calls(CallKind::kAllGatherSingle,
                         [size = world.world_size()](const Call& call, const NextCall& next) {
                           return swap_first_two(call, next, size);
                         });
  };
  EXPECT_THAT(parity_report(swaps), HasSubstr("does not train as the reference"));
  // One that reduces the parts of other ranks.
  const auto scatters_wrongly = [](const World& world) {
    return replace_calls(CallKind::kReduceScatterSingle,
                         [size = world.world_size()](const Call& call, const NextCall& next) {
                           const auto turned = call.inputs[0].view({size, -1}).roll(1, 0).view({-1});
                           auto changed = call;
                           changed.inputs[0].copy_(turned);
                           return next(changed);
                         });
  };
  EXPECT_THAT(parity_report(scatters_wrongly), HasSubstr("does not train as the reference: parameter '"));

  const auto report_of = [](const auto& test) { return run_threads({.world_size = 2}, test).describe(); };
  EXPECT_THAT(
      report_of([](const World& world) { test_fsdp_parity<ForgetsToReshard>(world.group(), {.save_model = false}); }),
      HasSubstr("of unit 'module.2' is still whole after the step"));
  EXPECT_THAT(
      report_of([](const World& world) { test_fsdp_parity<ForgetsToReduce>(world.group(), {.save_model = false}); }),
      HasSubstr("of unit 'module.2' has a gradient that was not reduced"));
}

}  // namespace lockstep::fsdp_parity_test
