// Differentiable collectives: values, gradients and gradients of gradients, against the same computed by one process
// that knows all ranks' tensors.
#include "lockstep/nn/functional_collectives.h"

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/fake/fake_backend.h"
#include "lockstep/comm/world.h"
#include "lockstep/testing/gtest.h"
#include "lockstep/testing/recorder.h"

namespace lockstep {
namespace {

using testing::check_equal;
using testing::expect_error;
using testing::Tolerance;
using Tensors = std::vector<at::Tensor>;

/// By rank, what a collective gives, as ordinary operators on the tensors of all ranks.
using AllAtOnce = std::function<Tensors(const Tensors&)>;
using OnRank = std::function<at::Tensor(const at::Tensor&, const GroupPtr&)>;

struct Case {
  std::string name;
  OnRank on_rank;
  AllAtOnce all_at_once;
  std::vector<int64_t> sizes;
};

at::Tensor sum_of(const Tensors& tensors) {
  return at::stack(tensors).sum(0);
}

Tensors repeated(const at::Tensor& tensor, std::size_t times) {
  return Tensors(times, tensor);
}

/// Rank r sends r + 1 + s rows to rank s.
std::vector<int64_t> input_splits(int rank, int ranks) {
  std::vector<int64_t> splits;
  for (int to = 0; to < ranks; ++to) splits.push_back(rank + 1 + to);
  return splits;
}

std::vector<int64_t> output_splits(int rank, int ranks) {
  std::vector<int64_t> splits;
  for (int from = 0; from < ranks; ++from) splits.push_back(from + 1 + rank);
  return splits;
}

std::vector<Case> cases(int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<Case> all;
  all.push_back({"all_reduce",
                 [](const auto& x, const auto& group) { return functional::all_reduce(x, group); },
                 [=](const Tensors& x) { return repeated(sum_of(x), count); },
                 {3, 2}});
  all.push_back({"all_reduce(avg)",
                 [](const auto& x, const auto& group) { return functional::all_reduce(x, group, ReduceOp::AVG); },
                 [=](const Tensors& x) { return repeated(sum_of(x) / ranks, count); },
                 {3, 2}});
  for (const int64_t dim : {0, 1, -1}) {
    all.push_back({str("all_gather along ", dim),
                   [=](const auto& x, const auto& group) { return functional::all_gather(x, group, dim); },
                   [=](const Tensors& x) { return repeated(at::cat(x, dim), count); },
                   {2, 3, 2}});
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
      all.push_back(
          {str("reduce_scatter along ", dim, " ", name_of(op)),
           [=](const auto& x, const auto& group) { return functional::reduce_scatter(x, group, dim, op); },
           [=](const Tensors& x) { return (op == ReduceOp::AVG ? sum_of(x) / ranks : sum_of(x)).chunk(ranks, dim); },
           {2 * ranks, 3 * ranks, ranks}});
    }
  }
  all.push_back({"all_to_all_single",
                 [](const auto& x, const auto& group) { return functional::all_to_all_single(x, group); },
                 [=](const Tensors& x) {
                   Tensors results;
                   for (int64_t to = 0; to < ranks; ++to) {
                     Tensors pieces;
                     for (const auto& each : x) pieces.push_back(each.chunk(ranks)[to]);
                     results.push_back(at::cat(pieces));
                   }
                   return results;
                 },
                 {2 * ranks, 3}});
  for (const int root : {0, ranks - 1}) {
    all.push_back({str("broadcast from ", root),
                   [=](const auto& x, const auto& group) { return functional::broadcast(x, root, group); },
                   // The others' tensors have gradients too: zeros.
                   [=](const Tensors& x) { return repeated(x[root] + 0 * sum_of(x), count); },
                   {2, 3}});
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
      all.push_back({str("reduce to ", root, " ", name_of(op)),
                     [=](const auto& x, const auto& group) { return functional::reduce(x, root, group, op); },
                     [=](const Tensors& x) {
                       Tensors results = repeated(at::zeros_like(x[0]), count);
                       results[root] = op == ReduceOp::AVG ? sum_of(x) / ranks : sum_of(x);
                       return results;
                     },
                     {2, 3}});
    }
  }
  return all;
}

at::Tensor random(const std::vector<int64_t>& sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble));
}

/// The loss of one rank: not linear, so that gradients depend on values and have gradients themselves.
at::Tensor loss_of(const at::Tensor& output, int rank) {
  return (output.pow(3) * random(output.sizes().vec(), 100 + rank)).sum();
}

struct Derivatives {
  Tensors outputs;
  Tensors first;
  Tensors second;
};

/// The loss and its gradients on all ranks together; the second ones are those of a function of the first.
Derivatives derivatives(const Case& subject, const Tensors& inputs) {
  Derivatives result;
  result.outputs = subject.all_at_once(inputs);
  auto loss = at::zeros({}, at::kDouble);
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    loss = loss + loss_of(result.outputs[rank], static_cast<int>(rank));
  }
  result.first = torch::autograd::grad({loss}, inputs, {}, true, true);
  auto second_loss = at::zeros({}, at::kDouble);
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    second_loss = second_loss + (result.first[rank].pow(2) * random(inputs[rank].sizes().vec(), 200 + rank)).sum();
  }
  result.second = torch::autograd::grad({second_loss}, inputs, {}, std::nullopt, false, true);
  return result;
}

void compare(const World& world, const Case& subject, const Tensors& inputs) {
  SCOPED_TRACE(subject.name);
  const auto wanted = derivatives(subject, inputs);
  const auto rank = world.rank();
  const auto mine = inputs[rank].detach().clone().requires_grad_();
  const auto close = Tolerance::of(at::kDouble);
  const auto output = subject.on_rank(mine, world.group());
  check_equal(subject.name, output.detach(), wanted.outputs[rank].detach(), close);
  EXPECT_TRUE(output.is_contiguous());
  const auto first = torch::autograd::grad({loss_of(output, rank)}, {mine}, {}, true, true)[0];
  check_equal(subject.name + ", gradient", first.detach(), wanted.first[rank].detach(), close);
  const auto second_loss = (first.pow(2) * random(mine.sizes().vec(), 200 + rank)).sum();
  const auto second = torch::autograd::grad({second_loss}, {mine}, {}, std::nullopt, false, true)[0];
  check_equal(subject.name + ", gradient of the gradient", second, wanted.second[rank], close);
}

class FunctionalCollectives : public ::testing::TestWithParam<int> {};

TEST_P(FunctionalCollectives, AreTwiceDifferentiable) {
  const int ranks = GetParam();
  testing::run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
    for (const auto& subject : cases(ranks)) {
      Tensors inputs;
      for (int rank = 0; rank < ranks; ++rank) inputs.push_back(random(subject.sizes, rank).requires_grad_());
      compare(world, subject, inputs);
    }
  });
}

// Pieces of different sizes: what a rank sends is not what it receives.
TEST_P(FunctionalCollectives, ExchangePiecesOfGivenSizes) {
  const int ranks = GetParam();
  testing::run_threads_in_gtest({.world_size = ranks}, [&](const World& world) {
    Tensors inputs;
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t rows = 0;
      for (const auto split : input_splits(rank, ranks)) rows += split;
      inputs.push_back(random({rows, 2}, rank).requires_grad_());
    }
    const Case subject = {"all_to_all_single with splits",
                          [&](const at::Tensor& x, const GroupPtr& group) {
                            return functional::all_to_all_single(x, group, output_splits(world.rank(), ranks),
                                                                 input_splits(world.rank(), ranks));
                          },
                          [&](const Tensors& x) {
                            Tensors results;
                            for (int to = 0; to < ranks; ++to) {
                              Tensors pieces;
                              for (int from = 0; from < ranks; ++from) {
                                pieces.push_back(x[from].split_with_sizes(input_splits(from, ranks))[to]);
                              }
                              results.push_back(at::cat(pieces));
                            }
                            return results;
                          },
                          {}};
    compare(world, subject, inputs);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, FunctionalCollectives, ::testing::Values(1, 2, 3));

LOCKSTEP_RANK_TEST(FunctionalCollectivesRanks, WorkInALayer, 2) {
  // A linear layer by columns, then one by rows: the sum of both halves is the whole.
  const auto input = random({4, 3}, 1);
  const auto first = random({3, 6}, 2);
  const auto second = random({6, 2}, 3);
  const auto whole_first = first.clone().requires_grad_();
  (input.mm(whole_first).tanh().mm(second)).pow(2).sum().backward();
  const auto mine = first.narrow(1, 3 * world.rank(), 3).clone().requires_grad_();
  const auto partial = input.mm(mine).tanh().mm(second.narrow(0, 3 * world.rank(), 3));
  (functional::all_reduce(partial, world.group()).pow(2).sum() / world.world_size()).backward();
  check_equal("gradient", mine.grad(), whole_first.grad().narrow(1, 3 * world.rank(), 3), Tolerance::of(at::kDouble));
}

LOCKSTEP_THREAD_TEST(FunctionalCollectivesRanks, LeaveTheInputAlone, 2) {
  const auto input = at::full({2, 2}, world.rank() + 1.0);
  const auto before = input.clone();
  for (const auto& subject : cases(2)) {
    if (subject.sizes.size() > 2) continue;
    const auto tensor = at::full(subject.sizes, world.rank() + 1.0);
    const auto result = subject.on_rank(tensor, world.group());
    EXPECT_FALSE(result.is_alias_of(tensor)) << subject.name;
    EXPECT_TRUE(tensor.eq(world.rank() + 1.0).all().item<bool>()) << subject.name;
  }
  const auto strided = at::arange(6.F).view({2, 3}).t();
  check_equal("not contiguous", functional::all_gather(strided, world.group()), at::cat({strided, strided}));
}

LOCKSTEP_THREAD_TEST(FunctionalCollectivesRanks, RecordNothingWithoutGradients, 2) {
  const auto leaf = at::ones({2}).requires_grad_();
  EXPECT_TRUE(functional::all_reduce(leaf, world.group()).requires_grad());
  EXPECT_FALSE(functional::all_reduce(leaf.detach(), world.group()).requires_grad());
  {
    const at::NoGradGuard no_grad;
    const auto result = functional::all_gather(leaf, world.group());
    EXPECT_FALSE(result.requires_grad());
    EXPECT_EQ(result.grad_fn(), nullptr);
  }
  EXPECT_EQ(functional::all_reduce(at::ones({2}, at::kLong), world.group(), ReduceOp::MAX).scalar_type(), at::kLong);
}

TEST(FunctionalCollective, IsACopyInAGroupOfOne) {
  const auto [group, backend] = make_fake_group(0, 1);
  for (const auto& subject : cases(1)) {
    const auto input = random(subject.sizes, 1).requires_grad_();
    const auto result = subject.on_rank(input, group);
    check_equal(subject.name, result.detach(), input.detach());
    EXPECT_FALSE(result.is_alias_of(input));
    result.sum().backward();
    check_equal(subject.name, input.grad(), at::ones_like(input));
  }
  EXPECT_TRUE(backend->calls().empty());
}

TEST(FunctionalCollective, SendsAsOftenBackwardAsForward) {
  const auto [group, backend] = make_fake_group(0, 2);
  const auto kinds = [&, &backend = backend] {
    std::vector<CallKind> kinds;
    for (const auto& call : backend->calls()) kinds.push_back(call.kind);
    backend->clear_calls();
    return kinds;
  };
  const auto leaf = at::ones({4, 4}).requires_grad_();
  functional::all_gather(leaf, group, 1).sum().backward();
  EXPECT_EQ(kinds(), (std::vector{CallKind::kAllGatherSingle, CallKind::kReduceScatterSingle}));
  functional::reduce_scatter(leaf, group, 1).sum().backward();
  EXPECT_EQ(kinds(), (std::vector{CallKind::kReduceScatterSingle, CallKind::kAllGatherSingle}));
  functional::broadcast(leaf, 1, group).sum().backward();
  EXPECT_EQ(kinds(), (std::vector{CallKind::kBroadcast, CallKind::kReduce}));
}

TEST(FunctionalCollective, RefusesWhatItCannotDo) {
  const auto group = make_fake_group(1, 2).group;
  const auto leaf = at::ones({3, 2}).requires_grad_();
  expect_error([&] { functional::all_reduce(leaf, group, ReduceOp::MAX); },
               {"[lockstep/nn] rank 1 of 2", "all_reduce", "'max'", "detach()"});
  expect_error([&] { functional::reduce_scatter(leaf, group); }, {"reduce_scatter along dim 0", "[3, 2]", "2 ranks"});
  expect_error([&] { functional::reduce_scatter(leaf, group, 1, ReduceOp::MIN); }, {"'min'"});
  expect_error([&] { functional::all_gather(leaf, group, 2); }, {"all_gather along dim 2", "2 dims", "[3, 2]"});
  expect_error([&] { functional::all_gather(at::ones({}), group); }, {"0 dims"});
  expect_error([&] { functional::all_to_all_single(leaf, group, {1, 2}); }, {"output splits alone", "Give both"});
  expect_error([&] { functional::all_reduce(leaf, group, ReduceOp::PREMUL_SUM); }, {"factors"});
  expect_error([&] { functional::broadcast(leaf, 2, group); }, {"2"});
  const GroupPtr none;
  expect_error([&] { functional::all_reduce(leaf, none); }, {"the group is null"});
  expect_error([&] { functional::all_gather(leaf, none); }, {"the group is null"});
  expect_error([&] { functional::reduce_scatter(leaf, none); }, {"the group is null"});
  expect_error([&] { functional::all_to_all_single(leaf, none); }, {"the group is null"});
  expect_error([&] { functional::broadcast(leaf, 0, none); }, {"the group is null"});
  expect_error([&] { functional::reduce(leaf, 0, none); }, {"the group is null"});
}

}  // namespace
}  // namespace lockstep
