// Model averaging: who averages in which step, what is averaged, and what is refused; alone and in an optimizer.
#include "lockstep/optim/average_parameters.h"
#include "lockstep/optim/grad_scaler.h"
#include "lockstep/optim/model_averager.h"
#include "lockstep/optim/optimizers.h"
#include "lockstep/optim/post_local_sgd_optimizer.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/zero/zero_redundancy_optimizer.h"
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using ddp_models::Warnings;
using testing::expect_error;

/// One value, with a gradient or without; each rank another one.
at::Tensor made_param(double value, double gradient = 0, at::IntArrayRef sizes = {3}) {
  auto param = at::full(sizes, value).requires_grad_();
  param.mutable_grad() = at::full(sizes, gradient);
  return param;
}

double value_of(const at::Tensor& param) {
  return param.detach().min().item<double>();
}

/// Whether the call has averaged a parameter that is this rank's number.
std::vector<bool> steps_that_average(ModelAverager& averager, const World& world, int steps) {
  std::vector<bool> averaged;
  for (int step = 0; step < steps; ++step) {
    EXPECT_EQ(averager.step(), step);
    const auto param = made_param(world.rank());
    averager.average_parameters(std::vector{param});
    averaged.push_back(value_of(param) != world.rank());
  }
  return averaged;
}

// DDP-73: the average is taken in the first step after the warm-up and in every period-th one from there
LOCKSTEP_THREAD_TEST(PeriodicModelAverager, AveragesEveryPeriodAfterTheWarmUp, 2) {
  PeriodicModelAverager averager(3, 2);
  // Ranks 0 and 1 meet at a half.
  EXPECT_EQ(steps_that_average(averager, world, 9),
            (std::vector<bool>{false, false, true, false, false, true, false, false, true}));
  PeriodicModelAverager at_once(2);
  EXPECT_EQ(steps_that_average(at_once, world, 4), (std::vector<bool>{true, false, true, false}));
}

// DDP-73: parameters, modules and groups of an optimizer; those without a gradient stay as they are
LOCKSTEP_THREAD_TEST(PeriodicModelAverager, TakesParametersModulesAndGroups, 3) {
  PeriodicModelAverager averager(2, 0, world.group());
  auto model = ddp_models::mlp({3, 4, 2}, static_cast<uint64_t>(world.rank()));
  model->layers[0]->forward(at::ones({1, 3})).sum().backward();
  const auto frozen = model->layers[1]->weight.detach().clone();
  averager.average_parameters(*model);
  check_same_on_all_ranks("the trained layer", str(model->layers[0]->weight.detach()), world.group());
  EXPECT_TRUE(at::equal(model->layers[1]->weight, frozen));

  averager.set_step(0);
  const auto first = made_param(world.rank());
  const auto second = made_param(10 * world.rank());
  torch::optim::SGD optimizer({torch::optim::OptimizerParamGroup({first}), torch::optim::OptimizerParamGroup({second})},
                              torch::optim::SGDOptions(0.1));
  averager.average_parameters(optimizer.param_groups());
  EXPECT_NEAR(value_of(first), 1, 1e-6);
  EXPECT_NEAR(value_of(second), 10, 1e-5);
}

// DDP-73: every dtype and layout in few collectives, the same bits on all ranks
LOCKSTEP_THREAD_TEST(AverageParameters, PacksDtypesAndStridesIntoFewBuckets, 3) {
  const double mine = world.rank();
  std::vector<at::Tensor> params;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexFloat}) {
    for (int64_t size : {0, 1, 5}) params.push_back(at::full({size, 2}, mine, dtype).requires_grad_());
  }
  // One that does not lie densely, one whose strides differ from rank to rank, a number.
  auto wide = at::zeros({4, 6});
  params.push_back(wide.narrow(1, 1, 3));
  params.back().fill_(mine);
  params.push_back(world.rank() == 0 ? at::arange(6.).view({2, 3}) : at::arange(6.).view({2, 3}).t().contiguous().t());
  params.push_back(at::full({}, mine));
  {
    const testing::Recorder recorder;
    average_parameters(params, world.group());
    int reductions = 0;
    for (const auto& event : recorder.events("launch")) reductions += event.kind == "all_reduce" ? 1 : 0;
    EXPECT_EQ(reductions, 4);
  }
  for (std::size_t i = 0; i + 2 < params.size(); ++i) {
    EXPECT_TRUE(at::allclose(params[i], at::ones_like(params[i]), 1e-2, 1e-2)) << i;
  }
  EXPECT_EQ(wide.sum().item<float>(), 12) << "what lies between was written";
  EXPECT_TRUE(at::allclose(params[params.size() - 2], at::arange(6.).view({2, 3})));
  EXPECT_TRUE(params[0].requires_grad() && params[0].is_leaf());
  std::string bits;
  for (const auto& param : params)
    bits += lockstep::str(param.is_complex() ? at::view_as_real(param.detach()) : param.detach());
  check_same_on_all_ranks("averages", bits, world.group());
}

// DDP-73: ranks that list something else, or are at another step, are told on all ranks, and nothing has changed
LOCKSTEP_THREAD_TEST(AverageParameters, RanksThatDisagreeAreTold, 2) {
  const auto first = made_param(world.rank());
  const auto second = made_param(world.rank());
  const auto both = std::vector{first, second};
  const auto one = std::vector{first};
  expect_error([&] { average_parameters(world.rank() == 0 ? both : one, world.group()); },
               {"number of parameters", "'2'", "'1'"});
  const auto other = made_param(0, 0, {4});
  expect_error([&] { average_parameters({world.rank() == 0 ? first : other}, world.group()); },
               {"parameter 0 to average", "[3]", "[4]"});
  // As many, of the same size, but not the same ones.
  (world.rank() == 0 ? first : second).mutable_grad() = at::Tensor();
  expect_error([&] { average_parameters_or_parameter_groups(both, world.group()); },
               {"positions of the parameters that have a gradient", "'1'", "'0'"});
  PeriodicModelAverager averager(2);
  averager.set_step(world.rank() == 0 ? 0 : 2);
  expect_error([&] { averager.average_parameters(std::vector{made_param(0)}); }, {"step", "'0'", "'2'"});
  EXPECT_EQ(averager.step(), world.rank() == 0 ? 0 : 2);
  EXPECT_EQ(value_of(first), world.rank());
  expect_error([&] { average_parameters({at::zeros({2}, at::kLong)}, world.group()); }, {"parameter 0", "Long"});
  expect_error([&] { average_parameters({first}, nullptr); }, {"group"});
  average_parameters({}, world.group());
}

// DDP-73: Python's errors and warnings, with the value
LOCKSTEP_THREAD_TEST(ModelAveragers, RefuseBadOptionsOnEveryRank, 4) {
  expect_error([] { PeriodicModelAverager(0); }, {"period must be a positive value", "0"});
  expect_error([] { PeriodicModelAverager(-3); }, {"-3"});
  expect_error([] { PeriodicModelAverager(2, -1); }, {"warmup_steps", "non-negative", "-1"});
  const auto refused = [](const HierarchicalModelAverager::PeriodGroupSizes& sizes,
                          const std::vector<std::string>& words, int64_t warmup_steps = 0) {
    expect_error([&] { HierarchicalModelAverager(sizes, warmup_steps); }, words);
  };
  refused({}, {"period_group_size_dict must not be empty"});
  refused({{0, 2}, {4, 4}}, {"minimum period", "positive", "0"});
  refused({{2, 2}, {4, 3}}, {"last value", "3", "size of process_group, 4"});
  refused({{4, 2}, {2, 4}}, {"increase", "2 comes after 4"});
  refused({{2, 0}, {4, 4}}, {"period 2, 0, must be positive"});
  refused({{2, 8}, {4, 4}}, {"period 2, 8, must not exceed", "4"});
  refused({{2, 3}, {4, 4}}, {"4, must be divisible", "period 2, 3"});
  refused({{2, 2}, {4, 4}}, {"warmup_steps", "-5"}, -5);
  const Warnings warnings;
  PeriodicModelAverager(1);
  HierarchicalModelAverager({{1, 4}});
  EXPECT_EQ(warnings.count("when period is 1"), 1);
  EXPECT_EQ(warnings.count("when the maximum period in period_group_size_dict is 1"), 1);
}

// DDP-73: small groups often, large ones seldom, at most one in a step
LOCKSTEP_THREAD_TEST(HierarchicalModelAverager, TheLargestPeriodThatDividesTheStepAverages, 4) {
  HierarchicalModelAverager averager({{2, 2}, {4, 4}}, 3);
  ASSERT_EQ(averager.period_process_groups().size(), 2U);
  EXPECT_EQ(averager.period_process_groups()[0].second->getSize(), 2);
  const double pair = world.rank() < 2 ? 0.5 : 2.5;
  const double mine = world.rank();
  const std::vector<double> wanted = {mine, mine, mine, mine, 1.5, mine, pair, mine, 1.5, mine};
  for (std::size_t step = 0; step < wanted.size(); ++step) {
    const auto param = made_param(mine);
    averager.average_parameters(std::vector{param});
    EXPECT_DOUBLE_EQ(value_of(param), wanted[step]) << "step " << step;
  }
}

/// A step of each rank's own: gradients of 1 on rank 0, of 2 on rank 1.
void train(torch::optim::Optimizer& optimizer, const World& world, int steps) {
  for (int step = 0; step < steps; ++step) {
    for (auto& group : optimizer.param_groups()) {
      for (auto& param : group.params()) param.mutable_grad() = at::full_like(param, world.rank() + 1);
    }
    optimizer.step();
  }
}

std::shared_ptr<PeriodicModelAverager> averager_of(int64_t period, int64_t warmup_steps = 0) {
  return std::make_shared<PeriodicModelAverager>(period, warmup_steps);
}

// DDP-73: local steps, and an average after those that the averager says
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, StepsLocallyAndAverages, 2) {
  const auto param = made_param(0);
  PostLocalSGDOptimizer optimizer(std::make_unique<torch::optim::SGD>(std::vector{param}, 1.0), averager_of(2, 1));
  const double mine = -(world.rank() + 1);
  std::vector<double> values;
  for (int step = 0; step < 4; ++step) {
    train(optimizer, world, 1);
    values.push_back(value_of(param));
  }
  EXPECT_EQ(values, (std::vector<double>{mine, -3, -3 + mine, -6}));
  EXPECT_EQ(optimizer.averager().step(), 4);
  optimizer.zero_grad();
  EXPECT_FALSE(param.grad().defined());
}

// DDP-73: schedulers and groups through the base class; whoever changes the optimizer inside is told
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, IsTheOneWhoseGroupsCount, 2) {
  const auto param = made_param(0);
  const auto inside = std::make_shared<optim::SGD>(std::vector{param}, optim::SGDOptions{.lr = 1.0});
  PostLocalSGDOptimizer optimizer(inside, averager_of(100, 100));
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  train(optimizer, world, 1);
  scheduler.step();  // libtorch's changes nothing the first time
  scheduler.step();
  train(optimizer, world, 1);
  EXPECT_DOUBLE_EQ(value_of(param), -1.5 * (world.rank() + 1));

  const auto added = made_param(0);
  const auto added_to_base = made_param(0);
  optimizer.add_param_group({{added}, optim::group_options(optim::SGDOptions{.lr = 2.0})});
  torch::optim::Optimizer& base = optimizer;
  base.add_param_group(torch::optim::OptimizerParamGroup({added_to_base}));
  train(optimizer, world, 1);
  EXPECT_DOUBLE_EQ(value_of(added), -2.0 * (world.rank() + 1));
  EXPECT_DOUBLE_EQ(value_of(added_to_base), -1.0 * (world.rank() + 1));

  torch::optim::StepLR of_inside(*inside, 1, 0.5);
  of_inside.step();
  of_inside.step();
  expect_error([&] { train(optimizer, world, 1); }, {"lr of the optimizer inside", "group 0", "schedulers"});
}

// DDP-73: what cannot be inside
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, RefusesWhatDividesItsWork, 2) {
  const auto param = made_param(0);
  const auto zero = std::make_shared<ZeroRedundancyOptimizer<torch::optim::SGD>>(
      std::vector{param}, torch::optim::SGDOptions(1.0), world.group());
  expect_error([&] { PostLocalSGDOptimizer(zero, averager_of(2)); }, {"divides its work"});
  expect_error([&] { PostLocalSGDOptimizer(nullptr, averager_of(2)); }, {"no optimizer"});
  const auto sgd = std::make_shared<torch::optim::SGD>(std::vector{param}, 1.0);
  expect_error([&] { PostLocalSGDOptimizer(sgd, nullptr); }, {"no averager"});
}

// DDP-73: a step that overflows on one rank is left out on all, or the others would wait for its parameters
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, RanksLeaveOutStepsTogether, 2) {
  const auto param = made_param(0, 1);
  PostLocalSGDOptimizer optimizer(std::make_unique<torch::optim::SGD>(std::vector{param}, 1.0), averager_of(2));
  GradScaler scaler({.device = at::kCPU});
  (void)scaler.scale(at::ones({}));
  if (world.rank() == 1) param.mutable_grad().fill_(std::numeric_limits<float>::infinity());
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(value_of(param), 0);
  EXPECT_EQ(optimizer.averager().step(), 0);
}

/// In memory: saved, and opened again.
torch::serialize::InputArchive saved(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  return in;
}

// DDP-73: state and step of the averager go on where they were; without a step there is Python's warning
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, SavesAndLoadsTheAveragersStep, 2) {
  const auto momentum = torch::optim::SGDOptions(0.5).momentum(0.9);
  const auto make = [&](const at::Tensor& param) {
    return PostLocalSGDOptimizer(std::make_unique<torch::optim::SGD>(std::vector{param}, momentum), averager_of(4, 3));
  };
  const auto param = made_param(0);
  auto optimizer = make(param);
  train(optimizer, world, 5);
  const auto copy = param.detach().clone().requires_grad_();
  auto again = make(copy);
  auto archive = saved(optimizer);
  again.load(archive);
  EXPECT_EQ(again.averager().step(), 5);
  // Through the base class, as the functions for checkpoints see it.
  const auto& base = static_cast<const torch::optim::Optimizer&>(again);
  EXPECT_EQ(base.state().size(), 1U);
  EXPECT_EQ(state_dict_of(base).state.size(), 1U);
  train(optimizer, world, 4);
  train(again, world, 4);
  EXPECT_TRUE(at::equal(param, copy));

  // Its archive is the inner optimizer's too, and the other way round.
  torch::optim::SGD plain(std::vector{made_param(0)}, momentum);
  auto opened = saved(optimizer);
  plain.load(opened);
  EXPECT_EQ(plain.state().size(), 1U);
  auto without_step = saved(plain);
  const Warnings warnings;
  again.load(without_step);
  EXPECT_EQ(warnings.count("does not contain a step counter for an averager. Setting step counter to 0"), 1);
  EXPECT_EQ(again.averager().step(), 0);
}

// DDP-73: an archive that does not fit is an error, and the optimizer goes on
LOCKSTEP_THREAD_TEST(PostLocalSGDOptimizer, ArchivesThatDoNotFitChangeNothing, 2) {
  const auto param = made_param(0);
  PostLocalSGDOptimizer optimizer(std::make_unique<optim::SGD>(std::vector{param}, optim::SGDOptions{.lr = 1.0}),
                                  averager_of(2));
  train(optimizer, world, 1);
  optim::SGD two_groups(
      {torch::optim::OptimizerParamGroup({made_param(0)}), torch::optim::OptimizerParamGroup({made_param(0)})},
      {.lr = 3.0});
  auto archive = saved(two_groups);
  expect_error([&] { optimizer.load(archive); }, {"2 parameter groups"});
  EXPECT_EQ(optimizer.averager().step(), 1);
  train(optimizer, world, 1);
  EXPECT_DOUBLE_EQ(value_of(param), -1.5 - (world.rank() + 1));
}

}  // namespace
}  // namespace lockstep
