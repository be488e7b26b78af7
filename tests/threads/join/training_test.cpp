// Whole trainings in Join scopes, over DDP and optimizers: they equal one process with the inputs of all ranks, or
// every rank is told what it left out.
#include <gmock/gmock.h>
#include <torch/optim/schedulers/step_lr.h>

#include "lockstep/base/str.h"
#include "lockstep/ddp/default_hooks.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/group_options.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/zero/overlap_hooks.h"
#include "tests/support/ddp_models.h"
#include "tests/support/join_fixtures.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep::join_training_test {
namespace {

using namespace ddp_models;
using join_fixtures::spare_group;
using testing::expect_error;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using zero_fixtures::expect_same;
using zero_fixtures::ways;
using Zero = ZeroRedundancyOptimizer<SGD>;

SGDOptions sgd() {
  return SGDOptions(0.2).momentum(0.9);
}

at::Tensor batch_of(int rank, int step) {
  return random_batch(3, 4, 100 * rank + step);
}

/// On every rank: the one that notices throws, and the others hear of it in their next collective.
void expect_all_told(const std::function<void()>& action, const std::vector<std::string>& words) {
  try {
    action();
  } catch (const std::exception& error) {
    for (const auto& word : words) EXPECT_THAT(error.what(), ::testing::HasSubstr(word));
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

/// The loss of rank `rank` in step `step`.
template <class Net>
at::Tensor loss_of(Net& net, int rank, int step) {
  return net(batch_of(rank, step)).pow(2).mean();
}

/// Calls a module as a wrapper is called.
template <class M>
auto caller_of(const M& module) {
  return [own = M(module)](auto&&... arguments) mutable { return own->forward(arguments...); };
}

/// Sum of the losses of all ranks that still have inputs in `step`, divided by the number of ranks.
template <class Net>
at::Tensor whole_loss(Net& net, const std::vector<int>& inputs, int step) {
  auto sum = at::zeros({});
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    if (step < inputs[rank]) sum = sum + loss_of(net, static_cast<int>(rank), step);
  }
  return sum / static_cast<double>(inputs.size());
}

// ---- gradients of ranks without inputs ----

// JOIN-47: which branch is used changes from step to step. What nobody uses is not stepped, on joined ranks either
//
LOCKSTEP_THREAD_TEST(JoinTraining, JoinedRanksStepWhatTheOthersUse, 2) {
  const std::vector<int> inputs = {1, 6};
  const auto loss = [](auto& net, int rank, int step) {
    return net(batch_of(rank, step), /*uses_left=*/step % 2 == 0, /*uses_right=*/step % 3 == 1).pow(2).mean();
  };
  for (const bool sets_to_none : {true, false}) {
    const Warnings quiet;
    auto whole = seeded(Branchy());
    auto net = caller_of(whole);
    SGD plain(whole->parameters(), sgd());
    for (int step = 0; step < 6; ++step) {
      plain.zero_grad(sets_to_none);
      auto sum = loss(net, 1, step);
      if (step == 0) sum = sum + loss(net, 0, step);
      (sum / 2).backward();
      plain.step();
    }
    auto all_ways = ways(world.group());
    all_ways.emplace_back("gradients", ZeroOptions{.stage = ZeroStage::kGradients});
    all_ways.emplace_back("replicated", ZeroOptions{.process_group = world.group(), .stage = ZeroStage::kReplicated});
    for (const bool as_view : {false, true}) {
      for (auto [name, options] : all_ways) {
        const bool is_sharded = options.stage == ZeroStage::kGradients;
        // Slices have no gradient that could be zeroed and kept.
        if (is_sharded && (as_view || !sets_to_none)) continue;
        DistributedDataParallel ddp(seeded(Branchy()), world.group(),
                                    {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
        if (is_sharded) options.ddp = ddp;
        Zero optimizer(ddp.parameters(), sgd(), options);
        Join({&ddp, &optimizer}).run([&] {
          for (int step = 0; step < inputs[world.rank()]; ++step) {
            optimizer.zero_grad(sets_to_none);
            loss(ddp, world.rank(), step).backward();
            optimizer.step();
          }
        });
        expect_same(ddp.parameters(), whole->parameters(),
                    str(name, as_view ? ", views" : "", sets_to_none ? "" : ", zeroed"), {1e-5});
      }
    }
  }
}

// ---- optimizers that divide their state ----

/// Two epochs with a learning rate that falls in every step.
void train_with_schedule(const World& world, const std::vector<int>& inputs, ZeroStage stage, bool is_mirrored) {
  const auto group = spare_group(world);
  DistributedDataParallel ddp(mlp({4, 3, 2}), group);
  Zero optimizer(ddp.parameters(), sgd(), {.stage = stage, .ddp = ddp});
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  JoinSettings settings;
  if (is_mirrored) settings.on_mirrored_step = [&] { schedule.step(); };
  for (int epoch = 0; epoch < 2; ++epoch) {
    Join({&ddp, &optimizer}, settings).run([&] {
      for (int step = 0; step < inputs[world.rank()]; ++step) {
        optimizer.zero_grad();
        loss_of(ddp, world.rank(), step).backward();
        optimizer.step();
        schedule.step();
      }
    });
  }
}

// JOIN-63: joined ranks whose learning rate stays behind are noticed, by every rank: in the scope, or in the next one
// if it was the last step that changed it (U-2).
LOCKSTEP_THREAD_TEST(JoinTraining, SharesWithOtherLearningRatesAreNoticed, 2) {
  for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
    for (const auto& inputs : {std::vector{1, 4}, std::vector{1, 2}, std::vector{3, 2}}) {
      // Replicas that nothing keeps together may be seen to differ first.
      const std::string what = stage == ZeroStage::kReplicated ? "learning rate" : "have not stepped alike";
      expect_all_told([&] { train_with_schedule(world, inputs, stage, false); }, {what, "learning rate"});
      train_with_schedule(world, inputs, stage, true);
    }
  }
}

/// Changes what a schedule of momenta would, for step `step`.
void set_momentum(torch::optim::Optimizer& optimizer, int step) {
  for (auto& group : optimizer.param_groups()) {
    const double value = 0.9 - 0.1 * step;
    if (auto* sgd_options = dynamic_cast<SGDOptions*>(&group.options())) sgd_options->momentum(value);
    if (auto* adam_options = dynamic_cast<torch::optim::AdamOptions*>(&group.options())) {
      adam_options->betas({value, 0.999});
    }
    if (auto* ours = dynamic_cast<optim::GroupOptions<optim::SGDOptions>*>(&group.options())) ours->momentum = value;
  }
}

/// With a momentum that falls in every step. Equals one process if joined ranks' falls too, else all ranks are told.
template <class Optimizer, class Options>
void train_with_momenta(const World& world, const Options& options, ZeroStage stage) {
  const std::vector<int> inputs = {1, 4};
  auto whole = mlp({4, 3, 2});
  auto net = caller_of(whole);
  Optimizer plain(whole->parameters(), options);
  for (int step = 0; step < 4; ++step) {
    set_momentum(plain, step);
    plain.zero_grad();
    whole_loss(net, inputs, step).backward();
    plain.step();
  }
  for (const bool is_mirrored : {true, false}) {
    DistributedDataParallel ddp(mlp({4, 3, 2}), spare_group(world));
    ZeroRedundancyOptimizer<Optimizer> optimizer(ddp.parameters(), options, {.stage = stage, .ddp = ddp});
    int steps = 0;
    JoinSettings settings;
    settings.before_mirrored_step = [&] {
      if (is_mirrored) set_momentum(optimizer, steps++);
    };
    const auto train = [&] {
      Join({&ddp, &optimizer}, settings).run([&] {
        for (; steps < inputs[world.rank()];) {
          set_momentum(optimizer, steps++);
          optimizer.zero_grad();
          loss_of(ddp, world.rank(), steps - 1).backward();
          optimizer.step();
        }
      });
    };
    if (is_mirrored) {
      train();
      expect_same(ddp.parameters(), whole->parameters(), "", {1e-5});
    } else {
      expect_all_told(train, {"have not stepped alike", "momentum"});
    }
  }
}

// JOIN-63: momenta that a program changes from step to step are compared as learning rates are (U-2).
LOCKSTEP_THREAD_TEST(JoinTraining, SharesWithOtherMomentaAreNoticed, 2) {
  for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
    train_with_momenta<SGD>(world, sgd(), stage);
    train_with_momenta<torch::optim::Adam>(world, torch::optim::AdamOptions(0.1), stage);
    train_with_momenta<optim::SGD>(world, optim::SGDOptions{.lr = 0.2, .momentum = 0.9}, stage);
  }
}

// JOIN-63: the same where DDP's hook does the steps, and the optimizer is not in the list (U-2).
LOCKSTEP_THREAD_TEST(JoinTraining, StepsInsideOfBackwardAreCompared, 2) {
  for (const bool is_mirrored : {false, true}) {
    const auto group = spare_group(world);
    DistributedDataParallel ddp(mlp({4, 3, 2}), group);
    Zero optimizer(ddp.parameters(), sgd(), {.process_group = group, .overlap_with_ddp = true});
    ddp.register_comm_hook(hook_with_zero_step(allreduce_hook(group), ddp, optimizer));
    torch::optim::StepLR schedule(optimizer, 1, 0.5);
    JoinSettings settings;
    if (is_mirrored) settings.on_mirrored_step = [&] { schedule.step(); };
    const auto train = [&] {
      ddp.join(settings).run([&] {
        for (int step = 0; step < 3 + 5 * world.rank(); ++step) {
          optimizer.zero_grad();
          loss_of(ddp, world.rank(), step).backward();
          schedule.step();
        }
      });
    };
    if (is_mirrored) {
      train();
    } else {
      expect_all_told(train, {"have not stepped alike", "learning rate"});
    }
  }
}

// JOIN-63: a step that live ranks leave out, which a replicated optimizer would not notice by its collectives (U-2).
LOCKSTEP_THREAD_TEST(JoinTraining, StepsThatAreLeftOutAreNoticed, 2) {
  const auto group = spare_group(world);
  DistributedDataParallel ddp(mlp({4, 3, 2}), group);
  Zero optimizer(ddp.parameters(), sgd(), {.stage = ZeroStage::kReplicated, .ddp = ddp});
  expect_all_told(
      [&] {
        Join({&ddp, &optimizer}).run([&] {
          for (int step = 0; step < 1 + 3 * world.rank(); ++step) {
            optimizer.zero_grad();
            loss_of(ddp, world.rank(), step).backward();
            if (step != 2) optimizer.step();
          }
        });
      },
      {"have not stepped alike", "one step()"});
}

// JOIN-46: clipping is the first collective of an iteration where the optimizer stands first (Z-3).
LOCKSTEP_THREAD_TEST(JoinTraining, AnOptimizerThatStandsFirstMayClip, 3) {
  for (const auto& [name, zero] : ways(world.group())) {
    const auto parameters = zero_fixtures::parameters_of({{4, 3}, {5}, {6}});
    const auto expected = zero_fixtures::copies_of(parameters);
    SGD plain(expected, sgd());
    Zero optimizer(parameters, sgd(), zero);
    const auto clip = [&] { optimizer.clip_grad_norm_(0.5); };
    const auto set = [](const auto& all, int step) { zero_fixtures::set_gradients(all, 7 + step); };
    int step = 0;
    const auto prepare = [&] {
      set(parameters, step++);
      clip();
    };
    Join({&optimizer}, {.before_mirrored_step = prepare}).run([&] {
      while (step < 2 + 2 * world.rank()) {
        prepare();
        optimizer.step();
      }
    });
    for (int i = 0; i < 2 + 2 * (world.world_size() - 1); ++i) {
      set(expected, i);
      clip_grad_norm_(expected, 0.5);
      plain.step();
    }
    expect_same(parameters, expected, name, {1e-5});
  }
}

// JOIN-55: clipping by value is no collective, but joined ranks must do it as well (Z-15).
LOCKSTEP_THREAD_TEST(JoinTraining, RefusesClippingByValueThatJoinedRanksWouldNotDo, 2) {
  DistributedDataParallel ddp(mlp({4, 2}), world.group());
  Zero optimizer(ddp.parameters(), sgd(), world.group());
  Join({&ddp, &optimizer}).run([&] {
    loss_of(ddp, 0, 0).backward();
    expect_error([&] { clip_grad_value_(optimizer, 0.1); }, {"before_mirrored_step"});
    optimizer.step();
  });
}

/// Two models, one after the other: G in every iteration; D adds up two backwards before it steps.
struct TwoModels {
  Mlp g = mlp({4, 3, 2}, 5);
  Mlp d = mlp({4, 6, 1}, 6);
};

// JOIN-62: the natural order (Z-11)
LOCKSTEP_THREAD_TEST(JoinTraining, TwoModelsMayStepOneAfterTheOther, 2) {
  const std::vector<int> inputs = {2, 6};
  TwoModels whole;
  SGD plain_g(whole.g->parameters(), sgd());
  SGD plain_d(whole.d->parameters(), sgd());
  torch::optim::StepLR plain_schedule(plain_d, 1, 0.5);
  auto net_g = caller_of(whole.g);
  auto net_d = caller_of(whole.d);
  for (int step = 0; step < 6; ++step) {
    plain_g.zero_grad();
    whole_loss(net_g, inputs, step).backward();
    clip_grad_norm_(whole.g->parameters(), 0.1);
    plain_g.step();
    if (step % 2 == 0) plain_d.zero_grad();
    whole_loss(net_d, inputs, step).backward();
    if (step % 2 == 0) continue;
    clip_grad_norm_(whole.d->parameters(), 0.2);
    plain_d.step();
    plain_schedule.step();
  }
  for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
    TwoModels models;
    DistributedDataParallel g(models.g, world.group());
    DistributedDataParallel d(models.d, world.group());
    Zero zero_g(g.parameters(), sgd(), {.stage = stage, .ddp = g});
    Zero zero_d(d.parameters(), sgd(), {.stage = stage, .ddp = d});
    torch::optim::StepLR schedule(zero_d, 1, 0.5);
    const auto clip_g = [&] { zero_g.clip_grad_norm_(0.1); };
    const auto clip_d = [&] { zero_d.clip_grad_norm_(0.2); };
    Join({&g, &zero_g, &d, &zero_d},
         {.mirrored_steps = {{&zero_g, {.before = clip_g}},
                             {&zero_d, {.before = clip_d, .after = [&] { schedule.step(); }}}}})
        .run([&] {
          for (int step = 0; step < inputs[world.rank()]; ++step) {
            zero_g.zero_grad();
            loss_of(g, world.rank(), step).backward();
            clip_g();
            zero_g.step();
            if (step % 2 == 0) {
              zero_d.zero_grad();
              const auto local = d.no_sync();
              loss_of(d, world.rank(), step).backward();
              continue;
            }
            loss_of(d, world.rank(), step).backward();
            clip_d();
            zero_d.step();
            schedule.step();
          }
        });
    const auto name = std::to_string(static_cast<int>(stage));
    expect_same(g.parameters(), whole.g->parameters(), "G, stage " + name, {1e-5});
    expect_same(d.parameters(), whole.d->parameters(), "D, stage " + name, {1e-5});
  }
}

// JOIN-62: what is refused (Z-11)
LOCKSTEP_THREAD_TEST(JoinTraining, ListsOfTwoModelsSayWhatTheyCannotDo, 2) {
  const auto group = spare_group(world);
  TwoModels models;
  DistributedDataParallel g(models.g, group);
  DistributedDataParallel d(models.d, group);
  Zero zero_g(g.parameters(), sgd(), group);
  Zero zero_d(d.parameters(), sgd(), group);
  expect_error([&] { Join({&g, &zero_g, &d, &zero_d}, {.before_mirrored_step = [] {}}); }, {"mirrored_steps"});
  expect_error([&] { Join({&g, &zero_g}, {.mirrored_steps = {{&zero_d, {}}}}); }, {"'zero'", "not in its list"});
  expect_error([&] { Join({&zero_g, &g, &d, &zero_d}); }, {"'zero' before"});
  // Both backwards, then both steps, in a list that says otherwise.
  expect_all_told(
      [&] {
        Join({&g, &zero_g, &d, &zero_d}).run([&] {
          loss_of(g, 0, 0).backward();
          loss_of(d, 0, 0).backward();
          zero_g.step();
          zero_d.step();
        });
      },
      {"'zero' at position 1", "at position 2"});
}

// JOIN-63: before anything is sent, where it would hang at the first skew (Z-16)
LOCKSTEP_THREAD_TEST(JoinTraining, AnOptimizerThatIsNotInTheListIsNamed, 2) {
  for (const auto stage : {ZeroStage::kState, ZeroStage::kGradients}) {
    DistributedDataParallel ddp(mlp({4, 3, 2}), world.group());
    Zero optimizer(ddp.parameters(), sgd(), {.stage = stage, .ddp = ddp});
    ddp.join().run([&] {
      loss_of(ddp, world.rank(), 0).backward();
      expect_error([&] { optimizer.step(); }, {"'zero'", "without being in the list", "Join({&ddp, &optimizer})"});
    });
    // Where nothing is mirrored, and outside, it may step as it likes.
    ddp.join(true, true, /*throw_on_early_termination=*/true).run([&] {
      loss_of(ddp, world.rank(), 0).backward();
      optimizer.step();
    });
    optimizer.step();
  }
}

// ---- plain optimizers ----

struct Plain {
  explicit Plain(const World& world, const GroupPtr& group, SGDOptions options = sgd())
      : rank(world.rank()), ddp(mlp({4, 3, 2}), group), optimizer(ddp.parameters(), options) {}

  /// An epoch of this rank's inputs.
  void train(int inputs, const std::function<void()>& update) {
    for (int step = 0; step < inputs; ++step) {
      optimizer.zero_grad();
      loss_of(ddp, rank, step).backward();
      update();
    }
  }

  const int rank;
  DistributedDataParallel<Mlp> ddp;
  SGD optimizer;
  torch::optim::StepLR schedule{optimizer, 1, 0.8};
};

// JOIN-60: the whole update is mirrored, so that state and learning rate are those of one process, over several epochs
// (U-1).
LOCKSTEP_THREAD_TEST(JoinTraining, AMirroredUpdateKeepsPlainOptimizersInStep, 3) {
  const std::vector<std::vector<int>> epochs = {{1, 3, 2}, {4, 0, 2}, {2, 2, 2}};
  auto whole = mlp({4, 3, 2});
  auto net = caller_of(whole);
  SGD expected(whole->parameters(), sgd());
  torch::optim::StepLR expected_schedule(expected, 1, 0.8);
  Plain plain(world, world.group());
  const auto update = [&] {
    clip_grad_norm_(plain.ddp.parameters(), 0.3);
    plain.optimizer.step();
    plain.schedule.step();
  };
  for (const auto& inputs : epochs) {
    for (int step = 0; step < *std::max_element(inputs.begin(), inputs.end()); ++step) {
      expected.zero_grad();
      whole_loss(net, inputs, step).backward();
      clip_grad_norm_(whole->parameters(), 0.3);
      expected.step();
      expected_schedule.step();
    }
    plain.ddp.join().mirror(update).run([&] { plain.train(inputs[world.rank()], update); });
    expect_same(plain.ddp.parameters(), whole->parameters(), "", {1e-5});
    EXPECT_FLOAT_EQ(plain.optimizer.param_groups()[0].options().get_lr(),
                    expected.param_groups()[0].options().get_lr());
  }
  zero_fixtures::expect_same_state(state_dict_of(plain.optimizer), state_dict_of(expected), {1e-5});
}

// JOIN-60: one that is left behind is noticed by every rank after the first step of the next epoch, inside of a scope
// or not, also if some ranks mirror that step (U-1).
LOCKSTEP_THREAD_TEST(JoinTraining, PlainOptimizersThatStayBehindAreNoticed, 3) {
  const std::vector<int> first = {1, 3, 3};
  for (const auto& second : {std::vector{2, 2, 2}, std::vector{4, 2, 0}}) {
    for (const bool is_in_scope : {true, false}) {
      if (!is_in_scope && second[0] != second[1]) continue;
      Plain plain(world, spare_group(world));
      const auto update = [&] { plain.optimizer.step(); };
      plain.ddp.join().run([&] { plain.train(first[world.rank()], update); });
      expect_all_told(
          [&] { plain.ddp.join(true, is_in_scope).run([&] { plain.train(second[world.rank()], update); }); },
          {"replicas differ", "layer0.weight", "mirror(update)"});
    }
  }
}

// JOIN-60: a learning rate that stays behind shows when it changes (U-1).
LOCKSTEP_THREAD_TEST(JoinTraining, SchedulesThatStayBehindAreNoticed, 2) {
  Plain plain(world, spare_group(world), SGDOptions(0.2));
  const auto update = [&] {
    plain.optimizer.step();
    plain.schedule.step();
  };
  plain.ddp.join().run([&] { plain.train(1 + 2 * world.rank(), update); });
  expect_all_told([&] { plain.ddp.join().run([&] { plain.train(6, update); }); },
                  {"replicas differ", "mirror(update)"});
}

// JOIN-60: what keeps nothing cannot stay behind (U-1).
LOCKSTEP_THREAD_TEST(JoinTraining, OptimizersWithoutStateNeedNoMirror, 3) {
  Plain plain(world, world.group(), SGDOptions(0.2));
  const auto update = [&] { plain.optimizer.step(); };
  for (int epoch = 0; epoch < 3; ++epoch) {
    plain.ddp.join().run([&] { plain.train((world.rank() + epoch) % 3 * 3, update); });
  }
  plain.train(9, update);
}

// JOIN-60: a mirrored update that is not the one of live ranks (U-1).
LOCKSTEP_THREAD_TEST(JoinTraining, MirroredUpdatesAreCompared, 2) {
  Plain plain(world, spare_group(world));
  const auto update = [&] {
    plain.optimizer.step();
    plain.schedule.step();
  };
  const auto train = [&] {
    plain.ddp.join().mirror([&] { plain.optimizer.step(); }).run([&] { plain.train(1 + 4 * world.rank(), update); });
    all_reduce(at::ones({1}), plain.ddp.process_group());
  };
  expect_all_told(train, {"Join::mirror()", "layer0.weight"});
}

LOCKSTEP_THREAD_TEST(JoinTraining, AnUpdateIsMirroredOnce, 1) {
  Plain plain(world, world.group());
  auto scope = plain.ddp.join();
  expect_error([&] { scope.mirror(nullptr); }, {"no update"});
  scope.mirror([] {});
  expect_error([&] { scope.mirror([] {}); }, {"once"});
  scope.finish();
}

// ---- gradients that were added up and not reduced ----

// JOIN-61: a rank that runs out in the middle of an accumulation gives what it has to the others' average (U-6).
LOCKSTEP_THREAD_TEST(JoinTraining, AccumulationsEndWithWhatRanksHave, 3) {
  constexpr int kWindow = 3;
  const std::vector<int> inputs = {4, 9, 2};
  for (const bool by_all : {true, false}) {
    auto whole = mlp({4, 3, 2});
    auto net = caller_of(whole);
    SGD expected(whole->parameters(), sgd());
    for (int window = 0; window < 9 / kWindow; ++window) {
      expected.zero_grad();
      auto sum = at::zeros({});
      int givers = 0;
      for (int rank = 0; rank < 3; ++rank) {
        const int end = std::min(inputs[rank], kWindow * (window + 1));
        givers += end > kWindow * window ? 1 : 0;
        for (int step = kWindow * window; step < end; ++step) sum = sum + loss_of(net, rank, step);
      }
      (sum / (by_all ? 3 : givers)).backward();
      expected.step();
    }
    for (const auto& [name, options] : std::vector<std::pair<std::string, DdpOptions>>{
             {"plain", {.bucket_cap_mb = 0}},
             {"views", {.bucket_cap_mb = 0, .gradient_as_bucket_view = true}},
             {"search", {.find_unused_parameters = true}},
             {"static graph", {.static_graph = true}},
             {"gradients", {}}}) {
      const Warnings quiet;
      DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), options);
      const auto stage = name == "gradients" ? ZeroStage::kGradients : ZeroStage::kState;
      Zero optimizer(ddp.parameters(), sgd(), {.stage = stage, .ddp = ddp});
      Join({&ddp, &optimizer}, {.options = {.divide_by_initial_world_size = by_all}}).run([&] {
        for (int step = 0; step < inputs[world.rank()]; ++step) {
          if (step % kWindow == 0) optimizer.zero_grad();
          const bool is_last = step % kWindow == kWindow - 1;
          const auto local = ddp.no_sync(!is_last);
          loss_of(ddp, world.rank(), step).backward();
          if (is_last) optimizer.step();
        }
      });
      expect_same(ddp.parameters(), whole->parameters(), name + (by_all ? "" : ", by ranks that give"), {1e-5});
    }
  }
}

// JOIN-61: one that zeroed them has nothing to give, and neither has one whose scope ended (U-6).
LOCKSTEP_THREAD_TEST(JoinTraining, OnlyGradientsThatAreThereAreGiven, 2) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 1).bias(false));
  DistributedDataParallel ddp(layer, world.group());
  const auto add_locally = [&] {
    const auto local = ddp.no_sync();
    ddp(at::full({1, 4}, 10.0)).sum().backward();
  };
  const auto reduce = [&] {
    zero_grads(ddp);
    ddp(at::full({1, 4}, 6.0)).sum().backward();
    EXPECT_TRUE(at::allclose(layer->weight.grad(), at::full({1, 4}, 3.0))) << layer->weight.grad();
  };
  ddp.join().run([&] {
    add_locally();
    if (world.rank() == 0) return zero_grads(ddp);
    reduce();
  });
  ddp.join().run([&] { add_locally(); });
  ddp.join().run([&] {
    if (world.rank() == 1) reduce();
  });
}

// JOIN-61: neither does one that zeroed them in place count among those the sum is divided by. Gradients that came out
// as zeros count, and so do ones that were changed (U-6).
LOCKSTEP_THREAD_TEST(JoinTraining, ZeroedGradientsAreNotDividedBy, 2) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 1).bias(false));
  DistributedDataParallel ddp(layer, world.group());
  const auto average_after = [&](double local, double factor) {
    zero_grads(ddp);
    ddp.join({.options = {.divide_by_initial_world_size = false}}).run([&] {
      if (world.rank() == 0) {
        const auto guard = ddp.no_sync();
        ddp(at::full({1, 4}, local)).sum().backward();
        if (factor != 1) layer->weight.mutable_grad().mul_(factor);
        return;
      }
      {
        const auto guard = ddp.no_sync();
        ddp(at::full({1, 4}, 2.0)).sum().backward();
      }
      ddp(at::full({1, 4}, 6.0)).sum().backward();
    });
    return layer->weight.grad()[0][0].item<double>();
  };
  EXPECT_EQ(average_after(10, 0), 8);
  EXPECT_EQ(average_after(10, 1), 9);
  EXPECT_EQ(average_after(0, 1), 4);
  EXPECT_EQ(average_after(10, 0.5), 6.5);
}

// JOIN-64: two models whose backwards come in another order say which they are (U-5).
TEST(JoinTraining, BucketsNameTheirModel) {
  for (const std::string backend : {"threads", "shm"}) {
    testing::run_threads_in_gtest({.world_size = 2, .backend = backend}, [](const World& world) {
      const auto group = spare_group(world);
      DistributedDataParallel one(mlp({4, 3, 2}), group);
      DistributedDataParallel other(torch::nn::Linear(4, 1), group);
      expect_all_told([&] { world.rank() == 0 ? loss_of(one, 0, 0).backward() : loss_of(other, 0, 0).backward(); },
                      {"DDP(Mlp) bucket 0", "DDP(Linear) bucket 0"});
    });
  }
}

// JOIN-64: averaging at a rank's own last input, which is not the others' (U-5).
TEST(JoinTraining, RanksThatAverageAtTheirOwnEndAreTold) {
  for (const std::string backend : {"threads", "shm"}) {
    testing::run_threads_in_gtest({.world_size = 2, .backend = backend}, [](const World& world) {
      DistributedDataParallel ddp(mlp({4, 3, 2}), spare_group(world));
      const int inputs = 3 + 3 * world.rank();
      expect_all_told(
          [&] {
            ddp.join().run([&] {
              for (int step = 0; step < inputs; ++step) {
                const bool is_last = step + 1 == inputs;
                const auto local = ddp.no_sync(!is_last);
                loss_of(ddp, world.rank(), step).backward();
              }
            });
          },
          {"no_sync()"});
    });
  }
}

// JOIN-64: a rank that has run out sees it in the votes, before it takes part in a reduction that not all begin (U-5).
LOCKSTEP_THREAD_TEST(JoinTraining, VotesThatDifferAreNamed, 3) {
  DistributedDataParallel ddp(mlp({4, 3, 2}), spare_group(world));
  const auto train = [&] {
    ddp.join().run([&] {
      if (world.rank() == 0) return;
      const auto local = ddp.no_sync(world.rank() != 1);
      loss_of(ddp, world.rank(), 0).backward();
    });
  };
  if (world.rank() == 0) {
    expect_all_told(train, {"rank 1 would average gradients", "rank 2 would not", "no_sync()"});
  } else {
    EXPECT_ANY_THROW(train());
  }
}

// JOIN-64: a rank that ends its loop early without a scope, and goes on to something else or to nothing (U-5).
TEST(JoinTraining, ForgottenScopesAreAdvisedOf) {
  for (const std::string backend : {"threads", "shm"}) {
    for (const bool has_buffers : {false, true}) {
      for (const bool calls_another : {false, true}) {
        const testing::RunOptions options{
            .world_size = 2, .backend = backend, .collective_timeout = std::chrono::seconds(2)};
        testing::run_threads_in_gtest(options, [&](const World& world) {
          const auto group = spare_group(world);
          torch::nn::Sequential model(torch::nn::Linear(4, 4));
          if (has_buffers) model->push_back(torch::nn::BatchNorm1d(4));
          DistributedDataParallel ddp(model, group);
          const auto step = [&] { ddp(batch_of(world.rank(), 0)).pow(2).mean().backward(); };
          for (int i = 0; i < 3; ++i) step();
          if (world.rank() == 1) return expect_all_told(step, {"Join scope", "ddp.join()", "fewer inputs"});
          if (calls_another) expect_all_told([&] { all_reduce(at::ones({1}), group); }, {"DDP"});
        });
      }
    }
  }
}

// JOIN-64: in a scope nobody is told to open one.
TEST(JoinTraining, OpenScopesAreNotAdvised) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto group = spare_group(world);
    DistributedDataParallel ddp(mlp({4, 3, 2}), group);
    const auto train = [&] {
      ddp.join().run([&] {
        for (int step = 0; step < 3; ++step) {
          if (world.rank() == 0 && step == 2) all_reduce(at::ones({1}), group);
          loss_of(ddp, world.rank(), step).backward();
        }
      });
    };
    try {
      train();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("fewer inputs")));
    }
  });
}

// A second averaged backward divides what ranks without inputs do not add to, as in Python; whoever zeroes is not told.
LOCKSTEP_THREAD_TEST(JoinTraining, AdditionsToAveragesAreWarnedOf, 2) {
  enum class Zeroing { kNone, kByReset, kInPlace };
  for (const auto zeroing : {Zeroing::kNone, Zeroing::kByReset, Zeroing::kInPlace}) {
    for (const bool as_view : {false, true}) {
      const Warnings warnings;
      DistributedDataParallel ddp(mlp({4, 3, 2}), world.group(), {.gradient_as_bucket_view = as_view});
      ddp.join().run([&] {
        // Buckets are laid out anew after the first one, and with them views that gradients are.
        for (int step = 0; step < 3 + world.rank(); ++step) {
          loss_of(ddp, world.rank(), step).backward();
          if (zeroing != Zeroing::kNone) ddp.zero_grad(zeroing == Zeroing::kByReset);
        }
      });
      EXPECT_EQ(warnings.count("was added to an average that was not zeroed"), zeroing == Zeroing::kNone ? 1 : 0)
          << static_cast<int>(zeroing) << (as_view ? " views" : "") << " rank " << world.rank();
    }
  }
}

}  // namespace
}  // namespace lockstep::join_training_test
