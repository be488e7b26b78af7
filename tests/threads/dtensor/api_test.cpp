// Making DTensors, reading them, and what their gradients are.
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/world.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/implicit_replication.h"
#include "lockstep/mesh/mesh_scope.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"
#include "tests/support/dtensor_line.h"

namespace lockstep::dtensor_api_test {
namespace {

using testing::check_equal;
using testing::expect_error;
using testing::line;

at::Tensor counted(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).view(sizes).clone();
}

// TP-19: the values of the source count, by default group rank 0's; or each rank's own, and nothing is sent
LOCKSTEP_THREAD_TEST(DistributeTensor, TakesTheSourcesValues, 3) {
  const auto mesh = line(world);
  const auto mine = counted({4, 2}) + 100 * world.rank();
  for (const int source : {0, 2}) {
    const auto tensor = distribute_tensor(mine, mesh, {Shard(0)}, {.src_data_rank = source});
    check_equal("whole", tensor.full_tensor(), counted({4, 2}) + 100 * source);
  }
  check_equal("default", distribute_tensor(mine, mesh).to_local(), counted({4, 2}));
  const testing::Recorder recorder;
  const auto own = distribute_tensor(mine, mesh, {Shard(0)}, {.src_data_rank = std::nullopt});
  EXPECT_TRUE(recorder.events("launch").empty());
  check_equal("own", own.to_local(), mine.split(2)[std::min(world.rank(), 1)].narrow(0, 0, world.rank() < 2 ? 2 : 0));
}

// TP-19: leaves only; a DTensor passes unchanged or not at all
LOCKSTEP_THREAD_TEST(DistributeTensor, TakesLeavesAndWhatIsDistributedSo, 2) {
  const auto mesh = line(world);
  const auto leaf = counted({4}).requires_grad_();
  expect_error([&] { distribute_tensor(leaf * 2, mesh, {Shard(0)}); }, {"leaf", "from_local"});
  const auto tensor = distribute_tensor(leaf, mesh, {Shard(0)});
  EXPECT_TRUE(tensor.tensor().is_leaf() && tensor.tensor().requires_grad());
  EXPECT_TRUE(distribute_tensor(tensor, mesh, {Shard(-1)}).tensor().is_same(tensor));
  expect_error([&] { distribute_tensor(tensor, mesh, {Replicate()}); }, {"redistribute()"});
  expect_error([&] { distribute_tensor(leaf, mesh, {Partial()}); }, {"terms"});
  // TP-17
  expect_error([&] { distribute_tensor(leaf, mesh, {Shard(0), Shard(0)}); }, {"2 placements", "1 mesh dims"});
  expect_error([&] { distribute_tensor(leaf, mesh, {Shard(1)}); }, {"1"});
  // TP-11
  expect_error([&] { distribute_tensor(leaf, std::nullopt, {Shard(0)}); }, {"MeshScope"});
  const MeshScope scope(mesh);
  check_equal("scope", distribute_tensor(leaf, std::nullopt, {Shard(0)}).full_tensor().detach(), leaf.detach());
}

// TP-20: shares memory; uneven parts need the whole tensor's sizes; ranks may be compared
LOCKSTEP_THREAD_TEST(FromLocal, SharesMemory, 2) {
  const auto mesh = line(world);
  const auto part = counted({2, 3});
  const auto tensor = DTensor::from_local(part, mesh, {Shard(0)});
  EXPECT_EQ(tensor.tensor().sizes(), (at::IntArrayRef{4, 3}));
  part.add_(1);
  check_equal("same memory", tensor.to_local(), part);
  tensor.tensor().mul_(2);
  check_equal("written through", part, (counted({2, 3}) + 1) * 2);

  const auto uneven = counted({world.rank() == 0 ? 2 : 1, 3});
  const std::vector<int64_t> shape = {3, 3};
  const auto whole =
      DTensor::from_local(uneven, mesh, {Shard(0)}, {.shape = shape, .stride = std::vector<int64_t>{3, 1}});
  EXPECT_EQ(whole.full_tensor().sizes(), (at::IntArrayRef{3, 3}));
  expect_error([&] { DTensor::from_local(uneven, mesh, {Shard(0)}, {.shape = shape}); }, {"stride", "together"});
  expect_error(
      [&] {
        DTensor::from_local(counted({5, 3}), mesh, {Shard(0)}, {.shape = shape, .stride = std::vector<int64_t>{3, 1}});
      },
      {"[5, 3]", "[3, 3]", "Shard(dim=0)"});
  expect_error([&] { DTensor::from_local(tensor, mesh, {Shard(0)}); }, {"redistribute()"});

  const auto replica = counted({2}) + world.rank();
  check_equal("made equal", DTensor::from_local(replica, mesh, {Replicate()}, {.run_check = true}).to_local(),
              counted({2}));
}

// TP-21, TP-31: what ranks do with a replica; the gradient is taken as each rank has it, or summed
LOCKSTEP_THREAD_TEST(ToLocal, SaysWhatItsGradientIs, 2) {
  const auto mesh = line(world);
  const auto factor = 1.0 + world.rank();
  for (const bool is_partial : {false, true}) {
    const auto leaf = counted({3}).requires_grad_();
    const auto tensor = DTensor::from_local(leaf, mesh, {Replicate()});
    const auto local = is_partial ? tensor.to_local({.grad_placements = Placements{Partial()}}) : tensor.to_local();
    (local * factor).sum().backward();
    check_equal("gradient", leaf.grad(), at::full({3}, is_partial ? 3.0 : factor));
  }
}

// TP-21, TP-23, TP-31: gradients of the whole tensor come back as the parts' own
LOCKSTEP_THREAD_TEST(FullTensor, IsDifferentiable, 2) {
  const auto mesh = line(world);
  const auto weights = counted({4, 2}) + 1;
  for (const auto& placement :
       {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate()), Placement(Partial())}) {
    const auto sizes = Layout(mesh, {placement}, {4, 2}).local_sizes();
    const auto leaf = at::ones(sizes).requires_grad_();
    const auto tensor = DTensor::from_local(leaf, mesh, {placement});
    (tensor.full_tensor() * weights).sum().backward();
    check_equal(to_string(placement), leaf.grad(), Layout(mesh, {placement}, {4, 2}).cut(weights));
  }
}

// TP-28: terms come from operators
LOCKSTEP_THREAD_TEST(Redistribute, RefusesTerms, 2) {
  const auto mesh = line(world);
  const auto whole = distribute_tensor(counted({4}), mesh);
  expect_error([&] { whole.redistribute({Partial()}); }, {"Partial", "[4]"});
  const auto terms = DTensor::from_local(counted({4}), mesh, {Partial()});
  expect_error([&] { terms.redistribute({Partial(ReduceOp::MAX)}); }, {"Partial"});
  check_equal("sum", terms.redistribute({Replicate()}).to_local(), counted({4}) * 2);
}

// TP-32: another dtype on the way, forward and backward; twice differentiable; waits at first use
LOCKSTEP_THREAD_TEST(Redistribute, TakesDtypesIsDifferentiatedTwiceAndMayWait, 2) {
  const auto mesh = line(world);
  const auto leaf = counted({2, 3}).to(at::kDouble).requires_grad_();
  const auto tensor = DTensor::from_local(leaf, mesh, {Shard(0)});
  const auto low = tensor.redistribute({Replicate()}, {.forward_dtype = at::kFloat, .backward_dtype = at::kBFloat16});
  EXPECT_EQ(low.tensor().scalar_type(), at::kFloat);
  low.to_local().sum().backward();
  EXPECT_EQ(leaf.grad().scalar_type(), at::kDouble);
  check_equal("gradient", leaf.grad(), at::ones({2, 3}, at::kDouble));

  const auto cubes = tensor.redistribute({Replicate()}).to_local().pow(3).sum();
  const auto first = torch::autograd::grad({cubes}, {leaf}, {}, std::nullopt, /*create_graph=*/true)[0];
  const auto second = torch::autograd::grad({first.sum()}, {leaf})[0];
  check_equal("second derivative", second, 6 * leaf.detach());

  const auto pending = tensor.redistribute({Replicate()}, {.async_op = true});
  check_equal("awaited", pending.to_local().detach(), tensor.full_tensor().detach());
}

// TP-18: leaves have gradients that are DTensors, and optimizers step them
LOCKSTEP_THREAD_TEST(DTensorLeaf, IsTrained, 2) {
  const auto mesh = line(world);
  const auto whole = counted({5, 3}).requires_grad_();
  const auto tensor = distribute_tensor(whole, mesh, {Shard(0)});
  torch::optim::SGD optimizer({tensor.tensor()}, torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD of_whole({whole}, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    of_whole.zero_grad();
    tensor.tensor().pow(2).mean().backward();
    whole.pow(2).mean().backward();
    optimizer.step();
    of_whole.step();
    EXPECT_TRUE(at::allclose(tensor.full_tensor().detach(), whole.detach()));
  }
}

// TP-18: ordinary tensors are replicas only where the program says so
LOCKSTEP_THREAD_TEST(ImplicitReplication, TakesOrdinaryTensorsForReplicas, 2) {
  const auto mesh = line(world);
  const auto tensor = distribute_tensor(counted({4, 2}), mesh, {Shard(0)});
  const auto plain = counted({4, 2}).requires_grad_();
  expect_error([&] { tensor.tensor().add(plain); }, {"aten::add", "ordinary", "ImplicitReplication"});
  {
    const ImplicitReplication scope;
    const auto sum = tensor.tensor().mul(plain).sum();
    check_equal("sum", DTensor(sum).full_tensor().detach(), counted({4, 2}).pow(2).sum());
    sum.backward();
    check_equal("gradient", plain.grad(), counted({4, 2}));
    // An operator without a rule.
    const auto ranked = at::histc(tensor.tensor(), 4);
    check_equal("histogram", ranked, at::histc(counted({4, 2}), 4));
  }
  expect_error([&] { at::histc(tensor.tensor(), 4); }, {"aten::histc", "Shard(dim=0)", "no rule"});
}

// TP-6: ranks outside of the mesh hold nothing, call what the others call, and nobody waits for them
LOCKSTEP_THREAD_TEST(DTensor, LeavesRanksOutsideAlone, 4) {
  const auto mesh = init_device_mesh("cpu", {2});
  EXPECT_EQ(mesh.is_member(), world.rank() < 2);
  const auto tensor = distribute_tensor(counted({4, 2}), mesh, {Shard(0)});
  const auto product = tensor.tensor().mm(distribute_tensor(counted({2, 3}), mesh, {Replicate()}).tensor());
  EXPECT_EQ(product.sizes(), (at::IntArrayRef{4, 3}));
  const auto local = DTensor(at::relu(product)).redistribute({Replicate()}).to_local();
  if (mesh.is_member()) {
    check_equal("product", local, counted({4, 2}).mm(counted({2, 3})));
  } else {
    EXPECT_EQ(local.numel(), 0);
  }
}

}  // namespace
}  // namespace lockstep::dtensor_api_test
