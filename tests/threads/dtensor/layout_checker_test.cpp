// LayoutChecker and check_layouts(): programs that are right, and ones in which a rank holds something else.
#include "lockstep/dtensor/layout_checker.h"

#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/redistribute_limit.h"
#include "lockstep/dtensor/redistribute_plan.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::layout_checker_test {

using testing::expect_error;
using testing::line;
using testing::numbers;

// TP-61: a program that is right passes, forward and backward, on one axis and on two.
LOCKSTEP_THREAD_TEST(LayoutChecker, LetsARightProgramPass, 4) {
  for (const auto& shape : {std::vector<int64_t>{4}, {2, 2}}) {
    const auto mesh = init_device_mesh("cpu", shape);
    const Placements whole(shape.size(), Replicate());
    auto rows = whole;
    rows.back() = Shard(0);
    auto columns = whole;
    columns.back() = Shard(1);
    const auto x = distribute_tensor(numbers({6, 4}, 1).requires_grad_(), mesh, whole);
    const auto w = distribute_tensor(numbers({4, 5}, 2).requires_grad_(), mesh, columns);
    const auto v = distribute_tensor(numbers({5, 3}, 3).requires_grad_(), mesh, rows);
    const LayoutChecker checker;
    at::gelu(x.tensor().mm(w)).mm(v).pow(2).sum().backward();
    EXPECT_GT(checker.compared(), 10);
  }
}

// TP-61: without one nothing is compared.
LOCKSTEP_THREAD_TEST(LayoutChecker, SendsNothingWhenItIsGone, 2) {
  const auto x = DTensor::from_local(at::full({2}, world.rank()), line(world), {Replicate()});
  { const LayoutChecker checker; }
  testing::Recorder recorder;
  x.tensor().mul(2);
  EXPECT_TRUE(recorder.events("launch").empty());
}

// TP-61: a replica that is none is named where it comes in.
LOCKSTEP_THREAD_TEST(LayoutChecker, NamesAReplicaThatDiffers, 3) {
  const auto mesh = line(world);
  const LayoutChecker checker;
  const auto good = DTensor::from_local(at::ones({2, 2}), mesh, {Replicate()});
  const auto values = at::full({2, 2}, world.rank() == 1 ? 2.0F : 1.0F);
  expect_error(
      [&] { DTensor::from_local(values, mesh, {Replicate()}); },
      {"operator 1", "DTensor::from_local()", "rank 1 holds other values", "mesh dim 0", "Replicate()", "[2, 2]"});
  DTensor::from_local(values, mesh, {Shard(0)});  // said for what it is, it is right
}

// TP-61: values that were changed behind its back are found at the next operator, which is named.
LOCKSTEP_THREAD_TEST(LayoutChecker, NamesTheOperator, 2) {
  const auto mesh = line(world);
  const auto x = DTensor::from_local(at::ones({2, 2}), mesh, {Replicate()});
  if (world.rank() == 1) x.to_local().fill_(3);
  const LayoutChecker checker;
  expect_error([&] { x.tensor().mul(2); }, {"operator 0", "result 0 of aten::mul", "rank 1"});
}

// TP-61: so is a dropout for which ranks were seeded differently.
LOCKSTEP_THREAD_TEST(LayoutChecker, NamesADropoutOfAnotherSeed, 2) {
  const auto mesh = line(world);
  const auto x = DTensor::from_local(at::ones({64}), mesh, {Replicate()});
  const LayoutChecker checker;
  const auto drop = [&](uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    return at::empty_like(x.tensor()).bernoulli_(0.5, generator) * x.tensor();
  };
  drop(1);
  expect_error([&] { drop(1 + static_cast<uint64_t>(world.rank())); }, {"result 0 of aten::bernoulli_", "rank 1"});
}

// TP-61: in backward too.
LOCKSTEP_THREAD_TEST(LayoutChecker, NamesTheOperatorOfBackward, 2) {
  const auto mesh = line(world);
  const auto x = DTensor::from_local(at::ones({2, 2}), mesh, {Replicate()});
  auto w = distribute_tensor(at::ones({2, 2}).requires_grad_(), mesh, {Replicate()});
  const auto loss = x.tensor().mul(w).sum();
  if (world.rank() == 0) x.to_local().data().fill_(3);  // past autograd
  const LayoutChecker checker;
  expect_error([&] { loss.backward(); }, {"aten::mul", "in backward of MulBackward0", "rank 1"});
}

// TP-61: ranks that call different operators, or on different sizes, learn who does what.
LOCKSTEP_THREAD_TEST(LayoutChecker, NamesOperatorsThatDiffer, 2) {
  const auto mesh = line(world);
  const auto x = DTensor::from_local(at::ones({2, 2}), mesh, {Replicate()});
  const LayoutChecker checker;
  expect_error([&] { static_cast<void>(world.rank() == 0 ? x.tensor().mul(2) : x.tensor().add(2)); },
               {"rank 0: operator 0: result 0 of aten::mul", "rank 1: operator 0: result 0 of aten::add"});
  expect_error([&] { DTensor::from_local(at::ones({2 + world.rank()}), mesh, {Shard(0)}); },
               {"rank 0: operator 1: DTensor::from_local(): Float[4]", "Float[6]"});
}

// TP-61: on a mesh of two axes replicas are compared along theirs, and all ranks hear of it.
LOCKSTEP_THREAD_TEST(LayoutChecker, ComparesAlongAxesThatReplicate, 4) {
  const auto mesh = init_device_mesh("cpu", {2, 2});
  const LayoutChecker checker;
  DTensor::from_local(at::full({2}, world.rank() / 2), mesh, {Shard(0), Replicate()});
  expect_error([&] { DTensor::from_local(at::full({2}, world.rank() / 2), mesh, {Replicate(), Shard(0)}); },
               {"ranks 2, 3", "mesh dim 0"});
  expect_error([&] { DTensor::from_local(at::full({2}, world.rank() == 3 ? 1 : 0), mesh, {Shard(0), Replicate()}); },
               {"rank 3 holds", "mesh dim 1"});
}

struct NormImpl : torch::nn::Module {
  NormImpl() {
    weight = register_parameter("weight", at::ones({4}));
    matrix = register_parameter("matrix", at::ones({2, 4}));
  }
  at::Tensor weight;
  at::Tensor matrix;
};

// TP-61: registered parameters: replicas are equal, parts as large as they should be.
LOCKSTEP_THREAD_TEST(LayoutChecker, ChecksTheParametersOfAModule, 2) {
  const auto mesh = line(world);
  NormImpl norm;
  check_layouts(norm);  // nothing to compare
  set_layout(norm.weight, Layout(mesh, {Replicate()}, {4}));
  set_layout(norm.matrix, Layout(mesh, {Shard(0)}, {4, 4}));
  {
    const at::NoGradGuard no_grad;
    norm.matrix.mul_(world.rank());
  }
  check_layouts(norm);
  {
    const at::NoGradGuard no_grad;
    norm.weight.add_(world.rank());
  }
  expect_error([&] { check_layouts(norm); }, {"parameter 'weight'", "rank 1 holds other values"});
  {
    const at::NoGradGuard no_grad;
    norm.weight.fill_(1);
    if (world.rank() == 1) norm.matrix.set_data(at::ones({3, 4}));
  }
  expect_error([&] { check_layouts(norm); }, {"parameter 'matrix'", "rank 1 holds a local tensor of other sizes"});
  if (world.rank() == 0) clear_layout(norm.matrix);
  expect_error([&] { check_layouts(norm); }, {"rank 0: 1 tensors", "rank 1: 2 tensors"});
}

// TP-59: a plan can be asked for before it runs; a limit names the operator that would exceed it.
LOCKSTEP_THREAD_TEST(LayoutChecker, PlansOfDTensorsArePrintedAndLimited, 2) {
  const auto mesh = line(world);
  const auto x = distribute_tensor(numbers({64, 64}, 1), mesh, {Shard(0)});
  const auto plan = plan_redistribute(x.layout(), {Replicate()}, x.tensor().scalar_type());
  EXPECT_THAT(plan.to_string(), ::testing::HasSubstr("all_gather over 2 ranks, 8192 bytes"));
  const auto y = distribute_tensor(numbers({64, 64}, 2), mesh, {Shard(0)});
  const RedistributeLimit limit(1000);
  expect_error([&] { x.tensor().mm(y); }, {"for aten::mm", "RedistributeLimit is 1000", "all_to_all"});
}

}  // namespace lockstep::layout_checker_test
