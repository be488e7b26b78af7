// Tensors that only give but cannot be written, and inputs that overlap outputs.
#pragma once

#include <gtest/gtest.h>

#include "lockstep/lockstep.h"

namespace lockstep::shm_odd_tensors {

inline void check_expanded_inputs(const World& world) {
  const int ranks = world.world_size();
  const auto expanded = at::full({1}, 1.0F * world.rank()).expand({5});
  std::vector<at::Tensor> outputs;
  for (int rank = 0; world.rank() == 1 && rank < ranks; ++rank) outputs.push_back(at::empty({5}));
  gather(expanded, outputs, 1, world.group());
  for (int rank = 0; world.rank() == 1 && rank < ranks; ++rank) {
    EXPECT_TRUE(at::equal(outputs[rank], at::full({5}, 1.0F * rank)));
  }
  // The root of a broadcast, and everybody but the root of a reduction, only give.
  const bool is_root = world.rank() == 0;
  const auto tensor = is_root ? at::full({1}, 7.0F).expand({5}) : at::zeros({5});
  broadcast(tensor, 0, world.group());
  EXPECT_TRUE(at::equal(tensor, at::full({5}, 7.0F)));
  const auto summand = is_root ? at::ones({5}) : at::ones({1}).expand({5});
  reduce(summand, 0, world.group());
  EXPECT_TRUE(!is_root || at::equal(summand, at::full({5}, 1.0F * ranks)));
}

/// Small ones go through slots, large ones are read where they are.
inline void check_overlaps(const World& world) {
  const int64_t ranks = world.world_size();
  const auto me = world.rank();
  const auto backend = world.group()->getBackend(at::kCPU);
  for (const int64_t size : {7, 30'000}) {
    const auto room = [&](int64_t elements) { return backend->allocateTensor(elements, at::kFloat); };
    // The output is the first piece of the input, which others still have to read.
    const auto input = room(size * ranks).copy_(at::arange(size * ranks, at::kFloat) + 1.0F * me);
    const auto expected = at::arange(size * ranks, at::kFloat) * ranks + 0.5F * static_cast<float>(ranks * (ranks - 1));
    reduce_scatter_tensor(input.narrow(0, 0, size), input, world.group());
    EXPECT_TRUE(at::allclose(input.narrow(0, 0, size), expected.narrow(0, me * size, size))) << size;
    // The input is the neighbour's piece of the output.
    const auto output = room(size * ranks).zero_();
    const auto piece = output.narrow(0, (me + 1) % ranks * size, size).fill_(1.0F * me);
    all_gather_into_tensor(output, piece, world.group());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(at::equal(output.narrow(0, rank * size, size), at::full({size}, 1.0F * static_cast<float>(rank))));
    }
    // In place, as FSDP does it: each rank's own piece.
    const auto own = output.zero_().narrow(0, me * size, size).fill_(2.0F * me);
    all_gather_into_tensor(output, own, world.group());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(at::equal(output.narrow(0, rank * size, size), at::full({size}, 2.0F * static_cast<float>(rank))));
    }
    all_to_all_single(output, output, world.group());
    EXPECT_TRUE(at::equal(output, at::arange(ranks).to(at::kFloat).repeat_interleave(size) * 0 + 2.0F * me));
  }
}

/// A conjugate is a flag on the memory of another tensor.
inline void check_conjugates(const World& world) {
  const auto plain = at::full({5}, c10::complex<double>(1, world.rank() + 1.0), at::kComplexDouble);
  const auto gathered = at::empty({world.world_size() * 5}, at::kComplexDouble);
  all_gather_into_tensor(gathered, plain.conj(), world.group());
  for (int rank = 0; rank < world.world_size(); ++rank) {
    EXPECT_TRUE(at::equal(at::view_as_real(gathered.narrow(0, 5 * rank, 5)),
                          at::view_as_real(at::full({5}, c10::complex<double>(1, -1.0 - rank), at::kComplexDouble))));
  }
  const auto sum = plain.clone().conj();
  all_reduce(sum, world.group());
  const double ranks = world.world_size();
  const c10::complex<double> expected(ranks, -ranks * (ranks + 1) / 2);
  EXPECT_TRUE(
      at::equal(at::view_as_real(sum.resolve_conj()), at::view_as_real(at::full({5}, expected, at::kComplexDouble))));
}

/// Autograd's zeros without memory.
inline void check_zeros_without_memory(const World& world) {
  const auto zeros = at::_efficientzerotensor({5}, at::kFloat);
  const auto gathered = at::empty({world.world_size() * 5});
  all_gather_into_tensor(gathered, world.rank() == 1 ? zeros : at::ones({5}), world.group());
  for (int rank = 0; rank < world.world_size(); ++rank) {
    EXPECT_TRUE(at::equal(gathered.narrow(0, 5 * rank, 5), at::full({5}, rank == 1 ? 0.0F : 1.0F))) << rank;
  }
}

inline void check_all(const World& world) {
  check_zeros_without_memory(world);
  check_conjugates(world);
  check_expanded_inputs(world);
  check_overlaps(world);
}

}  // namespace lockstep::shm_odd_tensors
