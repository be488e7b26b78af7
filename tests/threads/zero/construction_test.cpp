// Building a ZeroRedundancyOptimizer: what it takes, what it refuses, and who gets which parameter.
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/objects.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::construction_test {
namespace {

using namespace zero_fixtures;
using testing::expect_error;
using testing::Recorder;
using torch::optim::OptimizerParamGroup;
using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;

std::vector<at::Tensor> sized(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> parameters;
  for (const auto size : sizes) parameters.push_back(at::ones({size}).requires_grad_());
  return parameters;
}

// ZERO-1
TEST(ZeroConstruction, RunsNoCollectiveAndGivesAnOptimizer) {
  on_ranks([](const World& world) {
    const Recorder recorder;
    Zero optimizer(sized({3, 4}), {0.5}, world.group());
    EXPECT_TRUE(recorder.events().empty());
    torch::optim::Optimizer& base = optimizer;
    torch::optim::StepLR scheduler(base, /*step_size=*/1, /*gamma=*/0.5);
    optimizer.step();
    for (int i = 0; i < 2; ++i) scheduler.step();  // libtorch's keep the rate the first time
    EXPECT_DOUBLE_EQ(base.param_groups()[0].options().get_lr(), 0.25);
    EXPECT_NE(dynamic_cast<Joinable*>(&base), nullptr);
    EXPECT_FALSE(optimizer.options().parameters_as_bucket_view);
    EXPECT_FALSE(optimizer.options().overlap_with_ddp);
  });
}

// ZERO-1
TEST(ZeroConstruction, UsesTheDefaultGroupAndDefaultOptions) {
  on_ranks([](const World& world) {
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(sized({3, 4}));
    EXPECT_EQ(optimizer.process_group(), world.group());
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
    ZeroRedundancyOptimizer<optim::AdamW> other(sized({3, 4}), {.lr = 0.5, .weight_decay = 0}, world.group());
    EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.5);
  });
}

// ZERO-2
TEST(ZeroConstruction, KeepsTheOrderOfGroupsAndParameters) {
  on_ranks([](const World& world) {
    const auto parameters = sized({1, 2, 3});
    Zero optimizer(std::vector<OptimizerParamGroup>{{{parameters[2], parameters[0]}}, {{parameters[1]}}}, {0.1},
                   world.group());
    ASSERT_EQ(optimizer.param_groups().size(), 2U);
    EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(parameters[2]));
    EXPECT_TRUE(optimizer.param_groups()[0].params()[1].is_same(parameters[0]));
    EXPECT_TRUE(optimizer.param_groups()[1].params()[0].is_same(parameters[1]));
  });
}

// ZERO-2, ZERO-3, ZERO-4
TEST(ZeroConstruction, RefusesParametersItCannotShard) {
  on_ranks([](const World& world) {
    const auto refuses = [&](std::vector<OptimizerParamGroup> groups, const std::vector<std::string>& words) {
      const Recorder recorder;
      auto all = words;
      all.push_back(str("[lockstep/zero] rank ", world.rank(), " of ", world.world_size()));
      expect_error([&] { Zero(groups, {0.1}, world.group()); }, all);
      EXPECT_TRUE(recorder.events().empty());
    };
    const auto leaf = at::ones({2}).requires_grad_();
    const auto other = at::ones({3}).requires_grad_();
    const auto sparse = at::eye(2).to_sparse().requires_grad_();
    refuses({{std::vector<at::Tensor>{}}}, {"there is no parameter"});
    refuses({}, {"there is no parameter"});
    refuses({{{leaf, at::Tensor()}}}, {"parameter 1 is undefined"});
    refuses({{{leaf}}, {{other, leaf * 2}}}, {"parameter 1 of group 1 is not a leaf"});
    refuses({{{sparse}}}, {"parameter 0 is sparse Float on cpu"});
    refuses({{{leaf}}, {{other, sparse}}},
            {"parameter 0 of group 0 is dense Float", "parameter 1 of group 1 is sparse Float"});
    const auto elsewhere = at::ones({2}, at::TensorOptions(at::kMeta)).requires_grad_();
    refuses({{{leaf, elsewhere}}}, {"parameter 0 is dense Float on cpu", "parameter 1 is dense Float on meta"});
    refuses({{{leaf, other, sparse}}}, {"parameter 0 is dense Float", "parameter 2 is sparse Float"});
    refuses({{{leaf}}, {{other, leaf}}}, {"parameter 0 of group 0 and parameter 1 of group 1 are the same"});
    refuses({{{other, leaf, other}}}, {"parameter 0 and parameter 2 are the same"});
  });
}

// ZERO-5
TEST(ZeroConstruction, WorksInAGroupOfSomeRanksAndRefusesOthers) {
  on_ranks(
      [](const World& world) {
        const auto even = new_group(world.group(), {0, 2});
        const auto parameters = parameters_of({{3, 2}, {4}, {5}});
        const auto expected = copies_of(parameters);
        if (world.rank() % 2 != 0) {
          expect_error([&] { Zero(parameters, {0.1}, even); },
                       {str("rank ", world.rank(), " of 4"), "not in the process group"});
          expect_error([&] { Zero(parameters, {0.1}, {.process_group = even}); },
                       {str("rank ", world.rank(), " of 4"), "not in the process group"});
          return;
        }
        for (const auto& [name, zero] : ways(even)) {
          const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
          Zero optimizer(parameters, options, zero);
          torch::optim::SGD plain(expected, options);
          set_gradients(parameters, 5);
          set_gradients(expected, 5);
          optimizer.step();
          plain.step();
          expect_same(parameters, expected, name);
          optimizer.consolidate_state_dict(1);
          if (world.rank() == 2) {
            expect_same_state(optimizer.state_dict(), state_dict_of(plain));
          } else {
            expect_error([&] { optimizer.state_dict(); }, {"rank 0 of 2"});
          }
        }
      },
      {4});
}

// ZERO-6
TEST(ZeroConstruction, HasItsFirstParametersDevice) {
  on_ranks(
      [](const World& world) {
        Zero optimizer(sized({3}), {0.1}, world.group());
        EXPECT_EQ(optimizer.join_device(), c10::Device(at::kCPU));
        EXPECT_EQ(optimizer.join_process_group(), world.group());
        EXPECT_EQ(optimizer.join_phase(), JoinPhase::kStep);
      },
      {2});
}

/// SGD that takes an argument and has an option of its own.
struct ScaledOptions : torch::optim::OptimizerCloneableOptions<ScaledOptions> {
  explicit ScaledOptions(double lr = 0.1) : lr(lr) {}
  double lr;
  int64_t steps = 0;
  double get_lr() const override { return lr; }
  void set_lr(const double value) override { lr = value; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr));
    archive.write("steps", c10::IValue(steps));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    lr = value.toDouble();
    archive.read("steps", value);
    steps = value.toInt();
  }
};

struct Scaled : torch::optim::Optimizer {
  using Options = ScaledOptions;
  explicit Scaled(const std::vector<OptimizerParamGroup>& groups, Options options)
      : Optimizer(groups, std::make_unique<Options>(options)) {}
  using Optimizer::step;
  at::Tensor step(LossClosure closure) override { return step_by(1, closure); }
  at::Tensor step_by(double factor, const LossClosure& closure = nullptr) {
    const auto loss = closure ? closure() : at::Tensor();
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      auto& options = static_cast<ScaledOptions&>(group.options());
      ++options.steps;
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * (options.lr * factor));
      }
    }
    return loss;
  }
};

// ZERO-7, ZERO-22, ZERO-27
TEST(ZeroConstruction, TakesOptimizersOfYourOwn) {
  on_ranks([](const World& world) {
    const auto parameters = sized({3, 4});
    ZeroRedundancyOptimizer<Scaled> optimizer(parameters, ScaledOptions(0.5), world.group());
    for (const auto& parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter);
    optimizer.step();
    const auto& options = static_cast<ScaledOptions&>(optimizer.param_groups()[0].options());
    EXPECT_EQ(options.steps, 1) << "what the local optimizer changed shows outside";
    optimizer.step([](Scaled& local) { return local.step_by(4); });
    EXPECT_EQ(options.steps, 2) << "references to options stay valid";
    for (const auto& parameter : parameters) EXPECT_TRUE(at::equal(parameter, at::full_like(parameter, 1 - 2.5)));
  });
}

/// SGD that chooses an option when it is built.
struct Choosing : torch::optim::SGD {
  explicit Choosing(const std::vector<OptimizerParamGroup>& groups, torch::optim::SGDOptions options)
      : SGD(groups, options) {
    for (auto& group : param_groups()) static_cast<torch::optim::SGDOptions&>(group.options()).momentum(0.75);
  }
};

// ZERO-27
TEST(ZeroConstruction, ShowsOptionsThatTheLocalOptimizerChose) {
  on_ranks([](const World& world) {
    ZeroRedundancyOptimizer<Choosing> optimizer(sized({3, 4}), {0.5}, world.group());
    EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).momentum(), 0.75);
  });
}

// ZERO-7
TEST(ZeroConstruction, RefusesOptimizersThatNeedAllParameters) {
  on_ranks(
      [](const World& world) {
        expect_error([&] { ZeroRedundancyOptimizer<torch::optim::LBFGS>(sized({3}), {1.0}, world.group()); },
                     {"torch::optim::LBFGS cannot be sharded", "depends on all of them"});
        expect_error(
            [&] {
              ZeroRedundancyOptimizer<Scaled>(sized({3}), ScaledOptions(),
                                              {.process_group = world.group(), .partition = ZeroPartition::kElements});
            },
            {"Scaled is not known to update every element by itself"});
      },
      {2});
}

// ZERO-8
TEST(ZeroConstruction, ComparesParametersOnRequest) {
  on_ranks(
      [](const World& world) {
        const auto is_odd = world.rank() == 1;
        Zero same(sized({3, 4}), {0.1}, world.group());
        same.check_same_on_all_ranks();
        Zero shapes(sized({3, is_odd ? 5 : 4}), {0.1}, world.group());
        const auto text =
            expect_error([&] { shapes.check_same_on_all_ranks(); }, {"parameter 1", "rank 1: 'Float[5]'"});
        const auto texts = all_gather_object(text.substr(0, text.find('\n')), world.group());
        for (const auto& each : texts) EXPECT_EQ(each, texts[0]);
        Zero dtypes({at::ones({3}, is_odd ? at::kDouble : at::kFloat).requires_grad_()}, {0.1}, world.group());
        expect_error([&] { dtypes.check_same_on_all_ranks(); }, {"parameter 0", "rank 1: 'Double[3]'"});
        Zero counts(sized(is_odd ? std::vector<int64_t>{3} : std::vector<int64_t>{3, 4}), {0.1},
                    {.process_group = world.group(), .check_same_on_all_ranks = true});
        expect_error([&] { counts.step(); }, {"number of parameters in group 0", "rank 1: '1'"});
      },
      {2, 3});
}

// ZERO-8, ZERO-30
TEST(ZeroConstruction, ComparesParametersBeforeStepsInDebugMode) {
  c10d::setDebugLevel(c10d::DebugLevel::Info);
  on_ranks(
      [](const World& world) {
        const auto is_odd = world.rank() == 1;
        Zero shapes(sized({3, is_odd ? 5 : 4}), {0.1}, world.group());
        expect_error([&] { shapes.step(); }, {"parameter 1", "rank 1: 'Float[5]'"});
        Zero groups(sized({3}), {0.1}, world.group());
        groups.step();
        if (is_odd) groups.add_param_group({sized({2})});
        expect_error([&] { groups.step(); }, {"number of parameter groups", "rank 1: '2'"});
      },
      {2, 3});
  c10d::setDebugLevel(c10d::DebugLevel::Off);
}

// ZERO-9, ZERO-10, ZERO-11, ZERO-13
TEST(ZeroConstruction, KnowsWhoHasWhat) {
  on_ranks([](const World& world) {
    const auto size = world.world_size();
    std::vector<int64_t> sizes;
    for (int i = 0; i < size; ++i) sizes.insert(sizes.end(), {9, 7, 5, 3});
    const auto parameters = sized(sizes);
    Zero optimizer(parameters, {0.1}, world.group());
    auto& partition = optimizer.partition();
    ASSERT_EQ(partition.partition().size(), static_cast<std::size_t>(size));
    for (const auto& groups : partition.partition()) {
      ASSERT_EQ(groups.size(), 1U);
      int64_t load = 0;
      for (const auto& parameter : groups[0].params()) load += parameter.numel();
      EXPECT_EQ(load, 24);
      EXPECT_EQ(groups[0].options().get_lr(), 0.1);
    }
    EXPECT_EQ(partition.index_to_param().size(), parameters.size());
    EXPECT_EQ(partition.param_to_rank().size(), parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(partition.index_to_param()[i].is_same(parameters[i]));
      EXPECT_EQ(partition.param_to_index().at(parameters[i].unsafeGetTensorImpl()), static_cast<int64_t>(i));
    }
    EXPECT_EQ(partition.param_to_rank().at(parameters[0].unsafeGetTensorImpl()), 0);
    EXPECT_EQ(optimizer.local_optimizer().param_groups()[0].params().size(),
              partition.partition()[world.rank()][0].params().size());

    const auto more = sized({2});
    optimizer.add_param_group({more});
    EXPECT_EQ(partition.partition()[0].size(), 2U);
    EXPECT_EQ(partition.param_to_index().at(more[0].unsafeGetTensorImpl()), static_cast<int64_t>(parameters.size()));
    EXPECT_EQ(partition.index_to_param().size(), parameters.size() + 1);
    EXPECT_EQ(partition.param_to_rank().at(more[0].unsafeGetTensorImpl()), 0);
  });
}

// ZERO-10, ZERO-11
TEST(ZeroConstruction, GivesEveryRankAllGroupsWithTheirOptionsAndFrozenParametersToo) {
  on_ranks([](const World& world) {
    const auto parameters = sized({100, 3, 2});
    parameters[0].requires_grad_(false);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{parameters[0], parameters[1]});
    groups.emplace_back(std::vector<at::Tensor>{parameters[2]}, std::make_unique<torch::optim::SGDOptions>(0.25));
    Zero optimizer(groups, {0.5}, world.group());
    for (const auto& of_rank : optimizer.partition().partition()) {
      ASSERT_EQ(of_rank.size(), 2U) << "also where they are empty";
      EXPECT_EQ(of_rank[0].options().get_lr(), 0.5);
      EXPECT_EQ(of_rank[1].options().get_lr(), 0.25);
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_NE(&of_rank[i].options(), &optimizer.param_groups()[i].options()) << "a copy";
      }
    }
    // The frozen one has an owner, and counts: the others go elsewhere.
    const auto owner = [&](std::size_t i) {
      return optimizer.partition().param_to_rank().at(parameters[i].unsafeGetTensorImpl());
    };
    EXPECT_EQ(owner(0), 0);
    EXPECT_EQ(owner(1), world.world_size() == 1 ? 0 : 1);
    EXPECT_EQ(owner(2), std::min(2, world.world_size() - 1));
  });
}

// ZERO-10
TEST(ZeroConstruction, WorksWithFewerParametersThanRanks) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          const auto parameters = parameters_of({{3}, {0}});
          const auto expected = copies_of(parameters);
          ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(parameters, {}, zero);
          torch::optim::Adam plain(expected);
          expect_same_steps(optimizer, plain, parameters, expected, 3, name);
          optimizer.consolidate_state_dict(world.world_size() - 1);
          if (world.rank() + 1 == world.world_size()) expect_same_state(optimizer.state_dict(), state_dict_of(plain));
        }
      },
      {4});
}

// ZERO-12
TEST(ZeroConstruction, TakesAPartitionThatIsGiven) {
  on_ranks(
      [](const World& world) {
        const auto parameters = sized({5, 4, 3, 2});
        const ZeroOptions given{.process_group = world.group(),
                                .params_per_rank = {{parameters[3], parameters[0]}, {parameters[1]}}};
        Zero optimizer(parameters, {1.0}, given);
        auto& ranks = optimizer.partition().param_to_rank();
        EXPECT_EQ(ranks.at(parameters[0].unsafeGetTensorImpl()), 0);
        EXPECT_EQ(ranks.at(parameters[1].unsafeGetTensorImpl()), 1);
        EXPECT_EQ(ranks.count(parameters[2].unsafeGetTensorImpl()), 0U);
        for (const auto& parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter);
        optimizer.step();
        for (const auto i : {0, 1, 3}) EXPECT_EQ(parameters[i][0].item<float>(), 0) << i;
        EXPECT_EQ(parameters[2][0].item<float>(), 1) << "nobody has it";

        const auto refuses = [&](const std::vector<OptimizerParamGroup>& groups,
                                 std::vector<std::vector<at::Tensor>> lists, const std::string& words) {
          expect_error(
              [&] { Zero(groups, {0.1}, ZeroOptions{.process_group = world.group(), .params_per_rank = lists}); },
              {words});
        };
        expect_error([&] { optimizer.partition().partition({{}, {}}); }, {"after the parameters had been divided"});
        refuses({{{parameters[0]}}, {{parameters[1]}}}, {{}, {}}, "needs one parameter group, there are 2");
        refuses({{parameters}}, {{}, {}, {}}, "params_per_rank has 3 lists. It takes one for each of 2 ranks");
        refuses({{parameters}}, {{}, sized({3})}, "params_per_rank[1][0] is none of the optimizer's parameters");
        refuses({{parameters}}, {{parameters[0]}, {parameters[0]}}, "params_per_rank[1][0] is listed twice");
        expect_error([&] { optimizer.add_param_group({sized({3})}); }, {"no other group can be added"});
        expect_error(
            [&] {
              Zero(
                  parameters, {0.1},
                  {.process_group = world.group(), .partition = ZeroPartition::kElements, .params_per_rank = {{}, {}}});
            },
            {"exclude each other"});
      },
      {2});
}

// ZERO-13, ZERO-14
TEST(ZeroConstruction, TellsDevicesApartForBucketViewsOnly) {
  on_ranks(
      [](const World& world) {
        const auto parameters = sized({4, 3});
        Zero without(parameters, {0.1}, world.group());
        expect_error([&] { without.device_to_params_per_rank(); }, {"Set parameters_as_bucket_view"});
        Zero with(parameters, {0.1}, {.process_group = world.group(), .parameters_as_bucket_view = true});
        const auto& devices = with.device_to_params_per_rank();
        ASSERT_EQ(devices.size(), 1U);
        EXPECT_EQ(devices[0].first, c10::Device(at::kCPU));
        EXPECT_TRUE(devices[0].second[1][0].is_same(parameters[1]));
        // It goes with the other maps when a group is added.
        const auto more = sized({2});
        with.add_param_group({more});
        EXPECT_EQ(with.device_to_params_per_rank()[0].second[1].size(), 2U);
        EXPECT_TRUE(with.device_to_params_per_rank()[0].second[1][1].is_same(more[0]));
        Zero elements(parameters, {0.1}, {.process_group = world.group(), .partition = ZeroPartition::kElements});
        expect_error([&] { elements.partition(); }, {"belong to several ranks"});
      },
      {2});
}

/// SGD that counts its steps where nobody else knows of it.
struct Counting : torch::optim::SGD {
  static constexpr bool kIsElementwise = true;
  using Options = torch::optim::SGDOptions;
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    ++steps;
    return SGD::step(closure);
  }
  int steps = 0;
};

// ZERO-7: members of an optimizer of one's own outlive a cut at which state parts, and a load
TEST(ZeroConstruction, KeepsMembersOfOptimizersOfYourOwn) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{5}, {7}, {3}});
        const auto expected = copies_of(parameters);
        const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
        ZeroRedundancyOptimizer<Counting> optimizer(
            parameters, options, {.process_group = world.group(), .partition = ZeroPartition::kElements});
        torch::optim::SGD plain(expected, options);
        auto& local = optimizer.local_optimizer();
        for (int step = 0; step < 3; ++step) {
          set_gradients(parameters, step);
          set_gradients(expected, step);
          if (step == 1) {
            parameters[1].mutable_grad().reset();
            expected[1].mutable_grad().reset();
          }
          optimizer.step();
          plain.step();
          expect_same(parameters, expected, str("step ", step));
        }
        EXPECT_EQ(&optimizer.local_optimizer(), &local);
        EXPECT_EQ(local.steps, 3);
        optimizer.load_state_dict(state_dict_of(plain));
        EXPECT_EQ(optimizer.local_optimizer().steps, 3);
        expect_same_steps(optimizer, plain, parameters, expected, 2, "after the load");
      },
      {1, 2, 3}, {"threads"});
}

struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {
  int64_t seen = 0;
  void serialize(torch::serialize::OutputArchive& archive) const override { archive.write("seen", c10::IValue(seen)); }
};

/// Keeps state that nothing loads.
struct Forgetful : Scaled {
  using Optimizer::step;
  using Scaled::Scaled;
  at::Tensor step(LossClosure closure) override {
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) state()[parameter.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
    }
    return Scaled::step(closure);
  }
};

// ZERO-7
TEST(ZeroConstruction, RefusesOptimizersWhoseStateCannotBeLoaded) {
  on_ranks(
      [](const World& world) {
        expect_error([&] { ZeroRedundancyOptimizer<Forgetful>(sized({3}), ScaledOptions(0.5), world.group()); },
                     {"Forgetful keeps state", "must override save() and load()"});
      },
      {1, 2}, {"threads"});
}

/// SGD that cannot be made for long parameters while this rank says so.
struct Failing : torch::optim::SGD {
  using Options = torch::optim::SGDOptions;
  static constexpr bool kIsElementwise = true;
  static inline thread_local bool is_failing = false;
  explicit Failing(const std::vector<OptimizerParamGroup>& groups, Options options) : SGD(groups, options) {
    for (const auto& group : param_groups()) {
      for (const auto& parameter : group.params()) {
        TORCH_CHECK(!is_failing || parameter.dim() > 1 || parameter.numel() < 10, "cannot be made just now");
      }
    }
  }
};

// A constructor that fails after DDP's backwards were told to give their gradients to it: they are whole again.
TEST(ZeroConstruction, LeavesDdpAsItWasIfItFailsLate) {
  using namespace ddp_models;
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp({6, 8, 3}), world.group());
        DistributedDataParallel expected_ddp(mlp({6, 8, 3}), world.group());
        const auto made = [&] {
          return std::make_unique<ZeroRedundancyOptimizer<Failing>>(
              ddp.parameters(), torch::optim::SGDOptions(0.1), ZeroOptions{.stage = ZeroStage::kGradients, .ddp = ddp});
        };
        Failing::is_failing = true;
        expect_error([&] { made(); }, {"cannot be made just now"});
        Failing::is_failing = false;
        for (int step = 0; step < 2; ++step) {
          zero_grads(ddp);
          zero_grads(expected_ddp);
          zero_fixtures::loss_of(ddp, world, step).backward();
          zero_fixtures::loss_of(expected_ddp, world, step).backward();
          expect_close(gradients_of(ddp), gradients_of(expected_ddp));
        }
        // And another one may have them.
        zero_grads(ddp);
        const auto optimizer = made();
        zero_fixtures::loss_of(ddp, world, 2).backward();
        EXPECT_FALSE(ddp.parameters()[0].grad().has_storage());
      },
      {1, 2}, {"threads"});
}

// Gradients that have come are in buckets, where it would not find them.
TEST(ZeroConstruction, TakesNoGradientsOfABackwardThatIsUnderWay) {
  using namespace ddp_models;
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp({6, 8, 3}), world.group());
        DistributedDataParallel expected_ddp(mlp({6, 8, 3}), world.group());
        const auto try_to_make = [&] {
          Zero(ddp.parameters(), {0.1}, ZeroOptions{.stage = ZeroStage::kGradients, .ddp = ddp});
        };
        int tries = 0;
        // Comes last; those of the other layer are there already.
        ddp.module()->layers[0]->weight.register_hook([&](const at::Tensor& gradient) {
          expect_error(try_to_make, {"kGradients", "cannot begin while a backward is under way"});
          ++tries;
          return gradient;
        });
        for (int step = 0; step < 2; ++step) {
          zero_grads(ddp);
          zero_grads(expected_ddp);
          zero_fixtures::loss_of(ddp, world, step).backward();
          zero_fixtures::loss_of(expected_ddp, world, step).backward();
          expect_close(gradients_of(ddp), gradients_of(expected_ddp));
        }
        EXPECT_EQ(tries, 2);
      },
      {1, 2}, {"threads"});
}

// A change of what is trainable that could not be taken in is tried again by the next step.
TEST(ZeroConstruction, TakesInTrainabilityThoughItFailedOnce) {
  on_ranks(
      [](const World& world) {
        const ddp_models::Warnings quiet;
        auto parameters = parameters_of({{7, 5}, {30}, {3, 4}});
        auto expected = copies_of(parameters);
        parameters[1].requires_grad_(false);
        expected[1].requires_grad_(false);
        ZeroRedundancyOptimizer<Failing> optimizer(
            parameters, torch::optim::SGDOptions(0.1).momentum(0.9),
            {.process_group = world.group(), .partition = ZeroPartition::kElements});
        torch::optim::SGD plain(expected, torch::optim::SGDOptions(0.1).momentum(0.9));
        expect_same_steps(optimizer, plain, parameters, expected, 1, "frozen");
        parameters[1].requires_grad_(true);
        expected[1].requires_grad_(true);
        set_gradients(parameters, 5);
        Failing::is_failing = true;
        expect_error([&] { optimizer.step(); }, {"cannot be made just now"});
        Failing::is_failing = false;
        expect_same_steps(optimizer, plain, parameters, expected, 3, "trainable");
      },
      {1, 2, 3}, {"threads"});
}

}  // namespace
}  // namespace lockstep::construction_test
