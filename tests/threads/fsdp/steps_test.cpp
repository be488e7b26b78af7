// What units do, step by step: seen by a recorder, and delayed, replaced and failed by interposers.
#include "lockstep/base/str.h"
#include "lockstep/testing/interpose.h"
#include "tests/support/fsdp_models.h"

namespace lockstep::fsdp_steps_test {

using namespace fsdp_models;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::Recorder;

/// Of one unit, collectives by what they are for.
std::vector<std::string> kinds_of(const std::vector<Event>& events, const std::string& unit) {
  std::vector<std::string> kinds;
  for (const auto& event : events) {
    const bool is_collective = event.unit.ends_with("'" + unit + "'");
    if ((event.unit == unit || is_collective) && event.state != "done") kinds.push_back(event.kind);
  }
  return kinds;
}

Event find(const std::vector<Event>& events, const std::string& name) {
  for (const auto& event : events) {
    if (testing::is_named(event, name)) return event;
  }
  throw testing::CheckFailure("no event " + name);
}

// TEST-53: two replicas of two shards each, in low precision, so that nothing is left out.
LOCKSTEP_THREAD_TEST(FsdpSteps, AreRecordedWithAllThatConcernsThem, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
  auto model = net();
  auto root = sharded(model, {.mesh = mesh, .mp_policy = {.param_dtype = at::kBFloat16}});
  loss_of(model, world, 0).backward();
  Recorder recorder;
  loss_of(model, world, 1).backward();
  const auto events = recorder.events();
  EXPECT_EQ(kinds_of(events, "block1"),
            (std::vector<std::string>{
                "unshard", "gather_copy_in", "all_gather_into_tensor", "gather_copy_out", "reshard", "free",  // forward
                "unshard", "gather_copy_in", "all_gather_into_tensor",  // while block2 computes
                "pre_backward", "gather_copy_out", "post_backward_node", "post_backward", "reduce_scatter_tensor",
                "reshard", "free", "all_reduce", "hand_out", "finish_copies"}));
  const auto unshard = find(events, "unshard(block1)");
  EXPECT_EQ(unshard.state, "forward");
  EXPECT_EQ(unshard.dtype, "BFloat16");
  EXPECT_EQ(unshard.group_size, 4);
  const auto copy = find(events, "gather_copy_in(block1)");
  EXPECT_EQ(copy.bytes, unshard.bytes);
  EXPECT_EQ(copy.group_size, 2);
  // norm, up and down on two ranks, padded to 16 elements each: 8, 8, 98, 14, 98 (of 14 x 7 and 8 x 14), 8.
  EXPECT_EQ(copy.bytes, 2U * (16 + 16 + 112 + 16 + 112 + 16));
  const auto gather = find(events, "all_gather_into_tensor(gather of FSDP unit 'block1')");
  EXPECT_EQ(gather.group_size, 2);
  EXPECT_EQ(gather.dtype, "BFloat16");
  EXPECT_EQ(find(events, "post_backward(block1)").state, "backward");
  EXPECT_EQ(find(events, "all_reduce(gradients of FSDP unit 'block1')").group_size, 2);
  for (std::size_t i = 1; i < events.size(); ++i) EXPECT_EQ(events[i].order, events[i - 1].order + 1);
  recorder.clear();
  root.unshard();
  root.reshard();
  EXPECT_EQ(recorder.events().front().kind, "unshard");
  EXPECT_EQ(recorder.events().front().state, "idle");
  EXPECT_EQ(recorder.events().back().kind, "free");
}

// TEST-53
TEST(FsdpSteps, AreNotMadeIfNobodyLooks) {
  // Outside of the harness, which records the last events for its reports.
  EXPECT_FALSE(is_observed());
  int runs = 0;
  {
    const StepScope scope([&](const Event& /*step*/, const std::function<void()>& next) { next(); });
    EXPECT_TRUE(is_observed());
    run_step({.kind = "walk"}, [&] { ++runs; });
  }
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(is_observed());
}

/// Gradients of the shards after one step on all ranks' batches.
std::vector<at::Tensor> gradients_of_step(Net& model, const World& world, int step = 0) {
  for (const auto& shard : model->parameters()) shard.mutable_grad().reset();
  loss_of(model, world, step).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& shard : model->parameters()) gradients.push_back(shard.grad().clone());
  return gradients;
}

bool is_same(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); });
}

// TEST-55
LOCKSTEP_THREAD_TEST(FsdpSteps, AreDelayedWrappedAndReplaced, 2) {
  auto model = net();
  sharded(model, {.mesh = mesh_of(world)});
  const auto expected = gradients_of_step(model, world);
  for (const char* name : {"unshard", "gather_copy_out", "reshard", "free", "pre_backward", "post_backward_node",
                           "post_backward", "hand_out", "finish_copies"}) {
    const auto start = std::chrono::steady_clock::now();
    const auto late = testing::delay_steps(name, std::chrono::milliseconds(1 + world.rank()));
    EXPECT_TRUE(is_same(gradients_of_step(model, world), expected)) << name;
    EXPECT_GE(std::chrono::steady_clock::now() - start, 3ms) << name;
  }
  // The inner scope first, each around what is left; of one unit only.
  std::vector<std::string> order;
  const auto note = [&](const std::string& who) {
    return testing::replace_steps("unshard(block1)", [&order, who](const Event& /*step*/, const auto& next) {
      order.push_back(who);
      next();
      order.push_back("/" + who);
    });
  };
  {
    const auto outer = note("outer");
    const auto inner = note("inner");
    const at::NoGradGuard no_grad;
    loss_of(model, world, 0);
  }
  EXPECT_EQ(order, (std::vector<std::string>{"inner", "outer", "/outer", "/inner"}));
  {
    // Gradients of one unit are handed out doubled.
    const auto doubled = testing::replace_steps("hand_out(block1)", [&](const Event& /*step*/, const auto& next) {
      next();
      model->named_parameters()["block1.up.weight"].mutable_grad().mul_(2);
    });
    EXPECT_FALSE(is_same(gradients_of_step(model, world), expected));
  }
  {
    // As if the library had forgotten to.
    const auto forgets = testing::drop_steps("free(block1)");
    gradients_of_step(model, world);
    EXPECT_GT(model->blocks[1]->up->weight.storage().nbytes(), 0U);
    EXPECT_EQ(model->blocks[0]->up->weight.storage().nbytes(), 0U);
  }
  EXPECT_TRUE(is_same(gradients_of_step(model, world), expected));
  EXPECT_EQ(model->blocks[1]->up->weight.storage().nbytes(), 0U);
}

// TEST-55
TEST(FsdpSteps, ThatFailOnOneRankFailOnAll) {
  // The third unit is freed behind its last operator, which cannot throw.
  const std::vector<std::pair<std::string, std::size_t>> failures{
      {"unshard", 0}, {"reshard", 2}, {"pre_backward", 1}, {"post_backward", 1}};
  for (const auto& [name, nth] : failures) {
    SCOPED_TRACE(str(name, " ", nth));
    testing::run_threads_in_gtest({.world_size = 2, .collective_timeout = 20s}, [&](const World& world) {
      auto model = net();
      sharded(model, {.mesh = mesh_of(world)});
      gradients_of_step(model, world);
      const auto failing =
          world.rank() == 0 ? testing::fail_step(name, nth, "it fell over") : testing::delay_steps(name, 0ms);
      std::string message = "nothing";
      try {
        // A rank that has its part behind it fails in the next step.
        for (int step = 0; step < 2; ++step) gradients_of_step(model, world);
      } catch (const std::exception& error) {
        message = error.what();
      }
      EXPECT_THAT(message, HasSubstr("it fell over"));
    });
  }
}

// TEST-55
LOCKSTEP_THREAD_TEST(FsdpSteps, ThatAreLeftOutAreNoticedAndMadeUpFor, 2) {
  auto model = net();
  auto root = sharded(model, {.mesh = mesh_of(world)});
  const auto expected = gradients_of_step(model, world);
  {
    const auto forgets = testing::drop_steps("unshard(block1)");
    expect_error([&] { loss_of(model, world, 0); }, {"unit 'block1'", "its gather was left out"});
  }
  root.reset_iter_state();
  EXPECT_TRUE(is_same(gradients_of_step(model, world), expected));
}

/// Gradients that go to the host late: filled with NaN when they are handed out, and right once the library has waited
/// for them. `waits` as if it did.
void train_with_late_copies(const World& world, bool waits) {
  auto model = net();
  sharded(model, {.mesh = mesh_of(world), .offload_policy = CPUOffloadPolicy{.pin_memory = false}});
  const auto expected = gradients_of_step(model, world);
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> on_their_way;  // by shard: what is there, what shall be
  const auto parameters = model->named_parameters();
  const auto late = testing::replace_steps("hand_out", [&](const Event& /*step*/, const auto& next) {
    next();
    for (const auto& item : parameters) {
      const auto& grad = item.value().grad();
      if (!grad.defined() || on_their_way.contains(item.key())) continue;
      on_their_way[item.key()] = {grad, grad.clone()};
      grad.fill_(NAN);
    }
  });
  const auto awaited = testing::replace_steps("finish_copies", [&](const Event& /*step*/, const auto& next) {
    if (!waits) return;
    next();
    for (auto& [name, copy] : on_their_way) copy.first.copy_(copy.second);
  });
  const auto gradients = gradients_of_step(model, world);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    testing::check_equal(str("gradient ", i), gradients[i], expected[i]);
  }
}

// FSDP-58, TEST-60: on a GPU the copies are real, see FsdpOnGpu.
TEST(FsdpSteps, GradientsOnTheirWayToTheHostAreAwaited) {
  const auto report_of = [](bool waits) {
    return testing::run_threads({.world_size = 2}, [&](const World& world) { train_with_late_copies(world, waits); });
  };
  const auto good = report_of(true);
  EXPECT_TRUE(good.has_passed()) << good.describe();
  EXPECT_THAT(report_of(false).describe(), HasSubstr("gradient 0"));
}

}  // namespace lockstep::fsdp_steps_test
