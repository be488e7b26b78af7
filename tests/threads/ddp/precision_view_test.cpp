// Low precision is how a module looks from inside of its wrapper's forward. From everywhere else (files, optimizers,
// other wrappers, evaluation of the bare module) it is in full precision, whatever steps do or leave undone.
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/serialize.h>

#include <thread>

#include "lockstep/testing/interpose.h"
#include "tests/support/ddp_models.h"

namespace lockstep::precision_view_test {
namespace {

using namespace ddp_models;
using testing::expect_error;

const MixedPrecision kBf16{.param_dtype = at::kBFloat16};
const MixedPrecision kBf16InFloat{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};

void expect_full(const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) {
    EXPECT_EQ(parameter->scalar_type(), at::kFloat) << parameter.key();
    const auto& grad = parameter->grad();
    EXPECT_TRUE(!grad.defined() || grad.scalar_type() == at::kFloat) << parameter.key();
  }
  for (const auto& buffer : module.named_buffers()) EXPECT_NE(buffer->scalar_type(), at::kBFloat16) << buffer.key();
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i;
}

std::string file_of(const Mlp& model) {
  std::stringstream file;
  torch::save(model, file);
  return file.str();
}

void load(Mlp& model, const std::string& content) {
  std::stringstream file(content);
  torch::load(model, file);
}

/// Parameters after some steps. `between` runs when a step's gradients are there, before the optimizer steps.
std::vector<at::Tensor> trained(const World& world, const DdpOptions& options,
                                const std::function<void(DistributedDataParallel<Mlp>&)>& between) {
  auto model = mlp({4, 8, 2});
  DistributedDataParallel ddp(model, world.group(), options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    ddp(my_rows(random_batch(8, 4, step), world)).pow(2).mean().backward();
    between(ddp);
    expect_full(*model);
    optimizer.step();
  }
  return model->parameters();
}

//
LOCKSTEP_THREAD_TEST(DdpPrecisionView, AForwardForTheLogBeforeTheStepChangesNothing, 2) {
  for (const bool as_view : {false, true}) {
    for (const bool searches : {false, true}) {
      const Warnings quiet;
      const DdpOptions options{
          .find_unused_parameters = searches, .gradient_as_bucket_view = as_view, .mixed_precision = kBf16};
      const auto expected = trained(world, options, [](auto&) {});
      EXPECT_FALSE(at::equal(expected[0], mlp({4, 8, 2})->parameters()[0]));
      expect_same(trained(world, options, [](auto& ddp) { ddp(random_batch(2, 4, 9)); }), expected);
    }
  }
}

// as near to one process with the whole batch as the dtype is
LOCKSTEP_THREAD_TEST(DdpPrecisionView, TrainsAsOneProcessDoesNearly, 2) {
  auto alone = mlp({4, 8, 2});
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    alone->forward(random_batch(8, 4, step)).pow(2).mean().backward();
    optimizer.step();
  }
  for (const auto& precision : {kBf16, kBf16InFloat}) {
    const auto actual = trained(world, {.mixed_precision = precision}, [](auto& ddp) { ddp(random_batch(2, 4, 9)); });
    expect_close(actual, alone->parameters(), 0.01);
  }
}

//
LOCKSTEP_THREAD_TEST(DdpPrecisionView, FilesAreInFullPrecisionAfterAForwardWithoutBackward, 2) {
  auto model = mlp({4, 8, 2});
  const auto before = copies_of(model->parameters());
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  const auto output = ddp(random_batch(2, 4, 1));
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  auto other = mlp({4, 8, 2}, /*seed=*/1);
  load(other, file_of(model));
  expect_same(other->parameters(), before);
}

// (D-9)
LOCKSTEP_THREAD_TEST(DdpPrecisionView, AForwardWithoutGradientsBetweenForwardAndBackwardChangesNothing, 2) {
  for (const bool is_inference : {false, true}) {
    auto model = mlp({4, 8, 2});
    DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
    ddp(my_rows(random_batch(8, 4, 1), world)).pow(2).mean().backward();
    const auto expected = gradients_of(ddp);
    for (int step = 0; step < 2; ++step) {
      zero_grads(ddp);
      const auto loss = ddp(my_rows(random_batch(8, 4, 1), world)).pow(2).mean();
      if (is_inference) {
        const c10::InferenceMode inference;
        EXPECT_EQ(ddp(random_batch(2, 4, 2)).scalar_type(), at::kBFloat16);
      } else {
        const at::NoGradGuard no_grad;
        EXPECT_EQ(ddp(random_batch(2, 4, 2)).scalar_type(), at::kBFloat16);
      }
      loss.backward();
      expect_same(gradients_of(ddp), expected);
    }
    expect_full(*model);
  }
}

struct ThrowingImpl : MlpImpl {
  ThrowingImpl() : MlpImpl({4, 8, 2}) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto output = MlpImpl::forward(input);
    TORCH_CHECK(!throws, "no such token");
    return output;
  }
  bool throws = false;
};
TORCH_MODULE(Throwing);

// (D-9)
LOCKSTEP_THREAD_TEST(DdpPrecisionView, AModuleThatThrowsIsInFullPrecisionAndCanBeLoaded, 2) {
  auto model = seeded(Throwing());
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  ddp(random_batch(2, 4, 1)).sum().backward();
  model->throws = true;
  expect_error([&] { ddp(random_batch(2, 4, 1)); }, {"no such token"});
  model->throws = false;
  expect_full(*model);
  auto other = seeded(Throwing(), /*seed=*/3);
  std::stringstream file;
  torch::save(other, file);
  torch::load(model, file);
  zero_grads(ddp);
  ddp(random_batch(2, 4, 1)).pow(2).mean().backward();
  expect_same(copies_of(model->parameters()), copies_of(other->parameters()));
  other->forward(random_batch(2, 4, 1)).pow(2).mean().backward();
  expect_close(gradients_of(*model), gradients_of(*other), 0.03);
}

// (D-9, D-10)
LOCKSTEP_THREAD_TEST(DdpPrecisionView, AFailedReductionLeavesFullPrecisionAndItsOwnError, 2) {
  auto model = mlp({4, 8, 2});
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  const auto loss = ddp(random_batch(2, 4, 1)).pow(2).mean();
  {
    const auto failing = testing::fail_call(CallKind::kAllReduce, 0, "a peer is gone");
    EXPECT_THROW(loss.backward(), c10::DistBackendError);
  }
  expect_full(*model);
  auto other = mlp({4, 8, 2}, /*seed=*/3);
  load(model, file_of(other));
  zero_grads(ddp);
  ddp(random_batch(2, 4, 1)).pow(2).mean().backward();
  expect_same(copies_of(model->parameters()), copies_of(other->parameters()));
  other->forward(random_batch(2, 4, 1)).pow(2).mean().backward();
  expect_close(gradients_of(*model), gradients_of(*other), 0.03);
}

/// An encoder that others may have too, and a head of its own.
struct HeadedImpl : torch::nn::Module {
  HeadedImpl(torch::nn::Linear shared, int seed)
      : encoder(register_module("encoder", std::move(shared))),
        head(register_module("head", seeded(torch::nn::Linear(6, 2), seed))) {}
  at::Tensor forward(const at::Tensor& input) {
    seen = encoder->weight.scalar_type();
    return head->forward(at::tanh(encoder->forward(input)));
  }
  torch::nn::Linear encoder;
  torch::nn::Linear head;
  at::ScalarType seen = at::kFloat;
};
TORCH_MODULE(Headed);

//
LOCKSTEP_THREAD_TEST(DdpPrecisionView, WrappersThatShareALayerMeetItInFullPrecision, 2) {
  const auto batch = random_batch(8, 4, 3);
  const auto encoder_alone = seeded(torch::nn::Linear(4, 6));
  Headed one_alone(encoder_alone, 1);
  Headed other_alone(encoder_alone, 2);
  const auto loss_of = [](const at::Tensor& one, const at::Tensor& other) {
    return one.to(at::kFloat).pow(2).mean() + other.to(at::kFloat).pow(2).mean();
  };
  loss_of(one_alone->forward(batch), other_alone->forward(batch)).backward();

  const auto encoder = seeded(torch::nn::Linear(4, 6));
  Headed one(encoder, 1);
  Headed other(encoder, 2);
  DistributedDataParallel first(one, world.group(), {.mixed_precision = kBf16});
  DistributedDataParallel second(
      other, world.group(), {.mixed_precision = MixedPrecision{.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}});
  for (int step = 0; step < 3; ++step) {
    zero_grads(first);
    zero_grads(second);
    const auto mine = my_rows(batch, world);
    const auto from_first = first(mine);
    EXPECT_EQ(one->seen, at::kBFloat16);
    expect_full(*encoder);
    const auto from_second = second(mine);
    EXPECT_EQ(other->seen, at::kHalf);
    expect_full(*encoder);
    loss_of(from_first, from_second).backward();
    expect_full(*encoder);
    expect_close(gradients_of(*one), gradients_of(*one_alone), 0.03);
    expect_close(gradients_of(*other), gradients_of(*other_alone), 0.03);
  }
}

// the layer itself is used beside the wrapper, in one graph
LOCKSTEP_THREAD_TEST(DdpPrecisionView, ALayerUsedBesideTheWrapperComputesInFullPrecision, 2) {
  const auto batch = random_batch(8, 4, 3);
  const auto loss_of = [](const at::Tensor& output, const at::Tensor& hidden) {
    EXPECT_EQ(hidden.scalar_type(), at::kFloat);
    return output.to(at::kFloat).pow(2).mean() + hidden.pow(2).mean();
  };
  Headed alone(seeded(torch::nn::Linear(4, 6)), 1);
  loss_of(alone->forward(batch), alone->encoder->forward(batch)).backward();
  Headed model(seeded(torch::nn::Linear(4, 6)), 1);
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16InFloat});
  const auto mine = my_rows(batch, world);
  loss_of(ddp(mine), model->encoder->forward(mine)).backward();
  expect_close(gradients_of(*model), gradients_of(*alone), 0.03);
}

/// Uses its encoder itself, and a wrapper that has it too.
struct NestingImpl : torch::nn::Module {
  NestingImpl(torch::nn::Linear shared, const GroupPtr& group, std::optional<MixedPrecision> inside)
      : encoder(register_module("encoder", std::move(shared))),
        head(register_module("head", seeded(torch::nn::Linear(6, 2), 2))),
        inner(std::make_shared<DistributedDataParallel<Headed>>(Headed(encoder, 1), group,
                                                                DdpOptions{.mixed_precision = inside})) {}
  at::Tensor forward(const at::Tensor& input) {
    const auto inside = inner->forward(input).to(input.scalar_type());
    seen = encoder->weight.scalar_type();
    return head->forward(encoder->forward(input)) + inside;
  }
  torch::nn::Linear encoder;
  torch::nn::Linear head;
  std::shared_ptr<DistributedDataParallel<Headed>> inner;
  at::ScalarType seen = at::kFloat;
};

// one wrapper's forward inside of the other's
LOCKSTEP_THREAD_TEST(DdpPrecisionView, WrappersInsideOfEachOtherPutBackWhatTheyFound, 2) {
  const auto run = [&](std::optional<MixedPrecision> outside, std::optional<MixedPrecision> inside) {
    const auto model = std::make_shared<NestingImpl>(seeded(torch::nn::Linear(4, 6)), world.group(), inside);
    DistributedDataParallel ddp(model, world.group(), {.mixed_precision = outside});
    ddp(my_rows(random_batch(8, 4, 3), world)).to(at::kFloat).pow(2).mean().backward();
    EXPECT_EQ(model->seen, outside ? at::kBFloat16 : at::kFloat);
    expect_full(*model);
    expect_full(*model->inner->module());
    auto gradients = gradients_of(*model);
    for (const auto& gradient : gradients_of(*model->inner->module())) gradients.push_back(gradient);
    return gradients;
  };
  const auto expected = run(std::nullopt, std::nullopt);
  const MixedPrecision half{.param_dtype = at::kHalf, .reduce_dtype = at::kFloat};
  expect_close(run(kBf16, half), expected, 0.05);
  expect_close(run(kBf16, kBf16InFloat), expected, 0.05);
  expect_close(run(std::nullopt, half), expected, 0.05);
}

/// Calls a part of itself through a wrapper of its own.
struct WrappingImpl : torch::nn::Module {
  explicit WrappingImpl(const GroupPtr& group)
      : body(register_module("body", mlp({4, 6, 2}))),
        inner(std::make_shared<DistributedDataParallel<Mlp>>(body, group, DdpOptions{.bucket_cap_mb = 0})) {}
  at::Tensor forward(const at::Tensor& input) { return inner->forward(input); }
  Mlp body;
  std::shared_ptr<DistributedDataParallel<Mlp>> inner;
};

// the inner one lays its buckets out anew while the outer one shows low precision
LOCKSTEP_THREAD_TEST(DdpPrecisionView, WrappersInsideOfAnotherReduceInTheirOwnPrecision, 2) {
  auto alone = mlp({4, 6, 2});
  alone->forward(random_batch(8, 4, 3)).pow(2).mean().backward();
  const auto model = std::make_shared<WrappingImpl>(world.group());
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  auto& reducer = *model->inner->engine().reducer();
  for (int step = 0; step < 3; ++step) {
    zero_grads(*model);
    ddp(my_rows(random_batch(8, 4, 3), world)).to(at::kFloat).pow(2).mean().backward();
    EXPECT_EQ(reducer.has_rebuilt_buckets(), step > 0);
    for (const auto& bucket : reducer.get_grad_buckets()) {
      EXPECT_EQ(bucket.buffer().scalar_type(), at::kFloat) << "bucket " << bucket.index() << ", step " << step;
    }
    expect_close(gradients_of(*model), gradients_of(*alone), 0.05);
  }
}

struct ThreadedImpl : torch::nn::Module {
  ThreadedImpl()
      : left(register_module("left", seeded(torch::nn::Linear(4, 3), 1))),
        right(register_module("right", seeded(torch::nn::Linear(4, 3), 2))) {}
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor from_right;
    std::thread([&] { from_right = right->forward(input); }).join();
    return left->forward(input) * from_right;
  }
  torch::nn::Linear left;
  torch::nn::Linear right;
};
TORCH_MODULE(Threaded);

LOCKSTEP_THREAD_TEST(DdpPrecisionView, ForwardMayUseThreadsOfItsOwn, 2) {
  Threaded alone;
  alone->forward(random_batch(8, 4, 3)).pow(2).mean().backward();
  Threaded model;
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  auto mine = my_rows(random_batch(8, 4, 3), world).requires_grad_();
  ddp(mine).pow(2).mean().backward();
  EXPECT_EQ(mine.grad().scalar_type(), at::kFloat);
  expect_close(gradients_of(*model), gradients_of(*alone), 0.05);
}

struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : fc(register_module("fc", seeded(torch::nn::Linear(4, 6)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(6))),
        head(register_module("head", seeded(torch::nn::Linear(6, 2)))) {
    third = register_buffer("third", at::full({1}, 1.0 / 3));
  }
  at::Tensor forward(const at::Tensor& input) {
    return head->forward(at::relu(norm->forward(fc->forward(input)))) * third;
  }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear head;
  at::Tensor third;
};
TORCH_MODULE(Normed);

const MixedPrecision kAllBf16{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};

// (U-11)
LOCKSTEP_THREAD_TEST(DdpPrecisionView, TheBareModuleIsEvaluatedInFullPrecision, 2) {
  Normed model;
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kAllBf16});
  for (int step = 0; step < 3; ++step) ddp(random_batch(8, 4, step)).pow(2).mean().backward();
  expect_full(*model);
  model->eval();
  const at::NoGradGuard no_grad;
  const auto input = random_batch(8, 4, 5);
  const auto full = ddp.module()->forward(input);
  EXPECT_EQ(full.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(full, ddp(input).to(at::kFloat), 0.03, 0.03));
}

// (U-11): what forward writes arrives, as if buffers were in low precision for good; the rest keeps its bits
LOCKSTEP_THREAD_TEST(DdpPrecisionView, RunningMeansComeBackAndOtherBuffersKeepTheirBits, 2) {
  Normed model;
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kAllBf16});
  Normed low;
  low->to(at::kBFloat16);
  for (int step = 0; step < 4; ++step) {
    const auto input = random_batch(8, 4, step);
    if (step == 2) {
      // Without gradients they move too.
      const at::NoGradGuard no_grad;
      ddp(input);
      low->forward(input.to(at::kBFloat16));
    } else {
      ddp(input).sum().backward();
      low->forward(input.to(at::kBFloat16)).sum().backward();
    }
    EXPECT_TRUE(at::equal(model->norm->running_mean, low->norm->running_mean.to(at::kFloat)));
    EXPECT_TRUE(at::equal(model->norm->running_var, low->norm->running_var.to(at::kFloat)));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), step + 1);
    EXPECT_TRUE(at::equal(model->third, at::full({1}, 1.0 / 3)));
  }
  EXPECT_FALSE(at::equal(model->norm->running_mean, at::zeros({6})));
}

struct ClampedImpl : torch::nn::Module {
  ClampedImpl() : fc(register_module("fc", seeded(torch::nn::Linear(4, 3)))) {}
  at::Tensor forward(const at::Tensor& input) {
    {
      const at::NoGradGuard no_grad;
      fc->weight.clamp_(-0.25, 0.25);
    }
    return fc->forward(input);
  }
  torch::nn::Linear fc;
};
TORCH_MODULE(Clamped);

// what forward does to its own parameters is not lost
LOCKSTEP_THREAD_TEST(DdpPrecisionView, ParametersThatForwardWritesAreWritten, 2) {
  Clamped model;
  const auto expected = model->fc->weight.detach().clamp(-0.25, 0.25);
  ASSERT_FALSE(at::equal(expected, model->fc->weight));
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  ddp(random_batch(2, 4, 1)).sum().backward();
  EXPECT_TRUE(at::equal(model->fc->weight, expected));
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight) {
    context->save_for_backward({input, weight});
    return input.matmul(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    EXPECT_EQ(saved[1].scalar_type(), at::kBFloat16);
    return {gradients[0].matmul(saved[1].t()), saved[0].t().matmul(gradients[0])};
  }
};

struct CustomImpl : torch::nn::Module {
  CustomImpl()
      : first(register_parameter("first", at::full({4, 3}, 0.3))),
        second(register_parameter("second", at::full({3, 2}, 0.7))) {}
  at::Tensor forward(const at::Tensor& input) { return Scale::apply(Scale::apply(input, first), second); }
  at::Tensor first;
  at::Tensor second;
};

LOCKSTEP_THREAD_TEST(DdpPrecisionView, FunctionsOfAProgramGetWhatTheySaved, 2) {
  const auto model = std::make_shared<CustomImpl>();
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  ddp(at::ones({1, 4})).sum().backward();
  expect_full(*model);
  EXPECT_TRUE(at::allclose(model->first.grad(), at::full({4, 3}, 1.4), 0.01));
  EXPECT_TRUE(at::allclose(model->second.grad(), at::full({3, 2}, 1.2), 0.01));
}

LOCKSTEP_THREAD_TEST(DdpPrecisionView, ChangesInPlaceBeforeBackwardAreNoticed, 2) {
  auto model = mlp({4, 8, 2});
  DistributedDataParallel ddp(model, world.group(), {.mixed_precision = kBf16});
  const auto loss = ddp(random_batch(2, 4, 1)).sum();
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.add_(1);
  }
  expect_error([&] { loss.backward(); }, {"modified by an inplace operation"});
}

LOCKSTEP_THREAD_TEST(DdpPrecisionView, GradientsOfGradientsReachTheParameters, 1) {
  const auto run = [&](auto&& forward) {
    const auto input = random_batch(4, 4, 1).requires_grad_();
    const auto slope = torch::autograd::grad({forward(input).pow(2).sum()}, {input}, {}, true, /*create_graph=*/true);
    slope[0].pow(2).sum().backward();
  };
  auto alone = mlp({4, 8, 2});
  run([&](const at::Tensor& input) { return alone->forward(input); });
  DistributedDataParallel ddp(mlp({4, 8, 2}), world.group(), {.mixed_precision = kBf16});
  run([&](const at::Tensor& input) { return ddp(input); });
  expect_full(*ddp.module());
  expect_close(gradients_of(ddp), gradients_of(*alone), 0.1);
}

// in bfloat16 256 + 1 is 256
LOCKSTEP_THREAD_TEST(DdpPrecisionView, AccumulatesInFullPrecision, 2) {
  DistributedDataParallel ddp(mlp({4, 3}), world.group(), {.mixed_precision = kBf16InFloat});
  const auto backward_of = [&](double value) { ddp(at::full({1, 4}, value)).sum().backward(); };
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    {
      const auto guard = ddp.no_sync();
      backward_of(256);
    }
    backward_of(1);
    EXPECT_TRUE(at::equal(ddp.module()->layers[0]->weight.grad(), at::full({3, 4}, 257.0)));
  }
}

}  // namespace
}  // namespace lockstep::precision_view_test
