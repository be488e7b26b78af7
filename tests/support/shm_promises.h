// What the shm backend promises about its results and its memory, for ranks as threads and as processes: the same bits
// whatever the way they travel, and tensors that need no copy.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "lockstep/lockstep.h"
#include "lockstep/testing/checks.h"
#include "tests/support/reduction_model.h"

namespace lockstep::shm_promises {

using reduction_model::have_same_bits;
using reduction_model::input_of;
using reduction_model::model_of;

inline std::vector<int> all_ranks(const World& world) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world.world_size(); ++rank) ranks.push_back(rank);
  return ranks;
}

inline c10::intrusive_ptr<c10d::Backend> cpu_backend(const GroupPtr& group) {
  return group->getBackend(at::kCPU);
}

/// A tensor in memory of the group's that holds the same as `like`.
inline at::Tensor shared_copy(const GroupPtr& group, const at::Tensor& like) {
  auto tensor = cpu_backend(group)->allocateTensor(like.numel(), like.options()).view(like.sizes());
  tensor.copy_(like);
  return tensor;
}

inline std::vector<at::Tensor> inputs_of_all(const World& world, int64_t size, at::ScalarType dtype, int salt = 0) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < world.world_size(); ++rank) inputs.push_back(input_of(rank, size, dtype, salt));
  return inputs;
}

// ---- The same bits

/// Cuts `tensor` into views of random lengths, alike on all ranks: single elements, odd ones, several chunks.
inline std::vector<at::Tensor> random_pieces(const at::Tensor& tensor, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<at::Tensor> pieces;
  for (int64_t begin = 0; begin < tensor.numel();) {
    const int64_t most = random() % 4 == 0 ? 5 : random() % 2 == 0 ? 1000 : 90'000;
    const auto length = std::min<int64_t>(tensor.numel() - begin, 1 + random() % most);
    pieces.push_back(tensor.slice(0, begin, begin + length));
    begin += length;
  }
  return pieces;
}

inline void check_same_bits(const World& world, at::ScalarType dtype, ReduceOp op) {
  constexpr int64_t kSize = 200'003;
  const auto& group = world.group();
  const auto inputs = inputs_of_all(world, kSize, dtype);
  const auto& mine = inputs[world.rank()];
  const auto expected = model_of(inputs, op);
  const auto expect_bits = [&](const at::Tensor& tensor, const char* how) {
    EXPECT_TRUE(have_same_bits(tensor.contiguous(), expected))
        << how << " " << c10::toString(dtype) << " " << name_of(op);
  };
  for (int round = 0; round < 2; ++round) {
    const auto whole = mine.clone();
    all_reduce(whole, group, op);
    expect_bits(whole, "whole");
    const auto launched = mine.clone();
    launch_all_reduce(launched, group, op).wait();
    expect_bits(launched, "launched");
  }
  const auto in_pieces = mine.clone();
  for (const auto& piece : random_pieces(in_pieces, 1)) all_reduce(piece, group, op);
  expect_bits(in_pieces, "in pieces");
  const auto coalesced = mine.clone();
  all_reduce_coalesced(random_pieces(coalesced, 2), group, op);
  expect_bits(coalesced, "coalesced");
  const auto shared = shared_copy(group, mine);
  all_reduce(shared, group, op);
  expect_bits(shared, "zero-copy");
  const auto shared_pieces = shared_copy(group, mine);
  all_reduce_coalesced(random_pieces(shared_pieces, 3), group, op);
  expect_bits(shared_pieces, "zero-copy, coalesced");
  const auto in_many_pieces = shared_copy(group, mine);
  all_reduce_coalesced(in_many_pieces.split(601), group, op);
  expect_bits(in_many_pieces, "zero-copy, in more pieces than a step can name");
  // Not contiguous on some ranks, begun at an odd address on the others.
  const auto apart = world.rank() % 2 == 0 ? at::zeros({kSize, 2}, mine.options()).select(1, 1)
                                           : at::zeros({kSize + 1}, mine.options()).slice(0, 1);
  apart.copy_(mine);
  all_reduce(apart, group, op);
  expect_bits(apart, "not contiguous");
  std::vector<at::Tensor> by_rank;
  for (int rank = 0; rank < world.world_size(); ++rank) by_rank.push_back(at::empty_like(mine));
  all_gather(by_rank, in_pieces, group);
  for (const auto& tensor : by_rank) expect_bits(tensor, "on another rank");
}

inline void check_same_bits(const World& world) {
  check_same_bits(world, at::kFloat, ReduceOp::SUM);
  check_same_bits(world, at::kHalf, ReduceOp::SUM);
  check_same_bits(world, at::kBFloat16, ReduceOp::AVG);
  check_same_bits(world, at::kDouble, ReduceOp::PRODUCT);
}

// ---- Zero-copy tensors

/// Where the tensors of a call lie.
enum class Placement { kOrdinary, kShared, kInsideShared, kSharedOnOddRanks, kInputsShared, kOutputsShared };

/// Makes the tensors of calls, and what they must hold.
class Placer {
 public:
  Placer(const World& world, Placement placement) : world_(world), placement_(placement) {}

  at::Tensor input(const at::Tensor& like) const {
    return place(like, placement_ != Placement::kOutputsShared && placement_ != Placement::kOrdinary);
  }
  at::Tensor output(const at::Tensor& like) const {
    return place(at::zeros_like(like), placement_ != Placement::kInputsShared && placement_ != Placement::kOrdinary);
  }
  std::vector<at::Tensor> inputs(const std::vector<at::Tensor>& like) const {
    std::vector<at::Tensor> all;
    for (const auto& tensor : like) all.push_back(input(tensor));
    return all;
  }
  std::vector<at::Tensor> outputs(const std::vector<at::Tensor>& like) const {
    std::vector<at::Tensor> all;
    for (const auto& tensor : like) all.push_back(output(tensor));
    return all;
  }

 private:
  at::Tensor place(const at::Tensor& like, bool is_shared) const {
    if (!is_shared || (placement_ == Placement::kSharedOnOddRanks && world_.rank() % 2 == 0)) return like.clone();
    if (placement_ != Placement::kInsideShared) return shared_copy(world_.group(), like);
    // A row of a larger one, which begins wherever it begins.
    const auto rows = cpu_backend(world_.group())->allocateTensor(3 * like.numel() + 1, like.options());
    const auto row = rows.slice(0, 1).reshape({3, like.numel()}).select(0, 1).view(like.sizes());
    row.copy_(like);
    return row;
  }

  const World& world_;
  const Placement placement_;
};

/// Runs `call`, then compares results and, unless it works in place, that inputs are as they were.
inline void check_call(const World& world, Call call, const std::vector<at::Tensor>& expected) {
  std::vector<at::Tensor> before;
  for (const auto& tensor : call.inputs) before.push_back(tensor.clone());
  launch(call, world.group()).wait();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(have_same_bits(call.results().at(i), expected[i])) << call.describe() << " result " << i;
  }
  for (std::size_t i = 0; i < before.size() && !call.outputs.empty(); ++i) {
    EXPECT_TRUE(have_same_bits(call.inputs[i], before[i])) << call.describe() << " wrote to its input " << i;
  }
}

inline void check_placed(const World& world, Placement placement, at::ScalarType dtype, int64_t size) {
  const Placer placer(world, placement);
  const int rank = world.rank();
  const int ranks = world.world_size();
  const auto inputs = inputs_of_all(world, size, dtype);
  const auto& mine = inputs[rank];
  const auto sum = model_of(inputs, ReduceOp::SUM);
  const int root = ranks - 1;
  const auto at_root = rank == root ? inputs : std::vector<at::Tensor>{};

  check_call(world, {.kind = CallKind::kAllReduce, .inputs = {placer.input(mine)}}, {sum});
  check_call(world, {.kind = CallKind::kAllReduce, .inputs = placer.inputs({mine, mine.slice(0, 0, size / 2), mine})},
             {sum, sum.slice(0, 0, size / 2).clone(), sum});
  check_call(world, {.kind = CallKind::kReduce, .inputs = {placer.input(mine)}, .root = root},
             rank == root ? std::vector{sum} : std::vector<at::Tensor>{});
  check_call(world, {.kind = CallKind::kBroadcast, .inputs = {placer.input(mine)}, .root = root}, {inputs[root]});
  check_call(world, {.kind = CallKind::kAllGather, .inputs = {placer.input(mine)}, .outputs = placer.outputs(inputs)},
             inputs);
  const auto whole = at::cat(inputs);
  check_call(world,
             {.kind = CallKind::kAllGatherSingle, .inputs = {placer.input(mine)}, .outputs = {placer.output(whole)}},
             {whole});
  check_call(world,
             {.kind = CallKind::kAllGatherSingle,
              .inputs = placer.inputs({mine, mine}),
              .outputs = placer.outputs({whole, whole})},
             {whole, whole});
  check_call(
      world,
      {.kind = CallKind::kGather, .inputs = {placer.input(mine)}, .outputs = placer.outputs(at_root), .root = root},
      at_root);
  check_call(
      world,
      {.kind = CallKind::kScatter, .inputs = placer.inputs(at_root), .outputs = {placer.output(mine)}, .root = root},
      {mine});

  // What `from` has for `to`.
  const auto piece = [&](int from, int to) { return input_of(from, size, dtype, to); };
  std::vector<at::Tensor> sent;
  std::vector<at::Tensor> received;
  for (int other = 0; other < ranks; ++other) {
    sent.push_back(piece(rank, other));
    received.push_back(piece(other, rank));
  }
  const auto share = model_of(received, ReduceOp::SUM);
  check_call(world,
             {.kind = CallKind::kReduceScatter, .inputs = placer.inputs(sent), .outputs = {placer.output(share)}},
             {share});
  check_call(world,
             {.kind = CallKind::kReduceScatterSingle,
              .inputs = {placer.input(at::cat(sent))},
              .outputs = {placer.output(share)}},
             {share});
  check_call(world,
             {.kind = CallKind::kReduceScatterSingle,
              .inputs = placer.inputs({at::cat(sent), at::cat(sent)}),
              .outputs = placer.outputs({share, share})},
             {share, share});
  check_call(world, {.kind = CallKind::kAllToAll, .inputs = placer.inputs(sent), .outputs = placer.outputs(received)},
             received);
  check_call(world,
             {.kind = CallKind::kAllToAllSingle,
              .inputs = {placer.input(at::cat(sent))},
              .outputs = {placer.output(at::cat(received))}},
             {at::cat(received)});
}

inline void check_zero_copy(const World& world) {
  EXPECT_TRUE(cpu_backend(world.group())->supportsTensorAlloc(0));
  for (const auto placement : {Placement::kOrdinary, Placement::kShared, Placement::kInsideShared,
                               Placement::kSharedOnOddRanks, Placement::kInputsShared, Placement::kOutputsShared}) {
    for (const auto dtype : {at::kHalf, at::kLong, at::kDouble}) {
      const ::testing::ScopedTrace trace(__FILE__, __LINE__, static_cast<int>(placement));
      for (const int64_t size : {0, 1, 7, 50'021}) check_placed(world, placement, dtype, size);
    }
  }
}

/// Output and input of one rank are the same memory where that has a meaning.
inline void check_in_place(const World& world) {
  const int ranks = world.world_size();
  for (const int64_t size : {5, 30'011}) {
    const auto inputs = inputs_of_all(world, size, at::kFloat);
    for (const bool is_shared : {false, true}) {
      const auto room = at::zeros({ranks * size});
      const auto whole = is_shared ? shared_copy(world.group(), room) : room;
      const auto mine = whole.slice(0, world.rank() * size, (world.rank() + 1) * size);
      mine.copy_(inputs[world.rank()]);
      all_gather_into_tensor(whole, mine, world.group());
      EXPECT_TRUE(have_same_bits(whole, at::cat(inputs)));
      // Everybody has the same now, so every share is a multiple.
      reduce_scatter_tensor(mine, whole, world.group());
      EXPECT_TRUE(have_same_bits(mine, model_of(std::vector<at::Tensor>(ranks, inputs[world.rank()]), ReduceOp::SUM)));
      whole.copy_(at::cat(inputs));
      std::vector<at::Tensor> expected(ranks, inputs[world.rank()]);
      all_to_all_single(whole, whole, world.group());
      EXPECT_TRUE(have_same_bits(whole, at::cat(expected)));
    }
  }
}

inline void check_memory_outlives_group(const World& world) {
  at::Tensor sum;
  std::shared_ptr<c10::Allocator> allocator;
  {
    const auto group = new_group(world.group(), all_ranks(world));
    sum = shared_copy(group, at::full({100'000}, world.rank() + 1.0));
    allocator = cpu_backend(group)->getMemAllocator();
    all_reduce(sum, group);
    barrier(group);
  }
  barrier(world.group());
  const double ranks = world.world_size();
  EXPECT_TRUE(at::equal(sum, at::full({100'000}, ranks * (ranks + 1) / 2)));
  sum.fill_(3);
  auto more = allocator->allocate(1 << 20);
  std::memset(more.get(), 1, 1 << 20);
  // To the other group's collectives it is memory as any.
  all_reduce(sum, world.group());
  EXPECT_TRUE(at::equal(sum, at::full({100'000}, 3 * ranks)));
  sum.resize_({200'000}).fill_(1);
  all_reduce(sum, world.group());
  EXPECT_TRUE(at::equal(sum, at::full({200'000}, ranks)));
}

/// It can grow although nothing is left of its group.
inline void check_tensor_grows_beyond_group(const World& world) {
  at::Tensor tensor;
  at::Tensor empty;
  {
    const auto group = new_group(world.group(), all_ranks(world));
    tensor = cpu_backend(group)->allocateTensor(10, at::kFloat).fill_(2);
    empty = cpu_backend(group)->allocateTensor(0, at::kFloat);
    barrier(group);
  }
  barrier(world.group());
  EXPECT_TRUE(at::equal(tensor.resize_({100'000}).narrow(0, 0, 10), at::full({10}, 2.0F)));
  empty.resize_({100'000}).fill_(1);
  all_reduce(empty, world.group());
  EXPECT_EQ(empty[99'999].item<float>(), static_cast<float>(world.world_size()));
}

}  // namespace lockstep::shm_promises
