// Gradients that are not plain floats on one graph: sparse, complex, expanded; and SyncBatchNorm.
#include "tests/support/ddp_models.h"

namespace lockstep {
namespace {

using namespace ddp_models;
using testing::expect_error;

struct BagImpl : torch::nn::Module {
  explicit BagImpl(bool sparse)
      : bag(register_module(
            "bag", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(10, 3).mode(torch::kSum).sparse(sparse)))),
        fc(register_module("fc", torch::nn::Linear(3, 2))) {}
  at::Tensor forward(const at::Tensor& rows) { return fc->forward(bag->forward(rows, at::tensor({0}))); }
  torch::nn::EmbeddingBag bag;
  torch::nn::Linear fc;
};
TORCH_MODULE(Bag);

at::Tensor rows_of(const World& world, int step) {
  return at::tensor({1, 2, world.rank() + 3 + step});
}

// DDP-60, DDP-17
LOCKSTEP_THREAD_TEST(DdpSparse, EqualsTheDenseReference, 3) {
  for (const bool as_view : {false, true}) {
    for (const bool searches : {false, true}) {
      const DdpOptions options{.find_unused_parameters = searches, .gradient_as_bucket_view = as_view};
      const Warnings quiet;
      DistributedDataParallel sparse(seeded(Bag(true)), world.group(), options);
      DistributedDataParallel dense(seeded(Bag(false)), world.group(), options);
      EXPECT_TRUE(sparse.bucket_plan().parameters()[0].expects_sparse_gradient);
      for (int step = 0; step < 3; ++step) {
        zero_grads(sparse);
        zero_grads(dense);
        sparse(rows_of(world, step)).pow(2).sum().backward();
        dense(rows_of(world, step)).pow(2).sum().backward();
        ASSERT_TRUE(sparse.module()->bag->weight.grad().is_sparse());
        EXPECT_TRUE(at::allclose(sparse.module()->bag->weight.grad().to_dense(), dense.module()->bag->weight.grad()));
        EXPECT_TRUE(at::allclose(sparse.module()->fc->weight.grad(), dense.module()->fc->weight.grad()));
      }
    }
  }
}

// DDP-61
LOCKSTEP_THREAD_TEST(DdpSparse, MetadataMakesTheReductionDense, 2) {
  DistributedDataParallel ddp(seeded(Bag(true)), world.group());
  DistributedDataParallel dense(seeded(Bag(false)), world.group());
  ddp.set_sparse_metadata({{"bag.weight", at::tensor({1, 2, 3, 4})}});
  {
    const auto loss = ddp(rows_of(world, 0)).pow(2).sum();
    testing::Recorder recorder;
    loss.backward();
    testing::expect_none(recorder.events("launch"), "all_gather");
    int sums = 0;
    for (const auto& event : recorder.events("launch")) {
      if (event.kind == "bucket") continue;
      EXPECT_EQ(event.kind, "all_reduce");
      sums += event.dtype == "Float" && event.bytes == 48 ? 1 : 0;  // four rows of three
    }
    EXPECT_EQ(sums, 1);
  }
  dense(rows_of(world, 0)).pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(ddp.module()->bag->weight.grad().to_dense(), dense.module()->bag->weight.grad()));
  // Good for one backward.
  zero_grads(ddp);
  zero_grads(dense);
  ddp(rows_of(world, 4)).pow(2).sum().backward();
  dense(rows_of(world, 4)).pow(2).sum().backward();
  EXPECT_TRUE(at::allclose(ddp.module()->bag->weight.grad().to_dense(), dense.module()->bag->weight.grad()));
  zero_grads(ddp);
  ddp.set_sparse_metadata({{"other.weight", at::tensor({1})}});
  const auto output = ddp(rows_of(world, 0)).sum();
  expect_error([&] { output.backward(); }, {"'bag.weight'", "metadata"});
}

// DDP-61, DDP-64
LOCKSTEP_THREAD_TEST(DdpSparse, HooksSeeTheRowsAndMustKeepThem, 2) {
  DistributedDataParallel ddp(seeded(Bag(true)), world.group());
  int64_t rows_returned = 4;
  std::optional<at::Tensor> seen;
  ddp.register_comm_hook([&](GradBucket& bucket) {
    if (!bucket.sparse_rows()) return completed_future(bucket.buffer());
    seen = bucket.sparse_rows();
    return completed_future(bucket.buffer().narrow(0, 0, rows_returned));
  });
  const auto step = [&] {
    zero_grads(ddp);
    ddp.set_sparse_metadata({{"bag.weight", at::tensor({1, 2, 3, 4})}});
    ddp(rows_of(world, 0)).sum().backward();
  };
  step();
  ASSERT_TRUE(seen);
  EXPECT_TRUE(at::equal(*seen, at::tensor({1, 2, 3, 4})));
  rows_returned = 3;
  expect_error(step, {"3 rows, but the sparse metadata 4"});
}

// (D-5)
LOCKSTEP_THREAD_TEST(DdpSparse, OptimizersInBackwardStepSparseGradientsToo, 2) {
  const auto make_sgd = [](std::vector<at::Tensor> parameters) {
    return std::make_shared<torch::optim::SGD>(std::move(parameters), 0.1);
  };
  auto alone = seeded(Bag(false));
  torch::optim::SGD optimizer(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) {
      (alone->forward(at::tensor({1, 2, rank + 3 + step})).pow(2).sum() / 2).backward();
    }
    optimizer.step();
  }
  for (const bool is_fused : {false, true}) {
    for (const bool searches : {false, true}) {
      const Warnings quiet;
      auto model = seeded(Bag(true));
      if (!is_fused) apply_optimizer_in_backward(make_sgd, model->parameters());
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = searches});
      if (is_fused) ddp.register_fused_optim(make_sgd);
      for (int step = 0; step < 3; ++step) {
        ddp(rows_of(world, step)).pow(2).sum().backward();
        EXPECT_FALSE(model->bag->weight.grad().defined());
      }
      expect_close(model->parameters(), alone->parameters());
      remove_optimizers_in_backward(model->parameters());
    }
  }
}

// DDP-60
LOCKSTEP_THREAD_TEST(DdpSparse, OtherGradientsAreRefusedByName, 2) {
  DistributedDataParallel ddp(seeded(Bag(true)), world.group());
  const auto output = ddp(rows_of(world, 0)).sum() + ddp.module()->bag->weight.sum();  // sparse + dense is dense
  expect_error([&] { output.backward(); }, {"'bag.weight'", "dense"});
  // The other way round: a sparse gradient where none is expected.
  struct SneakyImpl : torch::nn::Module {
    SneakyImpl() : table(register_parameter("table", at::ones({10, 3}))) {}
    at::Tensor forward(const at::Tensor& rows) { return at::embedding(table, rows, -1, false, /*sparse=*/true); }
    at::Tensor table;
  };
  DistributedDataParallel sneaky(std::make_shared<SneakyImpl>(), world.group());
  const auto other = sneaky(rows_of(world, 0)).sum();
  expect_error([&] { other.backward(); }, {"'table'", "sparse"});
}

struct WaveImpl : torch::nn::Module {
  WaveImpl()
      : phase(register_parameter("phase", at::full({3, 2}, c10::complex<double>(1, 2), at::kComplexDouble))),
        real(register_parameter("real", at::ones({2}, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& input) { return at::abs(at::matmul(input, phase)) * real; }
  at::Tensor phase;
  at::Tensor real;
};
TORCH_MODULE(Wave);

struct ConjugatedImpl : torch::nn::Module {
  ConjugatedImpl()
      : weight(register_parameter("weight", at::full({3}, c10::complex<float>(1, 2), at::kComplexFloat))) {}
  at::Tensor forward(const at::Tensor& input) { return (weight.conj() * input).abs(); }
  at::Tensor weight;
};
TORCH_MODULE(Conjugated);

// (D-7): autograd leaves a gradient to be conjugated on reading; what is averaged is its value
LOCKSTEP_THREAD_TEST(DdpKinds, LazilyConjugatedGradientsAreAveraged, 2) {
  const auto input_for = [](int rank) { return at::full({3}, c10::complex<float>(rank + 1, 3), at::kComplexFloat); };
  Conjugated alone;
  for (int rank = 0; rank < 2; ++rank) (alone->forward(input_for(rank)).sum() / 2).backward();
  const auto expected = alone->weight.grad().resolve_conj();
  for (const bool as_view : {false, true}) {
    for (const bool is_batched : {false, true}) {
      DistributedDataParallel ddp(Conjugated(), world.group(),
                                  {.gradient_as_bucket_view = as_view, .batched_grad_copy = is_batched});
      for (int step = 0; step < 3; ++step) {
        zero_grads(ddp);
        ddp(input_for(world.rank())).sum().backward();
        EXPECT_TRUE(
            at::allclose(at::view_as_real(ddp.module()->weight.grad().resolve_conj()), at::view_as_real(expected)));
      }
    }
  }
}

// DDP-28
LOCKSTEP_THREAD_TEST(DdpKinds, ComplexParametersAreAveraged, 2) {
  const auto input_for = [](int rank) {
    return at::full({1, 3}, c10::complex<double>(rank + 1, 1), at::kComplexDouble);
  };
  std::vector<at::Tensor> expected(2);
  for (int rank = 0; rank < 2; ++rank) {
    Wave alone;
    alone->forward(input_for(rank)).sum().backward();
    for (int i = 0; i < 2; ++i) {
      const auto half = alone->parameters()[i].grad() / 2;
      expected[i] = rank == 0 ? half : expected[i] + half;
    }
  }
  for (const bool as_view : {false, true}) {
    DistributedDataParallel ddp(Wave(), world.group(), {.gradient_as_bucket_view = as_view});
    // Pairs of reals travel.
    for (const auto& bucket : ddp.engine().reducer()->get_grad_buckets()) {
      EXPECT_EQ(bucket.buffer().scalar_type(), at::kDouble);
      EXPECT_EQ(bucket.buffer().numel(), bucket.parameters()[0].is_complex() ? 12 : 2);
    }
    for (int step = 0; step < 3; ++step) {
      zero_grads(ddp);
      ddp(input_for(world.rank())).sum().backward();
      EXPECT_TRUE(at::allclose(ddp.module()->phase.grad(), expected[0]));
      EXPECT_TRUE(at::allclose(ddp.module()->real.grad(), expected[1]));
    }
  }
}

/// Parameters of several dtypes, one of them with strides that overlap.
struct OddImpl : torch::nn::Module {
  OddImpl()
      : half(register_parameter("half", at::ones({3}, at::kHalf))),
        wide(register_parameter("wide", at::ones({3}, at::kDouble))),
        expanded(register_parameter("expanded", at::ones({1, 3}).expand({2, 3}))) {}
  at::Tensor forward(const at::Tensor& input) {
    return (input * half.to(at::kFloat) + input * wide.to(at::kFloat)).sum() + (expanded * input).sum();
  }
  at::Tensor half;
  at::Tensor wide;
  at::Tensor expanded;
};
TORCH_MODULE(Odd);

// DDP-24, DDP-28
LOCKSTEP_THREAD_TEST(DdpKinds, DtypesGoInBucketsOfTheirOwn, 2) {
  DistributedDataParallel ddp(Odd(), world.group(), {.init_sync = false});
  EXPECT_EQ(ddp.bucket_plan().buckets().size(), 3U);
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    ddp(at::full({3}, world.rank() + 1.0)).backward();
    EXPECT_TRUE(at::equal(ddp.module()->half.grad(), at::full({3}, 1.5, at::kHalf)));
    EXPECT_TRUE(at::equal(ddp.module()->wide.grad(), at::full({3}, 1.5, at::kDouble)));
    EXPECT_TRUE(at::equal(ddp.module()->expanded.grad(), at::full({2, 3}, 1.5)));
  }
}

class SyncBatchNormRanks : public ::testing::TestWithParam<int> {};

// One process with the whole batch is what it must equal, also with different batches per rank.
TEST_P(SyncBatchNormRanks, EqualBatchNormOverTheWholeBatch) {
  const auto whole = at::randn({12, 4, 3}, at::detail::createCPUGenerator(5), at::TensorOptions()) * 3 + 1;
  const auto weights = at::randn({12, 4, 3}, at::detail::createCPUGenerator(6), at::TensorOptions());
  auto reference = seeded(torch::nn::BatchNorm1d(4));
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> input_gradients;
  for (int step = 0; step < 2; ++step) {
    const auto input = (whole + step).requires_grad_();
    outputs.push_back(reference->forward(input));
    (outputs.back() * weights).sum().backward();
    input_gradients.push_back(input.grad());
  }
  testing::run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    // 1, 2, 3, … rows and the rest for the last.
    const int64_t begin = world.rank() * (world.rank() + 1) / 2;
    const int64_t rows = world.rank() + 1 < world.world_size() ? world.rank() + 1 : 12 - begin;
    auto layer = SyncBatchNorm(torch::nn::BatchNormOptions(4));
    seeded(layer);
    for (int step = 0; step < 2; ++step) {
      const auto input = (whole + step).narrow(0, begin, rows).clone().requires_grad_();
      const auto output = layer->forward(input);
      EXPECT_TRUE(at::allclose(output, outputs[step].narrow(0, begin, rows), 1e-4, 1e-5));
      (output * weights.narrow(0, begin, rows)).sum().backward();
      EXPECT_TRUE(at::allclose(input.grad(), input_gradients[step].narrow(0, begin, rows), 1e-3, 1e-5));
    }
    EXPECT_TRUE(at::allclose(layer->running_mean, reference->running_mean));
    EXPECT_TRUE(at::allclose(layer->running_var, reference->running_var));
    EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 2);
    auto gradient = layer->weight.grad().clone();
    all_reduce(gradient, world.group());
    EXPECT_TRUE(at::allclose(gradient, reference->weight.grad(), 1e-3, 1e-4));
    layer->eval();
    EXPECT_TRUE(layer->forward(whole).defined());
  });
}

// A penalty on the gradient of the input, as some losses have: its gradients reach through the statistics too.
TEST_P(SyncBatchNormRanks, AreTwiceDifferentiable) {
  const auto options = at::TensorOptions(at::kDouble);
  const auto whole = at::randn({12, 4, 3}, at::detail::createCPUGenerator(5), options) * 3 + 1;
  const auto weights = at::randn({12, 4, 3}, at::detail::createCPUGenerator(6), options);
  const auto penalties = at::randn({12, 4, 3}, at::detail::createCPUGenerator(7), options);
  // Of the input, the weight, and the weight that the penalty has in the loss.
  const auto second_gradients = [&](auto& layer, int64_t begin, int64_t rows) {
    const auto input = whole.narrow(0, begin, rows).clone().requires_grad_();
    const auto factor = weights.narrow(0, begin, rows).clone().requires_grad_();
    const auto loss = (layer->forward(input).pow(2) * factor).sum();
    const auto first = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
    const auto penalty = (first.pow(2) * penalties.narrow(0, begin, rows)).sum();
    return torch::autograd::grad({penalty}, {input, layer->weight, factor});
  };
  auto reference = seeded(torch::nn::BatchNorm1d(4));
  reference->to(at::kDouble);
  const auto wanted = second_gradients(reference, 0, 12);
  testing::run_threads_in_gtest({.world_size = GetParam()}, [&](const World& world) {
    const int64_t begin = world.rank() * (world.rank() + 1) / 2;
    const int64_t rows = world.rank() + 1 < world.world_size() ? world.rank() + 1 : 12 - begin;
    auto layer = SyncBatchNorm(torch::nn::BatchNormOptions(4));
    seeded(layer)->to(at::kDouble);
    auto found = second_gradients(layer, begin, rows);
    EXPECT_TRUE(at::allclose(found[0], wanted[0].narrow(0, begin, rows), 1e-8, 1e-8));
    EXPECT_TRUE(at::allclose(found[2], wanted[2].narrow(0, begin, rows), 1e-8, 1e-8));
    all_reduce(found[1], world.group());
    EXPECT_TRUE(at::allclose(found[1], wanted[1], 1e-8, 1e-8));
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, SyncBatchNormRanks, ::testing::Values(1, 2, 3));

// DDP-61
LOCKSTEP_THREAD_TEST(DdpSparse, RowsThatTheMetadataLacksAreNamed, 2) {
  DistributedDataParallel ddp(seeded(Bag(true)), world.group());
  const auto output = ddp(rows_of(world, 0));
  ddp.set_sparse_metadata({{"bag.weight", at::tensor({1, 3, 4})}});  // without 2
  expect_error([&] { output.sum().backward(); }, {"'bag.weight'", "sparse metadata", "sorted"});
}

// DDP-79, DDP-82: what mixed precision casts and what it leaves
LOCKSTEP_THREAD_TEST(DdpKinds, MixedPrecisionLeavesComplexParametersAndCastsSparseGradients, 2) {
  DistributedDataParallel sparse(seeded(Bag(true)), world.group(),
                                 {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  sparse(rows_of(world, 0)).sum().backward();
  EXPECT_TRUE(sparse.module()->bag->weight.grad().is_sparse());
  EXPECT_EQ(sparse.module()->bag->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(sparse.module()->fc->weight.grad().scalar_type(), at::kFloat);

  struct WatchedImpl : WaveImpl {
    at::Tensor forward(const at::Tensor& input) {
      seen = {phase.scalar_type(), real.scalar_type()};
      low.emplace(real.storage().getWeakStorageImpl());
      return WaveImpl::forward(input);
    }
    std::vector<at::ScalarType> seen;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> low;
  };
  const auto input_for = [](int rank) {
    return at::full({1, 3}, c10::complex<double>(rank + 1, 1), at::kComplexDouble);
  };
  at::Tensor expected;
  for (int rank = 0; rank < 2; ++rank) {
    Wave alone;
    alone->forward(input_for(rank)).sum().backward();
    const auto half = alone->phase.grad() / 2;
    expected = expected.defined() ? expected + half : half;
  }
  DistributedDataParallel ddp(std::make_shared<WatchedImpl>(), world.group(),
                              {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  for (int step = 0; step < 2; ++step) {
    zero_grads(ddp);
    ddp(input_for(world.rank())).sum().backward();
    EXPECT_EQ(ddp.module()->seen, (std::vector<at::ScalarType>{at::kComplexDouble, at::kBFloat16}));
    EXPECT_TRUE(at::allclose(ddp.module()->phase.grad(), expected));
    EXPECT_EQ(ddp.module()->real.grad().scalar_type(), at::kDouble);
    EXPECT_TRUE(ddp.module()->low->expired()) << "copies are freed while nothing is computed";
  }
}

// DDP-99
LOCKSTEP_THREAD_TEST(DdpKinds, SyncBatchNormInACpuModuleIsRefusedByName, 2) {
  struct NormedImpl : MlpImpl {
    NormedImpl() : MlpImpl({4, 2}) { register_module("norm", SyncBatchNorm(2)); }
  };
  expect_error([&] { DistributedDataParallel(std::make_shared<NormedImpl>(), world.group()); },
               {"'norm'", "SyncBatchNorm"});
}

}  // namespace
}  // namespace lockstep
