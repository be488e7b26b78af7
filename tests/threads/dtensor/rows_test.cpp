// What rows of the checklist promise beside the values of operators: options that count, errors that come early and
// name what they mean, memory that is nobody else's, collectives that are not made.
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/factories.h"
#include "lockstep/dtensor/implicit_replication.h"
#include "lockstep/dtensor/layout_checker.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/tp/loss_parallel.h"
#include "tests/support/ddp_models.h"

namespace lockstep::dtensor_rows_test {
namespace {

using ddp_models::Warnings;
using testing::check_equal;
using testing::expect_error;

at::Tensor counted(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes).clone();
}

at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator);
}

DeviceMesh line(const World& world) {
  return init_device_mesh("cpu", {world.world_size()});
}

std::size_t launches(const testing::Recorder& recorder) {
  return recorder.events("launch").size();
}

// TP-20, TP-31: a gradient that is said to be terms stays so; what cannot be is refused at once
LOCKSTEP_THREAD_TEST(DTensorRows, FromLocalGivesTheGradientItWasAskedFor, 2) {
  const auto mesh = line(world);
  const auto w_whole = numbers({3, 4}, 1);
  const auto w = distribute_tensor(w_whole, mesh, {Shard(1)});
  const auto x = numbers({2, 3}, 2).requires_grad_();
  DTensor::from_local(x, mesh, {Replicate()}, {.grad_placements = Placements{Partial()}})
      .tensor()
      .mm(w)
      .sum()
      .backward();
  const auto mine = at::ones({2, 2}).mm(w_whole.chunk(2, 1)[static_cast<std::size_t>(world.rank())].t());
  check_equal("own term", x.grad(), mine, {.relative = 1e-5, .absolute = 1e-6});
  // Dims count from the end, too.
  EXPECT_EQ(DTensor::from_local(x.detach(), mesh, {Shard(-1)}).tensor().sizes(), (at::IntArrayRef{2, 6}));
  for (const auto& wrong : {Placements{Shard(0), Shard(0)}, Placements{Shard(7)}}) {
    expect_error([&] { DTensor::from_local(x, mesh, {Replicate()}, {.grad_placements = wrong}); }, {"rank"});
    const auto whole = DTensor::from_local(x.detach(), mesh, {Replicate()});
    expect_error([&] { whole.to_local({.grad_placements = wrong}); }, {"rank"});
    expect_error([&] { whole.full_tensor({.grad_placements = wrong}); }, {"rank"});
  }
}

// TP-21: of a gathered tensor that ranks use in their own ways the gradients are summed, if the program says so
LOCKSTEP_THREAD_TEST(DTensorRows, FullTensorTakesTermsForItsGradient, 2) {
  const auto mesh = line(world);
  for (const bool is_partial : {false, true}) {
    const auto leaf = counted({2, 3}).requires_grad_();
    const auto tensor = DTensor::from_local(leaf, mesh, {Shard(0)});
    const auto whole =
        is_partial ? tensor.full_tensor({.grad_placements = Placements{Partial()}}) : tensor.full_tensor();
    (whole * (1.0 + world.rank())).sum().backward();
    check_equal("gradient", leaf.grad(), at::full({2, 3}, is_partial ? 3.0 : 1.0 + world.rank()));
  }
}

struct Nothing : torch::autograd::Function<Nothing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, const torch::autograd::tensor_list&) {
    return {at::Tensor()};
  }
};

// TP-31: a gradient that is none goes through as none
LOCKSTEP_THREAD_TEST(DTensorRows, UndefinedGradientsPass, 2) {
  const auto mesh = line(world);
  const auto leaf = counted({2, 3}).requires_grad_();
  const auto tensor = DTensor::from_local(leaf, mesh, {Shard(0)});
  const testing::Recorder recorder;
  Nothing::apply(tensor.tensor()).sum().backward();
  Nothing::apply(tensor.redistribute({Replicate()}).to_local()).sum().backward();
  EXPECT_FALSE(leaf.grad().defined());
}

// TP-32: values are rounded on the way there, gradients on the way back, and theirs on the way there again
LOCKSTEP_THREAD_TEST(DTensorRows, DtypesOfCollectivesRound, 2) {
  const auto mesh = line(world);
  const auto leaf = numbers({2, 3}, 1).to(at::kDouble).requires_grad_();
  const auto tensor = DTensor::from_local(leaf, mesh, {Shard(0)});
  const auto rounded = [](const at::Tensor& x, at::ScalarType dtype) { return x.detach().to(dtype).to(at::kDouble); };
  const auto low = tensor.redistribute({Replicate()}, {.forward_dtype = at::kFloat, .backward_dtype = at::kBFloat16});
  const auto rank = static_cast<std::size_t>(world.rank());
  check_equal("forward", rounded(low.to_local(), at::kDouble).chunk(2)[rank], rounded(leaf, at::kFloat));
  const auto weights = numbers({4, 3}, 2).requires_grad_();
  const auto product = (low.to_local() * weights).sum();
  const auto first = torch::autograd::grad({product}, {leaf}, {}, std::nullopt, /*create_graph=*/true)[0];
  EXPECT_EQ(first.scalar_type(), at::kDouble);
  check_equal("backward", first.detach(), rounded(weights, at::kBFloat16).chunk(2)[rank]);
  // What is asked of that gradient travels as the values did.
  const auto asked = numbers({2, 3}, 3).to(at::kDouble);
  const auto half = tensor.redistribute({Replicate()}, {.forward_dtype = at::kBFloat16});
  const auto of_leaf =
      torch::autograd::grad({(half.to_local() * weights).sum()}, {leaf}, {}, std::nullopt, /*create_graph=*/true)[0];
  const auto second = torch::autograd::grad({(of_leaf * asked).sum()}, {weights})[0];
  check_equal("second", second.chunk(2)[rank].to(at::kDouble), rounded(asked, at::kBFloat16));
  // Where it lies stays as it is, and still gets the dtype.
  EXPECT_EQ(tensor.redistribute({Shard(0)}, {.forward_dtype = at::kFloat}).tensor().scalar_type(), at::kFloat);
}

// TP-32: the one who comes first does not wait for the other
TEST(DTensorRows, AsyncRedistributesReturnBeforeTheOthersCome) {
  std::atomic<bool> has_returned = false;
  testing::run_threads_in_gtest({.world_size = 2}, [&](const World& world) {
    const auto mesh = line(world);
    const auto tensor = distribute_tensor(counted({4, 3}), mesh, {Shard(0)});
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (world.rank() == 1 && !has_returned && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_TRUE(world.rank() == 0 || has_returned);
    const auto whole = tensor.redistribute({Replicate()}, {.async_op = true});
    if (world.rank() == 0) has_returned = true;
    check_equal("whole", whole.to_local(), counted({4, 3}));
  });
}

// TP-19, TP-20: along all axes of a mesh; what is given stays the program's
LOCKSTEP_THREAD_TEST(DTensorRows, SourcesReachAllOfASquare, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2});
  const auto mine = counted({4, 2}) + 100 * world.rank();
  check_equal("distributed", distribute_tensor(mine, mesh).to_local(), counted({4, 2}));
  check_equal("cut", distribute_tensor(mine, mesh, {Shard(0), Shard(1)}).full_tensor(), counted({4, 2}));
  const auto made_equal = DTensor::from_local(mine.clone(), mesh, {Replicate(), Replicate()}, {.run_check = true});
  check_equal("made equal", made_equal.to_local(), counted({4, 2}));

  const auto own = distribute_tensor(mine, mesh, {}, {.src_data_rank = std::nullopt});
  own.tensor().zero_();
  check_equal("given", mine, counted({4, 2}) + 100 * world.rank());

  // All of them hear of one that differs, whatever axis it is on.
  const auto more = at::ones({world.rank() == 3 ? 3 : 2, 2});
  expect_error([&] { DTensor::from_local(more, mesh, {Shard(0), Shard(0)}, {.run_check = true}); },
               {"from_local()", "Float[8, 2]; Float[8, 2]; Float[8, 2]; Float[12, 2]"});
  const auto other = at::ones({2, 2}, world.rank() == 2 ? at::kDouble : at::kFloat);
  expect_error([&] { DTensor::from_local(other, mesh, {Shard(0), Shard(0)}, {.run_check = true}); }, {"Double[8, 2]"});
  // Parts that are uneven, as is said, are parts of one tensor.
  const Layout uneven(mesh, {Shard(0), Shard(1)}, {3, 3});
  const auto part =
      DTensor::from_local(uneven.cut(counted({3, 3})).contiguous(), mesh, {Shard(0), Shard(1)},
                          {.run_check = true, .shape = uneven.sizes(), .stride = std::vector<int64_t>{3, 1}});
  check_equal("uneven", part.full_tensor(), counted({3, 3}));
}

// TP-18: DTensors of two meshes, and numbers whose gradient nobody would get, are refused, and so are ordinary tensors
// that are joined or written
LOCKSTEP_THREAD_TEST(DTensorRows, RefuseWhatDoesNotBelongTogether, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(counted({4, 2}), mesh, {Shard(0)});
  const auto other = init_device_mesh("cpu", {1, 2});
  const auto y = distribute_tensor(counted({4, 2}), other, {Replicate(), Shard(0)});
  expect_error([&] { x.tensor().add(y.tensor()); }, {"aten::add", "two meshes"});
  const auto number = at::ones({}).requires_grad_();
  expect_error([&] { x.tensor().mul(number); }, {"aten::mul", "ordinary", "'other'"});
  expect_error([&] { at::cat({x.tensor(), counted({4, 2})}); }, {"aten::cat", "ordinary"});
  auto out = at::empty({4, 2});
  expect_error([&] { at::add_out(out, x.tensor(), x.tensor()); },
               {"aten::add would write", "ordinary tensor of sizes [4, 2]"});
  // A number without a gradient is welcome.
  check_equal("product", DTensor(x.tensor().mul(at::full({}, 2.0F))).full_tensor(), counted({4, 2}) * 2);
}

// TP-18: what is written into is what is returned, and its values are the result's
LOCKSTEP_THREAD_TEST(DTensorRows, OutArgumentsAreReturned, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(counted({4, 2}), mesh, {Shard(0)});
  auto out = distribute_tensor(at::zeros({4, 2}), mesh, {Shard(0)}).tensor();
  const auto result = at::add_out(out, x.tensor(), x.tensor());
  EXPECT_TRUE(result.is_same(out));
  check_equal("sum", DTensor(out).full_tensor(), counted({4, 2}) * 2);
  check_equal("operand", x.full_tensor(), counted({4, 2}));
}

// TP-18: a scope of ImplicitReplication knows lists and indices too
LOCKSTEP_THREAD_TEST(DTensorRows, ImplicitReplicationTakesListsAndIndices, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(counted({4, 2}), mesh, {Shard(1)});
  const auto index = at::tensor({3, 0});
  const ImplicitReplication scope;
  check_equal("joined", DTensor(at::cat({x.tensor(), counted({4, 2})})).full_tensor(),
              at::cat({counted({4, 2}), counted({4, 2})}));
  check_equal("indexed", DTensor(x.tensor().index({index})).full_tensor(), counted({4, 2}).index({index}));
}

// TP-22: options of factories
TEST(DTensorRows, FactoriesTakeDefaultsAndOptions) {
  const auto before = at::get_default_dtype();
  at::set_default_dtype(caffe2::TypeMeta::Make<double>());
  testing::run_threads_in_gtest({.world_size = 2}, [](const World& world) {
    const auto mesh = line(world);
    EXPECT_EQ(dtensor::ones({4}, {.mesh = mesh}).tensor().scalar_type(), at::kDouble);
    const auto generator = [] { return at::make_generator<at::CPUGeneratorImpl>(uint64_t{3}); };
    const dtensor::FactoryOptions options = {
        .mesh = mesh, .placements = {Shard(0)}, .dtype = at::kFloat, .requires_grad = true, .generator = generator()};
    for (const bool is_normal : {false, true}) {
      auto given = options;
      given.generator = generator();
      const auto made = is_normal ? dtensor::randn({5, 2}, given) : dtensor::rand({5, 2}, given);
      EXPECT_TRUE(made.tensor().requires_grad() && made.tensor().is_leaf());
      EXPECT_EQ(made.placements(), (Placements{Shard(0)}));
      EXPECT_EQ(made.tensor().scalar_type(), at::kFloat);
      check_equal("values", made.full_tensor().detach(),
                  is_normal ? at::randn({5, 2}, generator(), at::kFloat) : at::rand({5, 2}, generator(), at::kFloat));
    }
    auto like = dtensor::zeros({5, 2}, options).tensor();
    EXPECT_EQ(at::rand_like(like, at::TensorOptions(at::kDouble)).scalar_type(), at::kDouble);
    EXPECT_EQ(at::randn_like(like, at::TensorOptions(at::kDouble)).scalar_type(), at::kDouble);
  });
  at::set_default_dtype(before);
}

// TP-22: that drawing for a tensor that is cut costs what it costs one device is said
LOCKSTEP_THREAD_TEST(DTensorRows, SayWhatDrawingCosts, 2) {
  const auto mesh = line(world);
  const Warnings warnings;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
  auto cut = distribute_tensor(at::zeros({4}), mesh, {Shard(0)}).tensor();
  cut.uniform_(0, 1, generator);
  EXPECT_EQ(warnings.count("at the cost of one device"), 1);
  auto whole = distribute_tensor(at::zeros({4}), mesh).tensor();
  whole.uniform_(0, 1, generator);
  EXPECT_EQ(warnings.count("at the cost of one device"), 1);
}

// TP-22, TP-44: the ranks of all axes take over one state, those that stood otherwise are told, and once they have,
// nothing more is sent
LOCKSTEP_PROCESS_TEST(DTensorRows, MeshesOfTwoAxesDrawFromOneGenerator, 2) {
  const auto mesh = init_device_mesh("cpu", {2, 1});
  at::manual_seed(static_cast<uint64_t>(world.rank()) + 5);
  auto one = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5});
  const Warnings warnings;
  check_equal("first", dtensor::rand({6}, {.mesh = mesh}).to_local(), at::rand({6}, one));
  EXPECT_EQ(warnings.count("stood otherwise"), world.rank() == 0 ? 0 : 1);
  const testing::Recorder recorder;
  check_equal("second", dtensor::rand({6}, {.mesh = mesh}).to_local(), at::rand({6}, one));
  EXPECT_EQ(launches(recorder), 0U);
}

// TP-18: the cheapest way is taken: a sum is scattered, a part gathered that another axis has made small
LOCKSTEP_THREAD_TEST(DTensorRows, ProductsMoveTheFewestBytes, 4) {
  const auto mesh = line(world);
  const auto terms = DTensor::from_local(numbers({2, 8}, 1), mesh, {Partial()});
  const auto rows = distribute_tensor(numbers({8, 3}, 2), mesh, {Shard(0)});
  testing::Recorder recorder;
  terms.tensor().mm(rows);  // 16 numbers are summed and scattered, where 24 would be gathered
  testing::expect_exact_order(recorder.events("launch"), {"reduce_scatter_tensor(redistribute)"});
  recorder.clear();

  const auto square = init_device_mesh("cpu", {2, 2});
  const auto x = distribute_tensor(numbers({8, 4}, 3), square, {Shard(0), Shard(1)});
  const auto y = distribute_tensor(numbers({4, 12}, 4), square, {Replicate(), Shard(1)});
  recorder.clear();
  x.tensor().mm(y);  // half of x is gathered
  testing::expect_exact_order(recorder.events("launch"), {"all_gather_into_tensor"});
}

// TP-18, TP-20: strides of the whole have the order of the parts', and are the same on all ranks, also of a strided cut
// of which one has nothing
LOCKSTEP_THREAD_TEST(DTensorRows, StridesAreThoseOfTheParts, 2) {
  const auto mesh = line(world);
  const auto even = DTensor::from_local(at::zeros({3, 4}).t(), mesh, {Shard(1)});
  EXPECT_EQ(even.tensor().strides(), (at::IntArrayRef{1, 4}));
  const Layout layout(mesh, {StridedShard(0, 2)}, {2, 3});
  const auto uneven = DTensor::from_local(at::zeros({3, layout.local_sizes()[0]}).t(), mesh, layout.placements(),
                                          {.shape = layout.sizes(), .stride = std::vector<int64_t>{3, 1}});
  EXPECT_EQ(uneven.tensor().strides(), (at::IntArrayRef{3, 1}));
}

// TP-18: conjugates are what they are called, without being copied
LOCKSTEP_THREAD_TEST(DTensorRows, ConjugatesAreComputedWith, 2) {
  const auto mesh = line(world);
  const auto values = at::complex(numbers({4, 2}, 1), numbers({4, 2}, 2));
  const auto x = distribute_tensor(values, mesh, {Shard(0)});
  check_equal("times a number", DTensor(x.tensor().conj().mul(2)).full_tensor(), values.conj().mul(2));
  check_equal("plus itself", DTensor(x.tensor().conj().add(x.tensor())).full_tensor(), values.conj().add(values));
}

// TP-18: a view that had to be copied and then got other data has nothing to do any more with what it was a view of
LOCKSTEP_THREAD_TEST(DTensorRows, CopiedViewsTakeOtherData, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(counted({4, 2}), mesh, {Shard(0)}).tensor();
  auto row = x.select(0, 1);
  row.set_data(distribute_tensor(at::ones({2}), mesh).tensor());
  x.add_(1);
  check_equal("row", DTensor(row).to_local(), at::ones({2}));
}

// TP-18: fused kernels step parts with gradients that lie otherwise, but do not write those; and they step no terms
LOCKSTEP_THREAD_TEST(DTensorRows, FusedStepsWriteWhatTheyAreGiven, 2) {
  const auto mesh = line(world);
  const auto step = [](const at::Tensor& parameter, const at::Tensor& gradient,
                       const std::optional<at::Tensor>& scale) {
    const at::Tensor list[] = {parameter};
    at::_fused_sgd_(list, {gradient}, {}, 0, 0, 0.5, 0, false, false, false, scale,
                    scale ? std::optional(at::zeros({})) : std::nullopt);
  };
  const auto parameter = distribute_tensor(counted({4, 2}), mesh, {Shard(0)});
  const auto gradient = distribute_tensor(at::ones({4, 2}), mesh);
  step(parameter, gradient, std::nullopt);
  check_equal("stepped", parameter.full_tensor(), counted({4, 2}) - 0.5);
  expect_error([&] { step(parameter, gradient, at::full({}, 2.0F)); }, {"aten::_fused_sgd_", "in place"});
  check_equal("gradient", gradient.to_local(), at::ones({4, 2}));
  const auto terms = DTensor::from_local(at::ones({4}), mesh, {Partial()});
  expect_error([&] { terms.tensor().fill_(3); }, {"aten::fill_", "terms cannot be filled"});
  expect_error([&] { step(terms, terms, std::nullopt); }, {"aten::_fused_sgd_", "terms of a sum"});
}

// TP-18: dropout inside of attention has no rule
LOCKSTEP_THREAD_TEST(DTensorRows, AttentionRefusesDropout, 2) {
  const auto mesh = line(world);
  const auto q = distribute_tensor(numbers({2, 2, 4, 8}, 1), mesh, {Shard(1)}).tensor();
  expect_error([&] { at::_scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5); }, {"has no rule", "dropout_p"});
}

struct BufferedImpl : torch::nn::Module {
  at::Tensor mean = register_buffer("mean", at::ones({4}));
};

// TP-61: buffers are compared, results in lists too, and each checker counts from where it began
LOCKSTEP_THREAD_TEST(DTensorRows, CheckersSeeBuffersListsAndWhereTheyBegan, 2) {
  const auto mesh = line(world);
  BufferedImpl module;
  set_layout(module.mean, Layout(mesh, {Replicate()}, {4}));
  check_layouts(module);
  module.mean.add_(world.rank());
  expect_error([&] { check_layouts(module); }, {"buffer 'mean'", "rank 1 holds other values"});

  const auto x = DTensor::from_local(at::ones({4, 2}), mesh, {Replicate()});
  {
    const LayoutChecker before;
    x.tensor().mul(2);
  }
  if (world.rank() == 1) x.to_local().fill_(3);
  const LayoutChecker checker;
  expect_error([&] { x.tensor().split(2); }, {"operator 0", "aten::split", "rank 1"});
  x.tensor().new_empty({3});  // memory that nobody has written yet
  at::empty_like(x.tensor());
}

// TP-46: large logits on one rank; scopes inside of each other
LOCKSTEP_THREAD_TEST(DTensorRows, LossesOfCutClassesBearLargeLogits, 2) {
  const auto mesh = line(world);
  auto whole = numbers({4, 6}, 1);
  whole.select(1, 5).add_(200);
  whole.requires_grad_();
  const auto target = at::tensor({0, 5, 2, 5}, at::kLong);
  at::cross_entropy_loss(whole, target).backward();
  const auto logits = distribute_tensor(whole.detach().clone().requires_grad_(), mesh, {Shard(1)});
  const LossParallel scope;
  { const LossParallel inner; }
  const testing::Recorder recorder;
  const auto loss = at::cross_entropy_loss(logits.tensor(), target);
  testing::expect_none(recorder.events("launch"), "all_gather_into_tensor");
  loss.backward();
  check_equal("loss", DTensor(loss).full_tensor().detach(), at::cross_entropy_loss(whole, target).detach(),
              {.relative = 1e-5, .absolute = 1e-5});
  check_equal("gradient", DTensor(logits.tensor().grad()).full_tensor(), whole.grad(),
              {.relative = 1e-5, .absolute = 1e-6});
}

// TP-46: of logits in a short dtype only the results are rounded, forward and backward; now and then to the other side
LOCKSTEP_THREAD_TEST(DTensorRows, LossesOfShortLogitsAreRoundedOnce, 2) {
  const auto mesh = line(world);
  const auto values = numbers({2, 2000}, 1).to(at::kBFloat16);
  const auto logits = distribute_tensor(values.clone().requires_grad_(), mesh, {Shard(1)});
  const LossParallel scope;
  const auto logarithms = logits.tensor().log_softmax(1);
  const auto all = DTensor(logarithms).full_tensor().detach();
  const auto differ = [](const at::Tensor& actual, const at::Tensor& expected) {
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    return actual.ne(expected.to(at::kBFloat16)).sum().item<int64_t>();
  };
  EXPECT_LT(differ(all, values.to(at::kDouble).log_softmax(1)), 20);
  logarithms.sum().backward();
  const auto gradient = DTensor(logits.tensor().grad()).full_tensor();
  EXPECT_LT(differ(gradient, 1 - all.to(at::kDouble).exp() * 2000), 20);
}

// TP-46: a gradient that a hook has written is no longer the one nll_loss made
LOCKSTEP_THREAD_TEST(DTensorRows, LossesSeeGradientsThatHooksHaveWritten, 2) {
  const auto mesh = line(world);
  const auto values = numbers({4, 6}, 1);
  const auto target = at::tensor({0, 5, 2, 5}, at::kLong);
  const auto gradient_of = [&](const at::Tensor& logits) {
    const LossParallel scope;
    const auto logarithms = logits.log_softmax(1);
    logarithms.register_hook([](const at::Tensor& gradient) { gradient.mul_(3); });
    at::nll_loss(logarithms, target).backward();
    return logits.grad();
  };
  const auto expected = gradient_of(values.clone().requires_grad_());
  const auto logits = distribute_tensor(values.clone().requires_grad_(), mesh, {Shard(1)});
  check_equal("gradient", DTensor(gradient_of(logits.tensor())).full_tensor(), expected,
              {.relative = 1e-5, .absolute = 1e-6});
}

}  // namespace
}  // namespace lockstep::dtensor_rows_test
