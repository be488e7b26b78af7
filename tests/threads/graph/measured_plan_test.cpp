#include "lockstep/ddp/measured_plan.h"

#include <torch/torch.h>

#include "lockstep/ddp/distributed_data_parallel.h"
#include "lockstep/graph/compiled.h"
#include "lockstep/testing/gtest.h"

namespace lockstep::measured_plan_threads_test {
namespace {

torch::nn::Sequential net() {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Linear(16, 16));
    model->push_back(torch::nn::Tanh());
  }
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(0.1);
  return model;
}

}  // namespace

TEST(MeasuredPlan, IsTheSameOnAllRanksAndTrainsAsAnyOther) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    const auto x = torch::full({4, 16}, world.rank() + 1.0);
    model->parameters()[0].mutable_grad() = torch::ones({16, 16});
    int steps = 0;
    const auto measured = measure_plan(*model, world.group(),
                                       [&] {
                                         model->forward(x).pow(2).mean().backward();
                                         ++steps;
                                       },
                                       {.steps = 3});
    EXPECT_EQ(steps, (2 + 3) + 2 * (1 + 3) * 2) << "to warm up and measured: alone, and twice with either plan";
    EXPECT_TRUE(at::equal(model->parameters()[0].grad(), torch::ones({16, 16}))) << "what was there before";
    EXPECT_FALSE(model->parameters()[1].grad().defined());
    model->zero_grad();
    EXPECT_EQ(measured.ready_ms.size(), 8);
    // The last layer's gradients come first.
    EXPECT_LE(measured.ready_ms[6], measured.ready_ms[0]);
    EXPECT_LE(measured.end_ms, measured.default_end_ms + 1e-9);
    ASSERT_TRUE(measured.tried_ms && measured.default_tried_ms);
    const auto text = measured.to_string(0.5);
    for (const auto* const words :
         {"with the default caps", "steps tried", "% predicted, 50 % measured", "begins ms"}) {
      EXPECT_NE(text.find(words), std::string::npos) << text;
    }
    EXPECT_GE(measured.overlap_share(), 0);
    EXPECT_LE(measured.overlap_share(), 1);
    // The same for all: the constructor compares it.
    DistributedDataParallel<torch::nn::Sequential> ddp(
        model, DdpOptions{.process_group = world.group(), .bucket_plan = measured.plan.save()});
    DistributedDataParallel<torch::nn::Sequential> reference(net(), DdpOptions{.process_group = world.group()});
    const auto compiler = compile(ddp);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      reference.zero_grad();
      ddp(x).pow(2).mean().backward();
      reference(x).pow(2).mean().backward();
      for (std::size_t i = 0; i < 8; ++i) {
        EXPECT_TRUE(at::allclose(ddp.parameters()[i].grad(), reference.parameters()[i].grad())) << i;
      }
    }
    EXPECT_EQ(ddp.bucket_plan(), measured.plan);
    EXPECT_LE(compiler->program().parts().size(), measured.plan.buckets().size());
  });
}

TEST(MeasuredPlan, TriesNothingIfGradientsAreMissingAndPutsThemBackAnyway) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    const auto kept = torch::ones({16, 16});
    model->parameters()[0].mutable_grad() = kept;
    // On one rank only: both must come to the same plan.
    const auto measured = measure_plan(
        *model, world.group(),
        [&] {
          const auto x = torch::ones({2, 16});
          (world.rank() == 0 ? model[0]->as<torch::nn::Linear>()->forward(x) : model->forward(x)).sum().backward();
        },
        {.steps = 2});
    EXPECT_FALSE(measured.tried_ms);
    EXPECT_TRUE(model->parameters()[0].grad().is_same(kept));
    const auto without =
        measure_plan(*model, world.group(), [&] { model->forward(torch::ones({2, 16})).sum().backward(); },
                     {.steps = 1, .params_and_buffers_to_ignore = {"0.weight"}});
    EXPECT_EQ(without.plan.parameters().size(), 7);
    testing::expect_error(
        [&] { measure_plan(*model, world.group(), [] { throw std::runtime_error("no data"); }, {.steps = 2}); },
        {"no data"});
    testing::expect_error([&] { measure_plan(*model, world.group(), nullptr); }, {"measure_plan", "there is no step"});
    testing::expect_error([&] { measure_plan(*model, nullptr, [] {}); }, {"measure_plan", "the group is null"});
    EXPECT_TRUE(model->parameters()[0].grad().is_same(kept));
  });
}

// GRAPH-39
TEST(MeasuredPlan, SaysWhereCompiledModulesAreCut) {
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    auto model = net();
    std::vector<ParameterInfo> infos;
    for (const auto& item : model->named_parameters()) infos.push_back(info_of(item.key(), item.value()));
    // One layer, then two, then one: by no cap.
    const BucketPlan plan(infos, {{.parameters = {7, 6}}, {.parameters = {5, 4, 3, 2}}, {.parameters = {1, 0}}});
    DistributedDataParallel<torch::nn::Sequential> ddp(
        model, DdpOptions{.process_group = world.group(), .bucket_plan = plan.save()});
    const auto compiler = compile(ddp);
    ddp(torch::ones({2, 16})).sum().backward();
    ASSERT_EQ(compiler->program().buckets().size(), 3);
    EXPECT_EQ(compiler->program().buckets()[1].names,
              (std::vector<std::string>{"2.weight", "2.bias", "4.weight", "4.bias"}));
    EXPECT_EQ(compiler->program().buckets()[2].names, (std::vector<std::string>{"6.weight", "6.bias"}));
  });
}

}  // namespace lockstep::measured_plan_threads_test
