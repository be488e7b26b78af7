// What holds around ZeRO's step inside of DDP's backward: refusals, state, join scopes, the order of collectives, logs.
#include <torch/csrc/distributed/c10d/debug.h>
#include <torch/optim/lbfgs.h>

#include <sstream>

#include "lockstep/comm/objects.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/functional_registry.h"
#include "lockstep/testing/temp_dir.h"
#include "lockstep/zero/streaming.h"
#include "tests/support/zero_overlap_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_overlap_fixtures;
using testing::expect_error;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using zero_fixtures::expect_same_state;

/// An optimizer of the program's own, without a functional form.
class Descent : public SGD {
 public:
  using SGD::SGD;
};

void on_two_ranks(const testing::RankBody& body) {
  on_ranks(body, {1, 2}, {"threads"});
}

// ZERO-44, ZERO-58, ZERO-60
TEST(ZeroOverlapRefuses, WhatCannotBeOverlappedAtConstruction) {
  on_two_ranks([](const World& world) {
    auto model = mlp(kSizes);
    const auto parameters = model->parameters();
    const auto zero = overlapped(world.group());
    expect_error([&] { ZeroRedundancyOptimizer<Descent>(parameters, sgd(), zero); },
                 {"rank " + std::to_string(world.rank()), "Descent", "no functional form"});
    using Groups = std::vector<torch::optim::OptimizerParamGroup>;
    expect_error([&] { Zero(Groups{{{parameters[0]}}, {{parameters[1]}}}, sgd(), zero); },
                 {"one parameter group, 2 were given"});
    auto by_elements = zero;
    by_elements.partition = ZeroPartition::kElements;
    expect_error([&] { Zero(parameters, sgd(), by_elements); }, {"DDP's buckets say who has which parameter"});
  });
}

// ZERO-19
LOCKSTEP_THREAD_TEST(ZeroOverlapRefuses, BucketViewsWithAWarning, 1) {
  Warnings warnings;
  auto model = mlp(kSizes);
  Zero zero(model->parameters(), sgd(),
            {.process_group = world.group(), .parameters_as_bucket_view = true, .overlap_with_ddp = true});
  EXPECT_EQ(warnings.count("parameters_as_bucket_view is ignored"), 1);
  expect_error([&] { zero.device_to_params_per_rank(); }, {"bucket view"});
}

// ZERO-60
TEST(ZeroOverlapRefuses, HooksThatDoNotFit) {
  on_two_ranks([](const World& world) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    DistributedDataParallel other(mlp(kSizes), world.group());
    Zero plain(ddp.parameters(), sgd(), world.group());
    expect_error([&] { hook_of(Form::kAfterLast, ddp, plain); }, {"hook_with_zero_step", "overlap_with_ddp"});
    expect_error([&] { hook_of(Form::kInterleaved, ddp, plain); }, {"_interleaved", "overlap_with_ddp"});
    expect_error([&] { plain.overlap_info(); }, {"overlap_with_ddp"});
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    expect_error([&] { hook_with_zero_step({}, ddp, zero); }, {"was given no hook"});
    hook_of(Form::kAfterLast, ddp, zero, true);
    hook_of(Form::kInterleaved, ddp, zero, true);
    expect_error([&] { hook_of(Form::kAfterLast, ddp, zero, false); }, {"shard_buckets on, and now it is off"});
    expect_error([&] { hook_of(Form::kAfterLast, other, zero, true); }, {"another DDP"});
    DistributedDataParallel skipping(mlp(kSizes), world.group(),
                                     {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    Zero third(skipping.parameters(), sgd(), overlapped(world.group()));
    expect_error([&] { hook_of(Form::kAfterLast, skipping, third); }, {"skip_all_reduce_unused_params"});
    const auto model = mlp(kSizes);
    DistributedDataParallel delaying(model, world.group(),
                                     {.delay_all_reduce_named_params = {{"layer1.weight", model->layers[1]->weight}},
                                      .param_to_hook_all_reduce = model->layers[0]->weight});
    Zero fourth(delaying.parameters(), sgd(), overlapped(world.group()));
    expect_error([&] { hook_of(Form::kAfterLast, delaying, fourth); },
                 {"delay_all_reduce_named_params", "Use one of them"});
  });
}

// ZERO-60: the wrapper would not tell ZeRO which parameters were used, nor when it is done
TEST(ZeroOverlapRefuses, AHookInsideOfOneThatDoesNotPassOnItsRegistration) {
  on_two_ranks([](const World& world) {
    const Warnings quiet;  // that it never stepped
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    const auto before = copies_of(ddp.parameters());
    ddp.register_comm_hook({.name = "around", .run = hook_of(Form::kAfterLast, ddp, zero).run});
    expect_error([&] { train_once(ddp, world, 0); }, {"was not registered itself", "CommHook::on_registered"});
    expect_same(ddp.parameters(), before);
  });
}

// ZERO-60
TEST(ZeroOverlapRefuses, GroupsAndClosuresAndClipping) {
  on_two_ranks([](const World& world) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    const torch::optim::OptimizerParamGroup group({at::ones({2}).requires_grad_()});
    expect_error([&] { zero.add_param_group(group); }, {"one parameter group, so none can be added"});
    expect_error([&] { zero.step([] { return at::Tensor(); }); }, {"closure"});
    expect_error([&] { zero.step([](SGD&) { return at::Tensor(); }); }, {"cannot be replaced"});
    expect_error([&] { zero.clip_grad_norm_(1); }, {"cannot be clipped"});
    expect_error([&] { clip_grad_value_(zero, 1); }, {"cannot be clipped"});
    expect_error([&] { zero.local_optimizer(); }, {"no local optimizer"});
    // Through the base class nobody can refuse at once.
    ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
    for (int step = 0; step < 2; ++step) train_once(ddp, world, step);
    static_cast<torch::optim::Optimizer&>(zero).add_param_group(group);
    expect_error([&] { train_once(ddp, world, 2); }, {"parameter groups were changed"});
  });
}

// ZERO-34, ZERO-60
TEST(ZeroOverlapRefuses, ChangesOfTrainability) {
  on_two_ranks([](const World& world) {
    for (const int when : {1, 4}) {
      DistributedDataParallel ddp(seeded(Branchy()), world.group(), {.find_unused_parameters = true});
      Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
      ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
      const auto train = [&] { ddp(my_rows(random_batch(kRows, 4, 1), world), true, true).sum().backward(); };
      for (int step = 0; step < when; ++step) train();
      ddp.module()->right->weight.set_requires_grad(false);
      expect_error([&] { train(); }, {"frozen", "overlap_with_ddp"});
    }
  });
}

// ZERO-60
TEST(ZeroOverlapRefuses, StateBeforeThereIsALocalOptimizer) {
  on_two_ranks([](const World& world) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    expect_error([&] { zero.consolidate_state_dict(); }, {"consolidation is not possible yet", "no hook was made"});
    const auto hook = hook_of(Form::kAfterLast, ddp, zero);
    expect_error([&] { zero.consolidate_state_dict(); }, {"consolidation is not possible yet"});
    expect_error([&] { zero.state_dict(); }, {"state_dict() is not possible yet"});
    expect_error([&] { zero.load_state_dict({}); }, {"loading state is not possible yet"});
    expect_error([&] { save_sharded(zero, "nowhere"); }, {"saving state is not possible yet"});
    expect_error([&] { consolidate_in_chunks(zero); }, {"saving state is not possible yet"});
    expect_error([&] { zero.partition(); }, {"a partition is not possible yet"});
  });
}

// ZERO-60
TEST(ZeroOverlapRefuses, ToGoOnWithoutItsDdpOrItsOptimizerOrWithOtherBuckets) {
  on_two_ranks([](const World& world) {
    auto ddp = std::make_unique<DistributedDataParallel<Mlp>>(mlp(kSizes), world.group(), small_buckets());
    auto zero = std::make_unique<Zero>(ddp->parameters(), sgd(), overlapped(world.group()));
    const auto hook = hook_of(Form::kAfterLast, *ddp, *zero);
    ddp->register_comm_hook(hook);
    for (int step = 0; step < 3; ++step) train_once(*ddp, world, step);
    const auto& known = zero->overlap_info().params_per_bucket;
    ASSERT_GT(known.size(), 1U);
    const auto bucket_of = [&](std::size_t index, const std::vector<at::Tensor>& parameters) {
      return GradBucket({.index = index,
                         .bucket_count = known.size(),
                         .buffer = at::zeros({1}),
                         .offsets = {0},
                         .lengths = {1},
                         .parameters = parameters});
    };
    auto strange = bucket_of(0, {at::zeros({1})});
    expect_error([&] { hook.run(strange); }, {"bucket 0 holds other parameters"});
    auto early = bucket_of(1, known[1]);
    expect_error([&] { hook.run(early); }, {"bucket 1 came when bucket 0 was expected"});
    auto sparse = GradBucket({.buffer = at::zeros({2, 2}).to_sparse(), .parameters = {at::zeros({2, 2})}});
    const auto bare = hook_with_zero_step(noop_hook(), *ddp, *zero);
    expect_error([&] { bare.run(sparse); }, {"sparse gradient"});
    auto first = bucket_of(0, known[0]);
    zero.reset();
    expect_error([&] { hook.run(first); }, {"ZeroRedundancyOptimizer", "is gone"});
    auto next = std::make_unique<Zero>(ddp->parameters(), sgd(), overlapped(world.group()));
    const auto orphan = hook_of(Form::kAfterLast, *ddp, *next);
    ddp.reset();
    expect_error([&] { orphan.run(first); }, {"DistributedDataParallel", "is gone"});
  });
}

// ZERO-60
TEST(ZeroOverlapRefuses, ADdpThatGoesOnWithAnotherGroup) {
  on_two_ranks([](const World& world) {
    DistributedDataParallel ddp(mlp(kSizes), world.group());
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
    for (int step = 0; step < 3; ++step) train_once(ddp, world, step);
    std::vector<int> all(world.world_size());
    std::iota(all.begin(), all.end(), 0);
    ddp.update_process_group(new_group(world.group(), all));
    expect_error([&] { train_once(ddp, world, 3); }, {"another group"});
  });
}

// ZERO-44, ZERO-61
TEST(ZeroOverlapStep, WarnsAndDoesNothing) {
  on_two_ranks([](const World& world) {
    Warnings warnings;
    {
      auto model = mlp(kSizes);
      Zero zero(model->parameters(), sgd(), overlapped(world.group()));
      for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
      const auto before = copies_of(model->parameters());
      EXPECT_FALSE(zero.step().defined());
      expect_same(model->parameters(), before);
      EXPECT_EQ(warnings.count("step() does nothing with overlap_with_ddp"), 1);
      EXPECT_EQ(warnings.count("no hook was made"), 1);
    }
    EXPECT_EQ(warnings.count("never updated a parameter"), 1);
  });
}

// ZERO-61
TEST(ZeroOverlapStep, TakesNoSecondStepAfterABackward) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
        Warnings warnings;
        for (int step = 0; step < 5; ++step) {
          train_once(ddp, world, step);
          const testing::Recorder recorder;
          EXPECT_FALSE(zero.step().defined());
          EXPECT_TRUE(recorder.events().empty());
        }
        EXPECT_EQ(warnings.count("step() does nothing with overlap_with_ddp"), 5);
        EXPECT_EQ(warnings.count("no hook was made"), 0);
        expect_same(ddp.parameters(), plain_result(world, 2, 5), "backwards alone", kClose);
        const auto gradients = gradients_of(ddp);
        for (const auto& gradient : gradients) EXPECT_TRUE(gradient.defined()) << "zero_grad() is the program's";
        zero.zero_grad();
        for (const auto& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
      },
      {2}, {"threads"});
}

/// SGD's, until it shall fail.
class FailingForm : public optim::FunctionalOptimizer {
 public:
  explicit FailingForm(const std::vector<at::Tensor>& parameters)
      : FunctionalOptimizer(parameters), inner_(parameters) {}
  std::string name() const override { return "Failing"; }
  void step(const std::vector<at::Tensor>& gradients) override {
    TORCH_CHECK(!fails, "the gradient is odd");
    inner_.step(gradients);
  }
  torch::optim::OptimizerOptions& options() override { return inner_.options(); }
  void set_options(const torch::optim::OptimizerOptions& options) override { inner_.set_options(options); }
  NamedValues state(std::size_t index) const override { return inner_.state(index); }
  void load_state(std::size_t index, const NamedValues& state) override { inner_.load_state(index, state); }

  static thread_local bool fails;

 private:
  optim::FunctionalSGD inner_;
};
thread_local bool FailingForm::fails = false;

struct Failing : SGD {
  using SGD::SGD;
};

// ZERO-25: with overlap
TEST(ZeroOverlapStep, ThatThrowsTellsTheOthers) {
  optim::register_functional<Failing>(
      [](const std::vector<at::Tensor>& parameters, const torch::optim::OptimizerOptions&) {
        return std::make_unique<FailingForm>(parameters);
      });
  on_ranks(
      [](const World& world) {
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          const auto group = new_group(world.group(), global_ranks(world.group()), {.name = "spare"});
          DistributedDataParallel ddp(mlp(kSizes), group, small_buckets());
          ZeroRedundancyOptimizer<Failing> zero(ddp.parameters(), {0.1}, overlapped(group));
          ddp.register_comm_hook(hook_of(form, ddp, zero));
          for (int step = 0; step < 3; ++step) train_once(ddp, world, step);
          // Backwards of this thread's graphs run on it.
          FailingForm::fails = world.rank() == 1;
          std::string error;
          const auto start = std::chrono::steady_clock::now();
          try {
            train_once(ddp, world, 3);
          } catch (const std::exception& thrown) {
            error = thrown.what();
          }
          FailingForm::fails = false;
          EXPECT_THAT(error,
                      ::testing::HasSubstr(world.rank() == 1 ? "the gradient is odd"
                                                             : "rank 1 left by an exception: the gradient is odd"));
          EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
        }
      },
      {2, 3}, {"threads", "shm"});
}

// ZERO-61: local backwards add up; the first reduced one steps with the sum
TEST(ZeroOverlapStep, UpdatesNothingInNoSync) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(Form::kInterleaved, ddp, zero));
        DistributedDataParallel expected(mlp(kSizes), world.group());
        SGD plain(expected.parameters(), sgd());
        for (int step = 0; step < 2; ++step) train_once(ddp, world, step);
        const auto add_up = [&](auto& each) {
          zero_grads(each);
          const auto before = copies_of(each.parameters());
          {
            const auto local = each.no_sync();
            each(my_rows(random_batch(kRows, kSizes[0], 1), world)).pow(2).mean().backward();
          }
          expect_same(each.parameters(), before);
          each(my_rows(random_batch(kRows, kSizes[0], 2), world)).pow(2).mean().backward();
        };
        for (int step = 0; step < 2; ++step) {
          add_up(ddp);
          add_up(expected);
          plain.step();
          // Gradients stay until the program clears them.
          EXPECT_TRUE(ddp.parameters()[0].grad().defined());
          expect_same(ddp.parameters(), copies_of(expected.parameters()), "sum", kClose);
        }
      },
      {2});
}

/// Which collectives this rank has launched, in order, with their sizes.
std::string launched_by(const testing::Recorder& recorder) {
  std::string text;
  for (const auto& event : recorder.events("launch")) {
    if (event.kind == "all_reduce" || event.kind == "broadcast") {
      text += event.kind + " " + std::to_string(event.bytes) + "\n";
    }
  }
  return text;
}

std::string broadcasts_in(const std::string& launched) {
  std::istringstream lines(launched);
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("broadcast")) text += line + "\n";
  }
  return text;
}

/// Bucket by bucket, by ascending rank.
std::string parts_in_order(const OverlapInfo& info) {
  std::string text;
  for (std::size_t bucket = 0; bucket < info.params_per_bucket.size(); ++bucket) {
    for (const auto& of_rank : info.assignments_per_rank) {
      const auto part = of_rank.find(bucket);
      if (part != of_rank.end()) text += "broadcast " + std::to_string(4 * part->second.numel()) + "\n";
    }
  }
  return text;
}

// ZERO-57, ZERO-62
TEST(ZeroOverlapOrder, IsTheSameOnAllRanks) {
  on_ranks(
      [](const World& world) {
        for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
          for (const bool searches : {false, true}) {
            DistributedDataParallel ddp(mlp(kSizes), world.group(),
                                        {.bucket_cap_mb = 0.002, .find_unused_parameters = searches});
            Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
            ddp.register_comm_hook(hook_of(form, ddp, zero, true));
            for (int step = 0; step < 3; ++step) train_once(ddp, world, step);
            std::string mine;
            {
              const testing::Recorder recorder;
              train_once(ddp, world, 3);
              mine = launched_by(recorder);
            }
            for (const auto& theirs : all_gather_object(mine, world.group())) EXPECT_EQ(theirs, mine);
            const auto is_interleaved = mine.find("broadcast") < mine.rfind("all_reduce");
            EXPECT_EQ(is_interleaved, form == Form::kInterleaved && !searches) << mine;
            std::size_t broadcasts = 0;
            for (auto at = mine.find("broadcast"); at != std::string::npos; at = mine.find("broadcast", at + 1)) {
              ++broadcasts;
            }
            EXPECT_EQ(broadcasts, zero.overlap_info().num_bucket_assignments);
            EXPECT_EQ(broadcasts_in(mine), parts_in_order(zero.overlap_info()));
          }
        }
      },
      {2, 3, 4});
}

/// The whole state on all ranks' rank 0, of an optimizer that has stepped in three backwards.
template <class Optimizer, class Options>
void expect_state_of_plain(const World& world, const Options& options) {
  DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
  ZeroRedundancyOptimizer<Optimizer> zero(ddp.parameters(), options, overlapped(world.group()));
  ddp.register_comm_hook(hook_of(Form::kInterleaved, ddp, zero, true));
  DistributedDataParallel expected(mlp(kSizes), world.group());
  Optimizer plain(expected.parameters(), options);
  const auto train = [&](int step) {
    train_once(ddp, world, step);
    if (step < 2) return;
    train_once(expected, world, step);
    plain.step();
  };
  for (int step = 0; step < 5; ++step) train(step);

  for (int rank = 0; rank < world.world_size(); ++rank) zero.consolidate_state_dict(rank);
  const int last = world.world_size() - 1;
  if (world.rank() == last) expect_same_state(zero.state_dict(), state_dict_of(plain), {1e-4});
  EXPECT_GT(zero.memory_report().state, 0);

  // The state of the plain one at another learning rate takes the place of this one's.
  auto whole = state_dict_of(plain);
  for (auto& [index, values] : whole.state) {
    for (auto& [name, value] : values) {
      if (value.isTensor()) value = value.toTensor().clone().mul_(0.5);
    }
  }
  zero.load_state_dict(whole);
  load_state_dict(plain, whole);
  zero.param_groups()[0].options().set_lr(0.05);
  plain.param_groups()[0].options().set_lr(0.05);
  for (int step = 5; step < 7; ++step) train(step);
  expect_same(ddp.parameters(), copies_of(expected.parameters()), "after loading", {1e-4});

  auto wrong = whole;
  for (auto& [index, values] : wrong.state) values["unheard_of"] = at::ones({1});
  const auto before = zero.memory_report().state;
  if (!zero.overlap_info().params_per_rank[world.rank()].empty()) {
    expect_error([&] { zero.load_state_dict(wrong); }, {"unheard_of"});
  }
  EXPECT_EQ(zero.memory_report().state, before);
  for (int step = 7; step < 9; ++step) train(step);
  expect_same(ddp.parameters(), copies_of(expected.parameters()), "after a refused load", {1e-4});
}

// ZERO-35, ZERO-37, ZERO-38, ZERO-40: with overlap
TEST(ZeroOverlapState, IsThatOfThePlainOptimizer) {
  on_ranks(
      [](const World& world) {
        expect_state_of_plain<SGD>(world, sgd());
        expect_state_of_plain<AdamW>(world, AdamWOptions(0.01));
      },
      {1, 2, 3}, {"threads", "gloo"});
}

// ZERO-70: with overlap
TEST(ZeroOverlapState, IsWrittenToFilesAndRead) {
  const testing::TempDir folder;
  on_ranks(
      [&](const World& world) {
        const auto path = folder.path() + "/state" + std::to_string(world.world_size());
        std::vector<at::Tensor> wanted;
        for (const bool loads : {false, true}) {
          DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
          Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero, loads));
          for (int step = 0; step < 5; ++step) train_once(ddp, world, step);
          if (!loads) {
            save_sharded(zero, path);
            for (int step = 5; step < 7; ++step) train_once(ddp, world, step);
            wanted = copies_of(ddp.parameters());
            continue;
          }
          load_sharded(zero, path);
          for (int step = 5; step < 7; ++step) train_once(ddp, world, step);
          expect_same(ddp.parameters(), wanted, "loaded", kClose);
        }
      },
      {1, 3}, {"threads"});
}

// JOIN-48
TEST(ZeroOverlapJoin, StepsOnJoinedRanksThroughDdpsHook) {
  on_ranks([](const World& world) {
    for (const auto form : {Form::kAfterLast, Form::kInterleaved}) {
      for (const bool searches : {false, true}) {
        DistributedDataParallel ddp(mlp(kSizes), world.group(),
                                    {.bucket_cap_mb = 0.002, .find_unused_parameters = searches});
        Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
        ddp.register_comm_hook(hook_of(form, ddp, zero, true));
        const int warm_up = searches ? 0 : 2;
        const int inputs = 3 + world.rank();
        const auto report = ddp.join().run([&] {
          for (int step = 0; step < inputs; ++step) train_once(ddp, world, step);
        });
        EXPECT_EQ(report.mirrored_iterations, world.world_size() - 1 - world.rank());

        // Ranks without inputs count as zeros.
        DistributedDataParallel expected(mlp(kSizes), world.group());
        SGD plain(expected.parameters(), sgd());
        for (int step = warm_up; step < 3 + world.world_size() - 1; ++step) {
          zero_grads(expected);
          const auto loss = expected(my_rows(random_batch(kRows, kSizes[0], 100 + step), world)).pow(2).mean();
          (loss * (step < inputs ? 1 : 0)).backward();
          plain.step();
        }
        expect_same(ddp.parameters(), copies_of(expected.parameters()), "joined", kClose);
      }
    }
  });
}

// JOIN-48
TEST(ZeroOverlapJoin, WarnsIfTheOptimizerIsListedTooAndDoesTheSame) {
  on_ranks(
      [](const World& world) {
        std::vector<at::Tensor> wanted;
        std::size_t launches = 0;
        for (const bool lists_optimizer : {false, true}) {
          DistributedDataParallel ddp(mlp(kSizes), world.group(), small_buckets());
          Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
          ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
          Warnings warnings;
          const testing::Recorder recorder;
          std::vector<Joinable*> joinables = {&ddp};
          if (lists_optimizer) joinables.push_back(&zero);
          Join(joinables).run([&] {
            for (int step = 0; step < 3 + world.rank(); ++step) train_once(ddp, world, step);
          });
          EXPECT_EQ(warnings.count("the scope needs DDP only"), lists_optimizer ? 1 : 0);
          if (!lists_optimizer) {
            wanted = copies_of(ddp.parameters());
            launches = recorder.events("launch").size();
          }
          expect_same(ddp.parameters(), wanted);
          EXPECT_EQ(recorder.events("launch").size(), launches);
        }
      },
      {2, 3}, {"threads"});
}

// ZERO-65
TEST(ZeroOverlapLog, SaysWhoStepsHowMuch) {
  c10d::setDebugLevel(c10d::DebugLevel::Info);
  const int usual = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = 0;
  ::testing::internal::CaptureStderr();
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    DistributedDataParallel ddp(mlp({4, 4}), world.group());
    Zero zero(ddp.parameters(), sgd(), overlapped(world.group()));
    ddp.register_comm_hook(hook_of(Form::kAfterLast, ddp, zero));
    for (int step = 0; step < 3; ++step) train_once(ddp, world, step, 4);
  });
  const auto text = ::testing::internal::GetCapturedStderr();
  FLAGS_caffe2_log_level = usual;
  c10d::setDebugLevel(c10d::DebugLevel::Off);
  EXPECT_NE(text.find("rank 0 of 2 steps 20 elements of parameters in 1 buckets"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 of 2 steps 0 elements of parameters in 0 buckets"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 0 of 2: DDP has 1 buckets, in 1 assignments"), std::string::npos) << text;
  EXPECT_EQ(text.find("rank 1 of 2: DDP has"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
