// Checkpointing of sharded models: the bits of DDP without it, and no gathers but those backward makes anyway.
#include "lockstep/base/str.h"
#include "lockstep/fsdp/join.h"
#include "lockstep/join/join.h"
#include "lockstep/testing/fsdp/small_models.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::checkpointed_fsdp_test {

using namespace fsdp_models;
using testing::Recorder;

/// Where the checkpoints are: in units, around one, around several, around the root, and in each other.
enum class Where { kNowhere, kInside, kAroundOne, kAroundTwo, kAroundAll, kNested };
const std::vector<Where> kEverywhere = {Where::kInside, Where::kAroundOne, Where::kAroundTwo, Where::kAroundAll,
                                        Where::kNested};

struct SavingNetImpl : NetImpl {
  explicit SavingNetImpl(Where where, CheckpointOptions options) : where_(where), options_(std::move(options)) {}

  at::Tensor forward(const at::Tensor& input) {
    if (where_ != Where::kAroundAll && where_ != Where::kNested) return run(input);
    // Changes nothing, but its backward needs its input: it runs again before any gradient of a parameter comes.
    return checkpoint(options_, [this](const at::Tensor& tokens) { return run(tokens).clamp(-1e6, 1e6); }, input);
  }

 private:
  at::Tensor run(const at::Tensor& input) {
    auto hidden = table->forward(input);
    if (where_ == Where::kAroundTwo) {
      hidden = checkpoint(
          options_, [this](const at::Tensor& in) { return blocks[1]->forward(blocks[0]->forward(in)); }, hidden);
      return head->forward(blocks[2]->forward(hidden));
    }
    for (auto& block : blocks) hidden = run(block, hidden);
    return head->forward(hidden);
  }
  at::Tensor run(Block& block, const at::Tensor& input) {
    if (where_ == Where::kAroundOne || where_ == Where::kNested) return checkpoint(options_, block, input);
    if (where_ != Where::kInside) return block->forward(input);
    const auto inner = [&block](const at::Tensor& in) {
      return block->down->forward(at::tanh(block->up->forward(in)));
    };
    return input + checkpoint(options_, inner, block->norm->forward(input));
  }

  const Where where_;
  const CheckpointOptions options_;
};
TORCH_MODULE(SavingNet);

SavingNet saving_net(Where where, const CheckpointOptions& options = {}) {
  // Ranks are threads here and share the default generator.
  auto own = options;
  own.preserve_rng_state = false;
  return built_from_seed([&] { return SavingNet(where, own); });
}

template <class Model>
FsdpUnit shard_units(Model& model, FullyShardOptions options, const World& world) {
  options.mesh = mesh_of(world);
  for (auto& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
}

void train_steps(auto& model, SGD& optimizer, const World& world, int steps) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(model, world, step).backward();
    optimizer.step();
  }
}

void expect_parity_with_ddp(const World& world, const FullyShardOptions& options, Where where,
                            const CheckpointOptions& checkpoints = {}) {
  DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
  SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
  train_steps(ddp, plain, world, 3);
  auto model = saving_net(where, checkpoints);
  shard_units(model, options, world);
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  train_steps(model, optimizer, world, 3);
  expect_same_parameters(*model, *ddp.module(), "after training");
}

// FSDP-83, FSDP-84
TEST(CheckpointedFsdp, TrainsWithTheBitsOfDdp) {
  on_worlds([](const World& world) {
    for (const auto where : kEverywhere) {
      SCOPED_TRACE(static_cast<int>(where));
      for (const auto& options : {FullyShardOptions{}, FullyShardOptions{.reshard_after_forward = true},
                                  FullyShardOptions{.reshard_after_forward = false}}) {
        expect_parity_with_ddp(world, options, where);
      }
      expect_parity_with_ddp(world, {}, where, {.early_stop = false});
      expect_parity_with_ddp(world, {}, where, {.policy = save_operators({"aten::addmm", "aten::mm"})});
    }
  });
}

LOCKSTEP_THREAD_TEST(CheckpointedFsdp, TrainsFlatParameters, 2) {
  for (const auto where : kEverywhere) {
    const auto trained = [&](Where at_which) {
      auto model = saving_net(at_which);
      shard_units(model, {.use_orig_params = false}, world);
      SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
      train_steps(model, optimizer, world, 3);
      return model->parameters();
    };
    expect_close(trained(where), trained(Where::kNowhere), 0);
  }
}

/// Gathers of a step's backward by unit, and the units that were freed more than once in it.
std::map<std::string, int> gathers_of_backward(const at::Tensor& loss) {
  const Recorder recorder;
  loss.backward();
  std::map<std::string, int> gathers;
  for (const auto& event : recorder.events()) gathers[event.kind + " " + event.unit] += 1;
  return gathers;
}

// FSDP-83: backward gathers a unit once, whether it runs again or not.
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, GathersAUnitOnceInBackward, 2) {
  for (const auto where : {Where::kInside, Where::kAroundOne, Where::kAroundTwo}) {
    for (const bool reshards : {true, false}) {
      auto model = saving_net(where);
      shard_units(model, {.reshard_after_forward = reshards}, world);
      for (int step = 0; step < 3; ++step) {
        SCOPED_TRACE(str(static_cast<int>(where), " ", reshards, " ", step));
        auto gathers = gathers_of_backward(loss_of(model, world, step));
        for (const auto* unit : {"block0", "block1", "block2"}) {
          EXPECT_EQ(gathers[str("unshard ", unit)], reshards ? 1 : 0) << unit;
          EXPECT_EQ(gathers[str("reshard ", unit)], 1) << unit;
          EXPECT_EQ(gathers[str("post_backward ", unit)], 1) << unit;
        }
      }
    }
  }
}

/// The same layer twice, each time in a checkpoint.
struct TwiceImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    const auto run = [this](const at::Tensor& in) { return at::tanh(layer->forward(in)); };
    const CheckpointOptions options{.preserve_rng_state = false};
    return checkpoint(options, run, at::tanh(other->forward(checkpoint(options, run, input))));
  }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 4));
  torch::nn::Linear other = register_module("other", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Twice);

// FSDP-83: a unit that is called twice gets its gradient, and is freed, when both calls have been run again.
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, SharedUnitsAreFreedOnce, 2) {
  const auto build = [] { return built_from_seed([] { return Twice(); }); };
  DistributedDataParallel ddp(build(), DdpOptions{.process_group = world.group()});
  auto model = build();
  const FullyShardOptions options{.mesh = mesh_of(world)};
  fully_shard(model->layer, options);
  fully_shard(model->other, options);
  fully_shard(model, options);
  for (int step = 0; step < 3; ++step) {
    const auto x = random_batch(3, 4, static_cast<uint64_t>(10 * step + world.rank()));
    zero_grads(ddp);
    zero_grads(*model);
    ddp(x).pow(2).sum().backward();
    auto gathers = gathers_of_backward(model->forward(x).pow(2).sum());
    EXPECT_EQ(gathers["reshard layer"], 1);
    const auto expected = ddp.module()->named_parameters();
    for (const auto& item : model->named_parameters()) {
      const auto part = layout_of(item.value())->cut(expected[item.key()].grad());
      EXPECT_TRUE(part.equal(item.value().grad())) << item.key();
    }
  }
}

// FSDP-83, FSDP-50: what runs again is cast as it was.
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, RunsAgainInLowPrecision, 2) {
  const MixedPrecisionPolicy policy{
      .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat};
  for (const auto where : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(where));
    auto plain = saving_net(Where::kNowhere);
    shard_units(plain, {.mp_policy = policy}, world);
    auto model = saving_net(where);
    shard_units(model, {.mp_policy = policy}, world);
    for (int step = 0; step < 2; ++step) {
      loss_of(plain, world, step).backward();
      loss_of(model, world, step).backward();
      for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
        EXPECT_TRUE(model->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
      }
    }
  }
}

/// Computes with its parameter where gradients are off: in the forward of a function of the program's.
struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};
struct ScaleImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return ScaleFunction::apply(x, weight).tanh(); }
  at::Tensor weight = register_parameter("weight", at::full({4}, 1.0 / 3));
};
TORCH_MODULE(Scale);

LOCKSTEP_THREAD_TEST(CheckpointedFsdp, RunsFunctionsOfTheProgramAgainInLowPrecision, 2) {
  const FullyShardOptions options{.mesh = mesh_of(world),
                                  .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  const auto gradient_of = [&](bool is_checkpointed) {
    Scale scale;
    fully_shard(scale, options);
    const auto x = random_batch(3, 4, static_cast<uint64_t>(world.rank()));
    (is_checkpointed ? checkpoint({.preserve_rng_state = false}, scale, x) : scale(x)).sum().backward();
    return scale->parameters()[0].grad();
  };
  EXPECT_TRUE(gradient_of(true).equal(gradient_of(false)));
}

// no_sync(): gradients of both backwards are reduced once.
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, AccumulatesWithoutSync, 2) {
  for (const auto where : kEverywhere) {
    auto plain = saving_net(Where::kNowhere);
    auto plain_root = shard_units(plain, {}, world);
    auto model = saving_net(where);
    auto root = shard_units(model, {}, world);
    const auto accumulate = [&](auto& net, FsdpUnit& unit) {
      {
        const auto scope = unit.no_sync();
        loss_of(net, world, 0).backward();
      }
      loss_of(net, world, 1).backward();
    };
    accumulate(plain, plain_root);
    accumulate(model, root);
    for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(model->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
    }
  }
}

// JOIN-53: ranks without inputs mirror what others run again.
TEST(CheckpointedFsdp, IsMirroredByRanksThatRanOut) {
  for (const auto where : kEverywhere) {
    for (const auto& reshards : {std::optional<bool>(), std::optional(true), std::optional(false)}) {
      SCOPED_TRACE(static_cast<int>(where));
      testing::run_threads_in_gtest({.world_size = 3}, [&](const World& world) {
        const auto train = [&](auto& model, SGD& optimizer, Joinable& joinable) {
          const auto update = [&] { optimizer.step(); };
          Join scope({&joinable}, {});
          scope.mirror(update).run([&] {
            for (int step = 0; step < 1 + 2 * world.rank(); ++step) {
              optimizer.zero_grad();
              loss_of(model, world, step).backward();
              update();
            }
          });
        };
        DistributedDataParallel ddp(net(), DdpOptions{.process_group = world.group()});
        SGD plain(ddp.parameters(), SGDOptions(0.1).momentum(0.9));
        train(ddp, plain, ddp);
        auto model = saving_net(where);
        FullyShardOptions options;
        if (reshards) options.reshard_after_forward = *reshards;
        const auto root = shard_units(model, options, world);
        FsdpJoinable joinable(root);
        SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
        train(model, optimizer, joinable);
        expect_same_parameters(*model, *ddp.module(), "uneven");
      });
    }
  }
}

LOCKSTEP_THREAD_TEST(CheckpointedFsdp, AnErrorWhenItRunsAgainLeavesNothingBehind, 2) {
  auto model = saving_net(Where::kNowhere);
  shard_units(model, {}, world);
  bool is_broken = false;
  const auto loss = [&](int step) {
    const auto run = [&](const at::Tensor& tokens) {
      const auto out = model->forward(tokens);
      TORCH_CHECK(!is_broken, "out of luck");
      return out.pow(2).mean();
    };
    return checkpoint({.preserve_rng_state = false, .early_stop = false}, run, batch(world, step));
  };
  const auto first = loss(0);
  is_broken = true;
  expect_error([&] { first.backward(); }, {"out of luck"});
  is_broken = false;
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  loss(1).backward();
  auto plain = saving_net(Where::kNowhere);
  shard_units(plain, {}, world);
  loss_of(plain, world, 1).backward();
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(model->parameters()[i].grad().equal(plain->parameters()[i].grad())) << i;
  }
}

LOCKSTEP_THREAD_TEST(CheckpointedFsdp, RefusesAStepBetweenForwardAndBackward, 2) {
  auto model = saving_net(Where::kAroundOne);
  shard_units(model, {.reshard_after_forward = true}, world);
  SGD optimizer(model->parameters(), SGDOptions(0.1));
  loss_of(model, world, 0).backward();
  const auto loss = loss_of(model, world, 1);
  optimizer.step();
  expect_error([&] { loss.backward(); }, {"was changed between forward and backward"});
}

// FSDP-84: units and names of a Checkpointed<M> are those of M.
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, CheckpointedModulesBecomeUnits, 2) {
  struct StackImpl : torch::nn::Module {
    StackImpl() {
      layers->push_back(Checkpointed<Block>(7));
      layers->push_back(Checkpointed<Block>(7));
      register_module("layers", layers);
    }
    at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
    torch::nn::Sequential layers;
  };
  auto model = built_from_seed([] { return std::make_shared<StackImpl>(); });
  shard_by_policy(*model, module_wrap_policy<BlockImpl>(), {.mesh = mesh_of(world)});
  const auto unit = unit_of(*model->layers->ptr(0));
  ASSERT_TRUE(unit);
  EXPECT_EQ(unit->parameter_names()[0], "norm.weight");
  const auto x = random_batch(3, 7, 1);
  const Recorder recorder;
  model->forward(x).sum().backward();
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

// TEST-36
LOCKSTEP_THREAD_TEST(CheckpointedFsdp, StackOfTheKitTrainsWithCheckpoints, 2) {
  const auto gradients = [&](bool is_checkpointed) {
    auto stack = built_from_seed([] { return testing::MLPStack(4, true); });
    stack->parallelize(std::nullopt, mesh_of(world), is_checkpointed);
    stack->forward(random_batch(3, 4, static_cast<uint64_t>(world.rank()))).pow(2).sum().backward();
    return gradients_of(*stack);
  };
  expect_close(gradients(true), gradients(false), 0);
}

}  // namespace lockstep::checkpointed_fsdp_test
