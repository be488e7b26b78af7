// PrepareModuleInput, PrepareModuleOutput and Prepared<M>, against one device.
#include "lockstep/checkpointing/checkpointed.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/parallelize_module.h"
#include "lockstep/tp/prepared.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::prepare_test {

using testing::check_equal;
using testing::expect_error;
using testing::line;
using testing::numbers;

const testing::Tolerance kClose{.relative = 1e-5, .absolute = 1e-6};

/// The same weights on every rank and in every model of the kind.
template <class M>
M seeded(M model) {
  const at::NoGradGuard no_grad;
  uint64_t seed = 1;
  for (auto& each : model->parameters()) each.copy_(numbers(each.sizes(), seed++));
  return model;
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() { register_modules(); }
  void register_modules() {
    register_module("in_proj", in_proj);
    register_module("out_proj", out_proj);
  }
  at::Tensor forward(const at::Tensor& x) { return out_proj(at::gelu(in_proj(x))); }

  torch::nn::Linear in_proj{4, 8};
  torch::nn::Linear out_proj{8, 4};
};
TORCH_MODULE(Mlp);

template <class Inner>
struct NetImpl : torch::nn::Module {
  NetImpl() { register_module("mlp", mlp); }
  at::Tensor forward(const at::Tensor& x) { return mlp(x); }
  Inner mlp;
};

/// What a module may take and return beside one tensor.
struct ManyImpl : torch::nn::Module {
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, int64_t factor, const std::optional<at::Tensor>& y) {
    seen = x;
    return {x * factor, y ? x + *y : x};
  }
  at::Tensor seen;
};
TORCH_MODULE(Many);

ParallelPlan mlp_plan(const Style& prepare) {
  return {{"mlp", prepare},
          {"mlp.in_proj", ColwiseParallel()},
          {"mlp.out_proj", RowwiseParallel({.output_layouts = Shard(1)})}};
}

// TP-39: the input of a module comes in cut along the sequence, and is gathered once for all that use it.
LOCKSTEP_THREAD_TEST(Prepare, BringsAModulesInputToAnotherLayout, 2) {
  const auto mesh = line(world);
  auto one = seeded(Mlp());
  auto x_whole = numbers({2, 6, 4}, 9).requires_grad_();
  const auto expected = one->forward(x_whole);
  expected.pow(2).sum().backward();

  auto net = seeded(std::make_shared<NetImpl<Prepared<Mlp>>>());
  parallelize_module(
      *net, mesh, mlp_plan(PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}})));
  const auto names = net->named_parameters().keys();
  EXPECT_EQ(names, (std::vector<std::string>{"mlp.in_proj.weight", "mlp.in_proj.bias", "mlp.out_proj.weight",
                                             "mlp.out_proj.bias"}));
  auto x = x_whole.detach().chunk(world.world_size(), 1)[static_cast<std::size_t>(world.rank())].clone();
  x.requires_grad_();
  testing::Recorder recorder;
  const auto out = net->forward(x);
  testing::expect_exact_order(recorder.events("launch"), {"all_gather_into_tensor", "reduce_scatter_tensor"});
  EXPECT_FALSE(is_dtensor(out));
  check_equal("out", out, expected.chunk(world.world_size(), 1)[static_cast<std::size_t>(world.rank())], kClose);
  out.pow(2).sum().backward();
  check_equal("gradient", x.grad(), x_whole.grad().chunk(world.world_size(), 1)[static_cast<std::size_t>(world.rank())],
              kClose);
  check_equal("weight", net->mlp->in_proj->parameters()[0].grad(),
              one->in_proj->weight.grad().chunk(world.world_size(), 0)[static_cast<std::size_t>(world.rank())], kClose);
}

// TP-39: results too; both at once; local tensors inside.
LOCKSTEP_THREAD_TEST(Prepare, BringsAModulesOutputToAnotherLayout, 2) {
  const auto mesh = line(world);
  const auto x_whole = numbers({4, 4}, 9);
  const auto expected = seeded(Mlp())->forward(x_whole);
  const auto x = x_whole.chunk(world.world_size(), 0)[static_cast<std::size_t>(world.rank())];

  auto net = seeded(std::make_shared<NetImpl<Prepared<Mlp>>>());
  parallelize_module(
      *net, mesh,
      {{"mlp", PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {Replicate()}})}});
  const auto out = net->forward(x);  // the ranks share the batch, and each gets all results
  EXPECT_FALSE(is_dtensor(out));
  check_equal("out", out, expected, kClose);

  auto both = seeded(std::make_shared<NetImpl<Prepared<Mlp>>>());
  parallelize_module(*both, mesh,
                     {{"mlp", PrepareModuleInputOutput({.input_layouts = {Replicate()},
                                                        .desired_input_layouts = {Shard(0)},
                                                        .use_local_input = true,
                                                        .output_layouts = {Shard(0)},
                                                        .desired_output_layouts = {Shard(1)},
                                                        .use_local_output = false})}});
  const DTensor kept(both->forward(x_whole));
  EXPECT_EQ(kept.placements(), (Placements{Shard(1)}));
  check_equal("kept", kept.full_tensor(), expected, kClose);
}

// TP-39: a layout per argument, none to leave one as it is; numbers that differ are refused.
LOCKSTEP_THREAD_TEST(Prepare, TakesALayoutPerArgument, 2) {
  const auto mesh = line(world);
  const auto x = numbers({2, 4}, 1);
  Prepared<Many> many;
  EXPECT_FALSE(is_dtensor(std::get<0>(many(x, 2, x))));  // until it is prepared, it is what it was
  many->prepare_input(mesh, {.input_layouts = {Shard(0), std::nullopt, Replicate()},
                             .desired_input_layouts = {Replicate(), std::nullopt, std::nullopt}});
  many->prepare_output(
      mesh, {.output_layouts = {Replicate(), std::nullopt}, .desired_output_layouts = {Replicate(), std::nullopt}});
  const auto [product, sum] = many->forward(x, 3, std::nullopt);
  EXPECT_TRUE(is_dtensor(many->seen));
  EXPECT_EQ(DTensor(many->seen).placements(), (Placements{Replicate()}));
  EXPECT_FALSE(is_dtensor(product));
  check_equal("product", product, at::cat({x, x}) * 3);
  EXPECT_TRUE(is_dtensor(sum));
  EXPECT_TRUE(is_dtensor(std::get<1>(many(x, 3, std::nullopt))));
  const auto [_, with_y] = many(x, 3, at::ones({4, 4}));
  check_equal("sum", DTensor(with_y).to_local(), at::cat({x, x}) + 1);

  Prepared<Many> wrong;
  wrong->prepare_input(mesh, {.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}});
  expect_error([&] { wrong->forward(x, 3, x); }, {"Many", "3 arguments", "for 1", "rank"});
  Prepared<Many> number;
  number->prepare_input(mesh, {.input_layouts = {std::nullopt, Shard(0), std::nullopt},
                               .desired_input_layouts = {std::nullopt, Replicate(), std::nullopt}});
  expect_error([&] { number->forward(x, 3, x); }, {"argument 1", "no tensor", "std::nullopt"});
  Prepared<Many> results;
  results->prepare_output(mesh, {.output_layouts = {Shard(0)}, .desired_output_layouts = {Replicate()}});
  expect_error([&] { results->forward(x, 3, x); }, {"2 results", "for 1"});
  expect_error(
      [&] { PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate(), Replicate()}}); },
      {"input_layouts has 1", "2"});
}

// TP-39: a module that cannot be prepared is refused by name, before anything is changed.
LOCKSTEP_THREAD_TEST(Prepare, RefusesModulesWithoutAPlaceForIt, 2) {
  const auto mesh = line(world);
  const PrepareModuleInput input({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}});
  const PrepareModuleOutput output({.output_layouts = {Shard(1)}, .desired_output_layouts = {Replicate()}});
  auto net = seeded(std::make_shared<NetImpl<Mlp>>());
  expect_error([&] { parallelize_module(*net, mesh, {{"mlp.in_proj", ColwiseParallel()}, {"mlp", input}}); },
               {"'mlp'", "MlpImpl", "lockstep::Prepared<", "input_layouts"});
  expect_error([&] { parallelize_module(*net, mesh, {{"mlp.in_proj", output}}); }, {"'mlp.in_proj'", "output_layouts"});
  EXPECT_FALSE(is_dtensor(net->mlp->in_proj->weight));

  auto prepared = seeded(std::make_shared<NetImpl<Prepared<Mlp>>>());
  parallelize_module(*prepared, mesh, {{"mlp", input}});
  expect_error([&] { parallelize_module(*prepared, mesh, {{"mlp", input}}); }, {"'mlp'", "before"});
  parallelize_module(*prepared, mesh, {{"mlp", output}});
}

// TP-39: of a layer the input is prepared where its parameters are used.
LOCKSTEP_THREAD_TEST(Prepare, ActsAtTheOperatorOfALayer, 2) {
  const auto mesh = line(world);
  auto linear = seeded(torch::nn::Linear(4, 3));
  auto x_whole = numbers({2, 4, 4}, 5).requires_grad_();
  const auto expected = linear->forward(x_whole);
  expected.pow(2).sum().backward();

  auto divided = seeded(torch::nn::Linear(4, 3));
  parallelize_module(*divided, mesh,
                     PrepareModuleInput({.input_layouts = {Replicate()}, .desired_input_layouts = {Shard(1)}}));
  auto x = x_whole.detach().clone().requires_grad_();
  const DTensor out(divided->forward(x));
  EXPECT_EQ(out.placements(), (Placements{Shard(1)}));
  check_equal("out", out.full_tensor(), expected, kClose);
  out.tensor().pow(2).sum().backward();
  check_equal("x", x.grad(), x_whole.grad(), kClose);
  check_equal("weight", divided->parameters()[0].grad(), linear->weight.grad(), kClose);
  check_equal("bias", divided->parameters()[1].grad(), linear->bias.grad(), kClose);

  auto local = seeded(torch::nn::Linear(4, 3));
  parallelize_module(*local, mesh,
                     PrepareModuleInputOutput({.input_layouts = {Replicate()},
                                               .desired_input_layouts = {Shard(0)},
                                               .output_layouts = {Shard(0)},
                                               .desired_output_layouts = {Replicate()}}));
  check_equal("whole", local->forward(x.detach()), expected, kClose);
}

// TP-39: it goes wherever its module goes.
LOCKSTEP_THREAD_TEST(Prepare, FitsSequentialCheckpointsAndClones, 2) {
  const auto mesh = line(world);
  const auto x = numbers({2, 4}, 5);
  const PrepareInputOptions gather{
      .input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}, .use_local_output = true};
  auto prepared = seeded(Prepared<Mlp>());
  prepared->prepare_input(mesh, gather);
  const auto expected = seeded(Mlp())->forward(at::cat({x, x}));
  torch::nn::Sequential sequential(prepared);
  check_equal("sequential", sequential->forward(x), expected, kClose);
  torch::nn::AnyModule any(prepared);
  check_equal("any", any.forward(x), expected, kClose);

  auto checkpointed = seeded(Checkpointed<Prepared<Mlp>>());
  checkpointed->set_checkpoint_options({.preserve_rng_state = false});
  checkpointed->prepare_input(mesh, gather);
  auto piece = x.clone().requires_grad_();
  const auto out = checkpointed(piece);
  check_equal("checkpointed", out, expected, kClose);
  out.sum().backward();
  EXPECT_EQ(piece.grad().sizes(), piece.sizes());

  Prepared<Many> many;
  many->prepare_input(mesh, {.input_layouts = {Shard(0), std::nullopt, std::nullopt},
                             .desired_input_layouts = {Replicate(), std::nullopt, std::nullopt}});
  Prepared<torch::nn::Linear> linear(4, 2);
  linear->prepare_input(mesh, gather);
  const auto copy = std::dynamic_pointer_cast<PreparedImpl<torch::nn::LinearImpl>>(linear->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->forward(x).size(0), 4);
}

}  // namespace lockstep::prepare_test
