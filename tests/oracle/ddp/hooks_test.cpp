// Compares the comm hooks with PyTorch's, gradient by gradient over five steps; PowerSGD with the same random numbers.
#include "lockstep/base/str.h"
#include "tests/support/ddp_models.h"
#include "tests/support/oracle_reference.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using oracle::at_key;
using oracle::tensors_of;

const std::vector<int64_t> kSizes = {8, 24, 24, 24, 5};
constexpr int kWorldSize = 2;

PowerSGDOptions power_sgd_options(int64_t rank = 1) {
  return {.matrix_approximation_rank = rank, .start_power_sgd_iter = 2, .min_compression_rate = 1, .random_seed = 3};
}

struct Case {
  std::string name;
  CommHook hook;
  double tolerance = 1e-6;
  /// For values that are cast or made bytes: how much a last bit's difference before may become after. Few have it.
  double step = 0;
  std::shared_ptr<PowerSGDState> state = nullptr;
};

std::vector<Case> cases_of(const World& world) {
  const auto alone = new_subgroups(world.group(), {{0}, {1}});
  const auto post_local = [](const PostLocalSGDOptions& options) {
    return post_local_sgd_hook(std::make_shared<PostLocalSGDState>(options));
  };
  std::vector<Case> cases = {
      {"allreduce", allreduce_hook()},
      {"fp16", fp16_compress_hook(), 1e-6, 1e-3},
      {"bf16", bf16_compress_hook(), 1e-6, 8e-3},
      {"noop", noop_hook()},
      {"fp16_wrapper", fp16_compress_wrapper(allreduce_hook()), 1e-6, 1e-3},
      {"per_tensor", quantization_per_tensor_hook(), 1e-6, 3e-3},
      {"per_channel", quantization_per_channel_hook(), 1e-6, 3e-3},
      {"post_local_subgroup", post_local({.subgroup = alone, .start_local_sgd_iter = 2})},
      {"post_local_none", post_local({.start_local_sgd_iter = 3, .post_local_gradient_allreduce = false})},
  };
  const auto add = [&](const std::string& name, CommHook (*hook)(const std::shared_ptr<PowerSGDState>&),
                       const PowerSGDOptions& options) {
    const auto state = std::make_shared<PowerSGDState>(options);
    cases.push_back({name, hook(state), 1e-5, 0, state});
  };
  add("power_sgd", power_sgd_hook, power_sgd_options());
  add("power_sgd_rank2", power_sgd_hook, power_sgd_options(2));
  add("power_sgd_rank4", power_sgd_hook, power_sgd_options(4));
  auto options = power_sgd_options();
  options.warm_start = false;
  add("power_sgd_cold", power_sgd_hook, options);
  options = power_sgd_options();
  options.use_error_feedback = false;
  add("power_sgd_forgetful", power_sgd_hook, options);
  options = power_sgd_options();
  options.orthogonalization_epsilon = 1e-2;
  add("power_sgd_epsilon", power_sgd_hook, options);
  options = power_sgd_options();
  options.min_compression_rate = 6;
  add("power_sgd_choosy", power_sgd_hook, options);
  options = power_sgd_options();
  options.batch_tensors_with_same_shape = true;
  add("power_sgd_stacked", power_sgd_hook, options);
  add("batched_power_sgd", batched_power_sgd_hook, power_sgd_options());
  options = power_sgd_options(2);
  options.warm_start = false;
  add("batched_power_sgd_rank2", batched_power_sgd_hook, options);
  return cases;
}

/// Almost all elements within the tolerance, and all within a step.
void expect_agreement(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                      const Case& subject) {
  if (subject.step == 0) return expect_close(actual, expected, subject.tolerance);
  expect_close(actual, expected, subject.step);
  int64_t elements = 0;
  int64_t apart = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    elements += actual[i].numel();
    apart += (~at::isclose(actual[i], expected[i], subject.tolerance, subject.tolerance)).sum().item<int64_t>();
  }
  EXPECT_LE(apart, elements / 50) << "of " << elements << " elements";
}

void compare(const Case& subject, const c10::IValue& expected, const c10::IValue& saved, const World& world) {
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, subject.name);
  auto model = Mlp(kSizes);
  {
    const at::NoGradGuard no_grad;
    const auto weights = tensors_of(at_key(saved, "weights"));
    for (std::size_t i = 0; i < weights.size(); ++i) model->parameters()[i].copy_(weights[i]);
  }
  DistributedDataParallel ddp(model, world.group());
  ddp.register_comm_hook(subject.hook);
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  const auto steps = at_key(expected, "gradients").toList();
  const auto batches = at_key(saved, "batches").toList();
  for (std::size_t step = 0; step < steps.size(); ++step) {
    optimizer.zero_grad();
    const auto batch = tensors_of(batches.get(step))[world.rank()];
    ddp(batch).pow(2).mean().backward();
    SCOPED_TRACE(step);
    expect_agreement(gradients_of(ddp), tensors_of(steps.get(step)), subject);
    optimizer.step();
  }
  if (!subject.state) return;
  EXPECT_EQ(subject.state->iter(), at_key(expected, "iter").toInt());
  EXPECT_EQ(subject.state->compression_stats().numel_before, at_key(expected, "before").toInt());
  EXPECT_EQ(subject.state->compression_stats().numel_after, at_key(expected, "after").toInt());
}

// DDP-66, DDP-68, DDP-70 to DDP-73: five steps of PyTorch's DDP with the same hook give the same gradients
TEST(DdpHooksOracle, AgreeWithPyTorch) {
  const auto saved = oracle::run_reference("ddp/hooks_reference.py");
  if (saved.isNone()) {
    GTEST_SKIP() << "LOCKSTEP_PYTHON and LOCKSTEP_SOURCE_DIR must name a Python with torch and the sources";
  }
  for (const auto& backend : {"threads", "gloo"}) {
    testing::run_threads_in_gtest({.world_size = kWorldSize, .backend = backend}, [&](const World& world) {
      const auto cases = cases_of(world);
      const auto expected = at_key(saved, "cases").toGenericDict();
      EXPECT_EQ(cases.size(), expected.size());
      for (const auto& each : cases) compare(each, expected.at(each.name).toList().get(world.rank()), saved, world);
    });
  }
}

}  // namespace
}  // namespace lockstep
