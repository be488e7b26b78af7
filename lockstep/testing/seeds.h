// Randomness that is the same in every run and in both harnesses. libtorch's default generator belongs to the process,
// so rank threads would take numbers from each other; the kit draws from generators of its own, one per rank.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <utility>

#include "lockstep/comm/world.h"

namespace lockstep::testing {

inline constexpr uint64_t kTestSeed = 0;     // every rank, before each test
inline constexpr uint64_t kModelSeed = 0;    // while a deterministic model is built
inline constexpr uint64_t kInputSeed = 1;    // plus the rank
inline constexpr uint64_t kExpertSeed = 42;  // plus the rank

/// The current rank's generator, seeded with kTestSeed on all ranks.
at::Generator rank_generator();
/// Puts the current rank's generator back to kTestSeed. The harness does it before each test.
void reseed_rank();

/// A new generator for this rank's inputs (kInputSeed + rank), so that ranks see different data.
at::Generator input_generator(const World& world);
at::Generator expert_generator(const World& world);

/// Normal values from the current rank's generator.
at::Tensor rank_randn(at::IntArrayRef sizes, at::TensorOptions options = {});

/// Runs `build` with the default generator seeded, alone among rank threads, and restores the generator: modules, which
/// initialise themselves from the default one, come out alike on every rank and in every run.
void build_deterministically(const std::function<void()>& build, uint64_t seed = kModelSeed);

template <class Make>
auto build_deterministically_as(Make&& make, uint64_t seed = kModelSeed) {
  std::optional<decltype(make())> made;
  build_deterministically([&] { made.emplace(make()); }, seed);
  return std::move(*made);
}

}  // namespace lockstep::testing
