// Compares model averagers and PostLocalSGDOptimizer with PyTorch's, over twenty steps: losses, parameters, steps.
#include "lockstep/base/str.h"
#include "tests/support/ddp_models.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using oracle::at_key;
using oracle::tensors_of;

const std::vector<int64_t> kAveragedSizes = {8, 24, 24, 5};
constexpr double kAveragedTolerance = 2e-6;

struct Averaging {
  std::string name;
  std::shared_ptr<ModelAverager> averager;
  /// Null: the averager is called by hand.
  std::function<std::shared_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> made_optimizer = nullptr;
  /// With it the model is in DDP.
  std::optional<CommHook> hook = std::nullopt;
};

std::shared_ptr<torch::optim::Optimizer> sgd(const std::vector<at::Tensor>& params) {
  return std::make_shared<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// The first parameter has a learning rate of its own.
std::shared_ptr<torch::optim::Optimizer> two_groups(const std::vector<at::Tensor>& params) {
  const std::vector<torch::optim::OptimizerParamGroup> groups = {
      {{params[0]}, optim::group_options(optim::AdamOptions{.lr = 0.02})},
      torch::optim::OptimizerParamGroup({params.begin() + 1, params.end()})};
  return std::make_shared<optim::Adam>(groups, optim::AdamOptions{.lr = 0.01});
}

std::vector<Averaging> averagings_of(const World& world) {
  if (world.world_size() == 4) {
    const HierarchicalModelAverager::PeriodGroupSizes sizes = {{2, 2}, {4, 4}};
    return {{"hierarchical", std::make_shared<HierarchicalModelAverager>(sizes, 3)},
            {"hierarchical_optimizer", std::make_shared<HierarchicalModelAverager>(sizes), sgd}};
  }
  const auto alone = new_subgroups(world.group(), {{0}, {1}});
  const auto hook = [](const PostLocalSGDOptions& options) {
    return post_local_sgd_hook(std::make_shared<PostLocalSGDState>(options));
  };
  return {
      {"periodic", std::make_shared<PeriodicModelAverager>(4, 3)},
      {"optimizer", std::make_shared<PeriodicModelAverager>(3), two_groups},
      {"hook_subgroup", std::make_shared<PeriodicModelAverager>(4, 5), sgd,
       hook({.subgroup = alone, .start_local_sgd_iter = 5})},
      {"hook_none", std::make_shared<PeriodicModelAverager>(3, 6), two_groups,
       hook({.start_local_sgd_iter = 6, .post_local_gradient_allreduce = false})},
  };
}

/// Saves all, forgets the step and loads; then halves the learning rates.
void interrupt(PostLocalSGDOptimizer& optimizer) {
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  optimizer.averager().set_step(0);
  optimizer.load(in);
  for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
}

void compare(const Averaging& subject, const c10::IValue& expected, const c10::IValue& saved, const World& world) {
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, subject.name);
  auto model = Mlp(kAveragedSizes);
  {
    const at::NoGradGuard no_grad;
    const auto weights = tensors_of(at_key(saved, "weights"));
    for (std::size_t i = 0; i < weights.size(); ++i) model->parameters()[i].copy_(weights[i]);
  }
  std::optional<DistributedDataParallel<Mlp>> ddp;
  if (subject.hook) {
    ddp.emplace(model, world.group());
    ddp->register_comm_hook(*subject.hook);
  }
  auto optimizer = (subject.made_optimizer ? subject.made_optimizer : sgd)(model->parameters());
  std::shared_ptr<PostLocalSGDOptimizer> averaging;
  if (subject.made_optimizer) {
    averaging = std::make_shared<PostLocalSGDOptimizer>(optimizer, subject.averager);
    optimizer = averaging;
  }
  const auto losses = tensors_of(at_key(expected, "losses"));
  const auto batches = at_key(saved, "batches").toList();
  for (std::size_t step = 0; step < losses.size(); ++step) {
    optimizer->zero_grad();
    const auto batch = tensors_of(batches.get(step))[world.rank()];
    const auto loss = (ddp ? (*ddp)(batch) : model->forward(batch)).pow(2).mean();
    EXPECT_TRUE(at::allclose(loss, losses[step], kAveragedTolerance, kAveragedTolerance)) << "step " << step;
    loss.backward();
    optimizer->step();
    if (!averaging) subject.averager->average_parameters(*model);
    if (averaging && step == losses.size() / 2) interrupt(*averaging);
  }
  expect_close(model->parameters(), tensors_of(at_key(expected, "parameters")), kAveragedTolerance);
  EXPECT_EQ(subject.averager->step(), at_key(expected, "step").toInt());
}

// DDP-73: twenty steps of PyTorch's averagers and PostLocalSGDOptimizer, alone and with the comm hook, saved and loaded
TEST(AveragingOracle, AgreesWithPyTorch) {
  const auto saved = oracle::run_reference("ddp/averaging_reference.py");
  if (saved.isNone()) {
    GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
  }
  for (const int world_size : {2, 4}) {
    for (const auto& backend : {"threads", "gloo"}) {
      testing::run_threads_in_gtest({.world_size = world_size, .backend = backend}, [&](const World& world) {
        const auto expected = at_key(at_key(saved, "cases"), std::to_string(world_size)).toGenericDict();
        const auto subjects = averagings_of(world);
        EXPECT_EQ(subjects.size(), expected.size());
        for (const auto& each : subjects) {
          compare(each, expected.at(each.name).toList().get(world.rank()), saved, world);
        }
      });
    }
  }
}

}  // namespace
}  // namespace lockstep
