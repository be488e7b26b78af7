// Join scopes with a ZeroRedundancyOptimizer in them.
#include <torch/optim/schedulers/step_lr.h>

#include "lockstep/join/join.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/ddp_models.h"
#include "tests/support/join_fixtures.h"
#include "tests/support/zero_fixtures.h"

namespace lockstep {
namespace {

using namespace zero_fixtures;
using join_fixtures::AllReducer;
using testing::expect_error;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Zero = ZeroRedundancyOptimizer<SGD>;

/// Sets the gradients an iteration shall have, on live ranks and on joined ones.
class Replay : public Joinable {
 public:
  Replay(const std::vector<at::Tensor>& parameters, GroupPtr group)
      : parameters_(parameters), group_(std::move(group)) {}

  void operator()() {
    Join::notify(*this);
    set();
  }
  void rewind() { next_ = 0; }

  /// By iteration; if there are none, they are made up.
  std::vector<std::vector<at::Tensor>> gradients;

  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    struct Hook : JoinHook {
      explicit Hook(Replay& owner) : owner(owner) {}
      void main_hook() override { owner.set(); }
      Replay& owner;
    };
    return std::make_unique<Hook>(*this);
  }
  c10::Device join_device() const override { return at::kCPU; }
  GroupPtr join_process_group() const override { return group_; }
  std::string join_name() const override { return "replay"; }

 private:
  void set() {
    if (gradients.empty()) return set_gradients(parameters_, next_++);
    const auto& now = gradients[next_++];
    for (std::size_t i = 0; i < now.size(); ++i) parameters_[i].mutable_grad() = now[i].clone();
  }

  const std::vector<at::Tensor>& parameters_;
  const GroupPtr group_;
  uint64_t next_ = 0;
};

// JOIN-44, JOIN-45
TEST(ZeroJoin, StepsOnJoinedRanksFromTheGradientsThatAreThere) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {6}});
      const auto expected = copies_of(parameters);
      SGD plain(expected, SGDOptions(0.1).momentum(0.9));
      Zero optimizer(parameters, SGDOptions(0.1).momentum(0.9), zero);
      Replay replay(parameters, world.group());
      EXPECT_EQ(optimizer.join_process_group(), world.group());
      EXPECT_EQ(optimizer.join_device(), c10::Device(at::kCPU));
      const int longest = 3 + world.world_size() - 1;
      for (int epoch = 0; epoch < 2; ++epoch) {
        replay.rewind();
        std::vector<std::vector<at::Tensor>> wanted;
        for (int i = 0; i < longest; ++i) {
          set_gradients(expected, i);
          plain.step();
          wanted.push_back(copies_of(expected));
        }
        const auto report = Join({&replay, &optimizer}).run([&] {
          for (int i = 0; i < 3 + world.rank(); ++i) {
            replay();
            optimizer.step();
            expect_same(parameters, wanted[i], name);
          }
        });
        EXPECT_EQ(report.mirrored_iterations, world.world_size() - 1 - world.rank());
        expect_same(parameters, expected, name);
      }
    }
  });
}

// JOIN-45: the gradients are those of a training with DDP
TEST(ZeroJoin, RepeatsATrainingWithDdpFromItsGradients) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          auto model = ddp_models::mlp({4, 6, 3});
          const auto parameters = copies_of(model->parameters());
          DistributedDataParallel ddp(model, world.group());
          SGD plain(model->parameters(), SGDOptions(0.1).momentum(0.9));
          Zero optimizer(parameters, SGDOptions(0.1).momentum(0.9), zero);
          Replay replay(parameters, world.group());
          for (int epoch = 0; epoch < 2; ++epoch) {
            replay.gradients.clear();
            std::vector<std::vector<at::Tensor>> wanted;
            for (int i = 0; i < 3 + world.world_size() - 1; ++i) {
              plain.zero_grad();
              ddp(ddp_models::random_batch(2, 4, 100 * epoch + 10 * i + world.rank())).pow(2).mean().backward();
              replay.gradients.push_back(ddp_models::gradients_of(*model));
              plain.step();
              wanted.push_back(copies_of(model->parameters()));
            }
            replay.rewind();
            Join({&replay, &optimizer}).run([&] {
              for (int i = 0; i < 3 + world.rank(); ++i) {
                replay();
                optimizer.step();
                expect_same(parameters, wanted[i], name);
              }
            });
            expect_same(parameters, wanted.back(), name);
          }
        }
      },
      {2, 3, 4}, {"threads", "gloo"});
}

// JOIN-46
TEST(ZeroJoin, WorksAloneAndAsTheFirst) {
  on_ranks([](const World& world) {
    for (const auto& [name, zero] : ways(world.group())) {
      const auto parameters = parameters_of({{4, 3}, {5}, {6}});
      const auto expected = copies_of(parameters);
      SGD plain(expected, 0.1);
      Zero optimizer(parameters, {0.1}, zero);
      AllReducer reducer(world.group());
      set_gradients(parameters, 1);
      set_gradients(expected, 1);
      Join({&optimizer}).run([&] {
        for (int i = 0; i < 2 + world.rank(); ++i) optimizer.step();
      });
      Join({&optimizer, &reducer}).run([&] {
        for (int i = 0; i < 2 + world.rank(); ++i) {
          optimizer.step();
          reducer();
        }
      });
      for (int i = 0; i < 2 * (2 + world.world_size() - 1); ++i) plain.step();
      expect_same(parameters, expected, name);
    }
  });
}

// JOIN-44, JOIN-46
TEST(ZeroJoin, TakesNoControlMessageWhileItMirrors) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{4, 3}, {5}, {6}});
        Zero optimizer(parameters, {0.1}, world.group());
        set_gradients(parameters, 1);
        const testing::Recorder recorder;
        Join({&optimizer}).run([&] {
          for (int i = 0; i < 2 + world.rank(); ++i) optimizer.step();
        });
        // Every iteration: its message and one all-gather; and the message that finds nobody live. In the first one
        // ranks compare what they list.
        const auto iterations = static_cast<std::size_t>(2 + world.world_size() - 1);
        EXPECT_EQ(recorder.events("launch").size(), 2 * iterations + 2);
      },
      {2, 3});
}

// JOIN-44
TEST(ZeroJoin, MustComeAfterDdpInAList) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{4, 3}});
        Zero optimizer(parameters, {0.1}, world.group());
        AllReducer like_ddp(world.group(), "ddp");
        like_ddp.phase = JoinPhase::kGradients;
        expect_error([&] { Join({&optimizer, &like_ddp}); }, {"'zero'", "'ddp'"});
        Join({&like_ddp, &optimizer}).run([] {});
      },
      {2});
}

// JOIN-55
TEST(ZeroJoin, FollowsAScheduleOnJoinedRanksIfAskedTo) {
  on_ranks(
      [](const World& world) {
        const auto parameters = parameters_of({{4, 3}, {5}, {6}});
        const auto expected = copies_of(parameters);
        SGD plain(expected, 0.4);
        torch::optim::StepLR plain_schedule(plain, 1, 0.5);
        Zero optimizer(parameters, {0.4}, world.group());
        torch::optim::StepLR schedule(optimizer, 1, 0.5);
        set_gradients(parameters, 1);
        set_gradients(expected, 1);
        Join({&optimizer}, {.on_mirrored_step = [&] { schedule.step(); }}).run([&] {
          for (int i = 0; i < 2 + world.rank(); ++i) {
            optimizer.step();
            schedule.step();
          }
        });
        for (int i = 0; i < 2 + world.world_size() - 1; ++i) {
          plain.step();
          plain_schedule.step();
        }
        expect_same(parameters, expected);
      },
      {2, 3});
}

struct TwoNumbersImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return (one + two) * input; }
  at::Tensor one = register_parameter("one", at::ones({1}));
  at::Tensor two = register_parameter("two", at::ones({1}));
};
TORCH_MODULE(TwoNumbers);

// JOIN-47
TEST(ZeroJoin, UsesTheGradientsThatDdpReducedWithoutThisRank) {
  on_ranks(
      [](const World& world) {
        for (const auto& [name, zero] : ways(world.group())) {
          for (const bool as_view : {false, true}) {
            TwoNumbers model;
            DistributedDataParallel ddp(model,
                                        DdpOptions{.process_group = world.group(), .gradient_as_bucket_view = as_view});
            Zero optimizer(model->parameters(), {0.1}, zero);
            const std::vector<double> inputs =
                world.rank() == 0 ? std::vector<double>{1} : std::vector<double>{1, 10, 100};
            Join({&ddp, &optimizer}).run([&] {
              for (const auto input : inputs) {
                optimizer.zero_grad();
                ddp(at::full({1}, input)).sum().backward();
                optimizer.step();
              }
            });
            EXPECT_FLOAT_EQ(model->one.item<float>(), -4.6F) << name;
            EXPECT_FLOAT_EQ(model->two.item<float>(), -4.6F) << name;
          }
        }
      },
      {2});
}

// JOIN-44, JOIN-55: joined ranks step when the others do, with clipped gradients and the same learning rate.
TEST(ZeroJoin, FollowsAccumulationEvaluationClippingAndSchedules) {
  on_ranks(
      [](const World& world) {
        const std::vector<int64_t> sizes = {5, 8, 3};
        const int most = 2 + 2 * (world.world_size() - 1);
        const auto loss_of = [&](auto& ddp, int seed) {
          return ddp(ddp_models::random_batch(4, 5, 10 * seed + world.rank())).pow(2).mean();
        };
        // `factor` 0: a rank without inputs, where there is no scope.
        const auto iterate = [&](auto& ddp, auto& optimizer, auto& schedule, int i, double factor, const auto& clip) {
          optimizer.zero_grad();
          {
            const auto local = ddp.no_sync();
            (loss_of(ddp, 2 * i) * factor).backward();
          }
          (loss_of(ddp, 2 * i + 1) * factor).backward();
          clip();
          optimizer.step();
          schedule.step();
          const at::NoGradGuard no_grad;
          loss_of(ddp, i);
        };
        DistributedDataParallel plain_ddp(ddp_models::mlp(sizes), world.group());
        SGD plain(plain_ddp.parameters(), SGDOptions(0.4).momentum(0.9));
        torch::optim::StepLR plain_schedule(plain, 1, 0.7);
        for (int i = 0; i < most; ++i) {
          iterate(plain_ddp, plain, plain_schedule, i, i < 2 + 2 * world.rank() ? 1 : 0,
                  [&] { clip_grad_norm_(plain_ddp.parameters(), 0.1); });
        }
        for (const auto stage : {ZeroStage::kReplicated, ZeroStage::kState, ZeroStage::kGradients}) {
          DistributedDataParallel ddp(ddp_models::mlp(sizes), world.group());
          Zero optimizer(ddp.parameters(), SGDOptions(0.4).momentum(0.9), {.stage = stage, .ddp = ddp});
          torch::optim::StepLR schedule(optimizer, 1, 0.7);
          const auto clip = [&] { optimizer.clip_grad_norm_(0.1); };
          Join({&ddp, &optimizer}, {.before_mirrored_step = clip, .on_mirrored_step = [&] { schedule.step(); }})
              .run([&] {
                for (int i = 0; i < 2 + 2 * world.rank(); ++i) iterate(ddp, optimizer, schedule, i, 1, clip);
              });
          expect_same(ddp.parameters(), plain_ddp.parameters(), "stage " + std::to_string(static_cast<int>(stage)),
                      {1e-5});
          // And the state, which post hooks do not bring into line.
          optimizer.consolidate_state_dict();
          if (world.rank() == 0) expect_same_state(optimizer.state_dict(), state_dict_of(plain), {1e-5});
        }
      },
      {2, 3});
}

// JOIN-55
TEST(ZeroJoin, RefusesClippingThatJoinedRanksWouldNotDo) {
  on_ranks(
      [](const World& world) {
        DistributedDataParallel ddp(ddp_models::mlp({5, 3}), world.group());
        Zero optimizer(ddp.parameters(), {0.1}, world.group());
        Join({&ddp, &optimizer}).run([&] {
          ddp(ddp_models::random_batch(4, 5, 1)).sum().backward();
          expect_error([&] { optimizer.clip_grad_norm_(1); }, {"before_mirrored_step"});
          optimizer.step();
        });
        optimizer.clip_grad_norm_(1);
      },
      {2});
}

/// Steps after every second backward, and an evaluation in between, with different numbers of inputs. Another joinable
/// stands first, if there is one.
std::vector<at::Tensor> train_uneven(const World& world, AllReducer* first) {
  DistributedDataParallel ddp(ddp_models::mlp({4, 3, 2}), world.group(), {.bucket_cap_mb = 0});
  Zero optimizer(ddp.parameters(), SGDOptions(0.1).momentum(0.9), world.group());
  const auto forward = [&](int i) {
    if (first != nullptr) (*first)();
    return ddp(ddp_models::random_batch(2, 4, 10 * i + world.rank()));
  };
  int steps_before = 0;
  std::vector<Joinable*> joinables = {&ddp, &optimizer};
  if (first != nullptr) joinables.insert(joinables.begin(), first);
  const auto report = Join(joinables, {.before_mirrored_step = [&] { ++steps_before; }}).run([&] {
    for (int i = 0; i < 2 + world.rank(); ++i) {
      optimizer.zero_grad();
      {
        const auto local = ddp.no_sync();
        forward(2 * i).pow(2).mean().backward();
      }
      {
        const at::NoGradGuard no_grad;
        forward(100);
      }
      forward(2 * i + 1).pow(2).mean().backward();
      optimizer.step();
    }
  });
  // Of the three iterations around a step one has it.
  EXPECT_EQ(report.mirrored_iterations, 3 * (world.world_size() - 1 - world.rank()));
  EXPECT_EQ(3 * steps_before, report.mirrored_iterations);
  std::vector<at::Tensor> trained;
  for (const auto& parameter : ddp.parameters()) trained.push_back(parameter.detach().clone());
  return trained;
}

// JOIN-44: whether there is a step is what DDP says of its backward, wherever it stands in the list.
LOCKSTEP_THREAD_TEST(ZeroJoin, HasAVoteForEachJoinable, 3) {
  const auto expected = train_uneven(world, nullptr);
  AllReducer user(world.group(), "user's");
  expect_same(train_uneven(world, &user), expected, "a joinable before DDP");
}

}  // namespace
}  // namespace lockstep
