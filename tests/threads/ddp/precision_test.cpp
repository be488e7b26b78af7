// Mixed precision: low precision while a step computes, full precision between steps.
#include <torch/serialize.h>

#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;
using testing::Recorder;

struct WatchedImpl : torch::nn::Module {
  WatchedImpl()
      : fc(register_module("fc", torch::nn::Linear(4, 3))), head(register_module("head", torch::nn::Linear(3, 2))) {
    scale = register_buffer("scale", at::ones({1}));
    count = register_buffer("count", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& input, const at::Tensor& index) {
    seen = {input.scalar_type(), fc->weight.scalar_type(), index.scalar_type(), scale.scalar_type(),
            count.scalar_type()};
    return head->forward(at::tanh(fc->forward(input))) * scale + index.to(input.scalar_type());
  }
  torch::nn::Linear fc;
  torch::nn::Linear head;
  at::Tensor scale;
  at::Tensor count;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Watched);

const MixedPrecision kBf16{.param_dtype = at::kBFloat16};

at::Tensor index_of(int64_t rows) {
  return at::zeros({rows, 1}, at::kLong);
}

// DDP-78, DDP-79, DDP-80, DDP-81
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, CastsForTheStepOnly, 2) {
  DistributedDataParallel ddp(
      seeded(Watched()), world.group(),
      {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kHalf}});
  EXPECT_EQ(ddp.module()->scale.scalar_type(), at::kFloat) << "buffers too are low in forward only";
  EXPECT_EQ(ddp.module()->count.scalar_type(), at::kLong);
  for (int step = 0; step < 2; ++step) {
    const auto output = ddp(random_batch(2, 4, 1), index_of(2));
    EXPECT_EQ(ddp.module()->seen,
              (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kLong, at::kHalf, at::kLong}));
    output.sum().backward();
    for (const auto& parameter : ddp.parameters()) {
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
  }
  {
    const at::NoGradGuard no_grad;
    ddp(random_batch(2, 4, 1), index_of(2));
    EXPECT_EQ(ddp.module()->seen[1], at::kBFloat16);
  }
  EXPECT_EQ(ddp.module()->fc->weight.scalar_type(), at::kFloat) << "a forward without backward restores at once";
  EXPECT_EQ(ddp.get_ddp_logging_data().strs_map.at("mixed_precision"),
            "param_dtype BFloat16, reduce_dtype none, buffer_dtype Half");
}

// DDP-78, DDP-82
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, ReducesInTheDtypeAskedFor, 2) {
  const auto bytes_reduced = [&](const MixedPrecision& precision) {
    DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.mixed_precision = precision});
    const auto output = ddp(random_batch(2, 4, 1)).sum();
    Recorder recorder;
    output.backward();
    for (const auto& event : recorder.events("launch")) {
      if (event.kind == "all_reduce") return std::pair(event.dtype, event.bytes);
    }
    return std::pair(std::string(), std::size_t{0});
  };
  EXPECT_EQ(bytes_reduced({.param_dtype = at::kBFloat16}), std::pair(std::string("BFloat16"), std::size_t{30}));
  EXPECT_EQ(bytes_reduced({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}),
            std::pair(std::string("Float"), std::size_t{60}));
  EXPECT_EQ(bytes_reduced({.reduce_dtype = at::kHalf}), std::pair(std::string("Half"), std::size_t{30}));
  EXPECT_EQ(bytes_reduced({}), std::pair(std::string("Float"), std::size_t{60}));
}

// DDP-82, DDP-85
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, GivesFullPrecisionsGradientsNearly, 2) {
  const auto batch = random_batch(8, 4, 3);
  auto model = mlp({4, 8, 2});
  model->forward(batch).pow(2).mean().backward();
  const auto expected = gradients_of(*model);
  for (const bool as_view : {false, true}) {
    for (const bool searches : {false, true}) {
      DistributedDataParallel ddp(
          mlp({4, 8, 2}), world.group(),
          {.find_unused_parameters = searches,
           .gradient_as_bucket_view = as_view,
           .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      for (int step = 0; step < 5; ++step) {
        zero_grads(ddp);
        ddp(my_rows(batch, world)).pow(2).mean().backward();
        expect_close(gradients_of(ddp), expected, 0.03);
      }
    }
  }
}

// DDP-83
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, RestoresFrozenParametersToo, 2) {
  auto module = mlp({4, 3, 2});
  module->layers[0]->weight.set_requires_grad(false);
  const auto before = module->layers[0]->weight.clone();
  DistributedDataParallel ddp(module, world.group(), {.mixed_precision = kBf16});
  for (int step = 0; step < 2; ++step) {
    const auto output = ddp(random_batch(2, 4, 1)).sum();
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    EXPECT_EQ(module->layers[0]->weight.scalar_type(), at::kFloat);
    output.backward();
    EXPECT_TRUE(at::equal(module->layers[0]->weight, before));
  }
}

// DDP-84
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, TakesTheHookSlot, 2) {
  DistributedDataParallel ddp(mlp({4, 2}), world.group(), {.mixed_precision = kBf16});
  expect_error([&] { ddp.register_comm_hook([](GradBucket& b) { return completed_future(b.buffer()); }); },
               {"mixed_precision"});
  expect_error(
      [&] {
        ddp.register_fused_optim([](auto parameters) { return std::make_shared<torch::optim::SGD>(parameters, 0.1); });
      },
      {"mixed_precision"});
  auto stepping = mlp({4, 2});
  apply_optimizer_in_backward(
      [](auto parameters) { return std::make_shared<torch::optim::SGD>(std::move(parameters), 0.1); },
      stepping->parameters());
  DistributedDataParallel refused(stepping, world.group(), {.mixed_precision = kBf16});
  expect_error([&] { refused(random_batch(1, 4, 1)); }, {"apply_optimizer_in_backward", "mixed_precision"});
  remove_optimizers_in_backward(stepping->parameters());
}

// DDP-84
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, SavesFullPrecision, 2) {
  DistributedDataParallel ddp(
      seeded(Watched()), world.group(),
      {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kHalf}});
  ddp(random_batch(2, 4, 1), index_of(2)).sum().backward();
  torch::serialize::OutputArchive out;
  ddp.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  torch::serialize::InputArchive inner;
  ASSERT_TRUE(in.try_read("module", inner));
  at::Tensor scale;
  inner.read("scale", scale, /*is_buffer=*/true);
  EXPECT_EQ(scale.scalar_type(), at::kFloat);
}

// DDP-85
LOCKSTEP_THREAD_TEST(DdpMixedPrecision, NoSyncRestoresAndAddsUp, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.mixed_precision = kBf16});
  const auto input = at::full({1, 4}, world.rank() + 1.0);
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    for (int i = 0; i < 2; ++i) {
      const auto guard = ddp.no_sync();
      ddp(input).sum().backward();
      EXPECT_EQ(ddp.module()->layers[0]->weight.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, (world.rank() + 1.0) * (i + 1))));
    }
    ddp(input).sum().backward();
    EXPECT_TRUE(at::equal(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 4.5)));
  }
}

}  // namespace
}  // namespace lockstep
