#include "lockstep/intercept/random_stream.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

namespace lockstep::detail {
namespace {

constexpr std::uint64_t kMarkSeed = 0x4c6f636b53746570;
constexpr std::uint64_t kLeftSeed = 0x4c65667400000000;  // and a hash of 32 bits

std::uint64_t seed_of(const at::Generator& generator) {
  auto same = generator;
  const std::lock_guard lock(same.mutex());
  return same.current_seed();
}

/// Stands for `state` until its draws have been made: other states give other seeds, so that two programs' streams, or
/// two builds', do not run alike.
std::uint64_t left_seed_for(const at::Tensor& state) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = state.const_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < state.numel(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return kLeftSeed | ((hash ^ (hash >> 32)) & 0xffffffff);
}

bool is_left_seed(std::uint64_t seed) {
  return (seed & ~std::uint64_t{0xffffffff}) == kLeftSeed;
}

/// What a generator of this kind stands at while a build with it is deferred.
at::Tensor mark_of(const at::Generator& generator) {
  auto copy = generator.clone();
  copy.set_current_seed(kMarkSeed);
  return state_of(copy);
}

}  // namespace

at::Tensor state_of(const at::Generator& generator) {
  auto same = generator;  // another handle: libtorch's is not const
  const std::lock_guard lock(same.mutex());
  return same.get_state();
}

void set_state(const at::Generator& generator, const at::Tensor& state) {
  auto same = generator;
  const std::lock_guard lock(same.mutex());
  same.set_state(state);
}

std::size_t RandomStreams::add_operator(const at::Generator& generator, std::size_t position) {
  const auto mark = mark_of(generator);
  auto state = state_of(generator);
  auto watched =
      std::find_if(watched_.begin(), watched_.end(), [&](const Watched& w) { return w.generator == generator; });
  const bool is_marked = at::equal(state, mark);
  TORCH_CHECK(
      !is_left_seed(seed_of(generator)),
      "[lockstep/intercept] deferred_init: an earlier deferred build that draws from the same generator has not "
      "been materialised in full, so it is not known where this one's numbers begin. Build both inside of one "
      "deferred_init, materialise the first, or seed the generator (torch::manual_seed) in between.");
  TORCH_CHECK(
      watched != watched_.end() || !is_marked,
      "[lockstep/intercept] deferred_init: another thread is inside of a deferred build that draws from the same "
      "generator, so neither could tell its numbers. Build one after the other, or give each its own generator.");
  if (!is_marked) {
    streams_.push_back({.generator = generator, .next_state = std::move(state), .operators = {}});
    set_state(generator, mark);
    if (watched == watched_.end()) watched = watched_.insert(watched_.end(), {.generator = generator, .stream = 0});
    watched->stream = streams_.size() - 1;
  }
  streams_[watched->stream].operators.push_back(position);
  return watched->stream;
}

void RandomStreams::leave() {
  for (const auto& watched : watched_) {
    if (!at::equal(state_of(watched.generator), mark_of(watched.generator))) continue;  // seeded since: stays
    auto& stream = streams_[watched.stream];
    stream.left_seed = left_seed_for(stream.next_state);
    auto generator = watched.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(*stream.left_seed);
  }
  watched_.clear();
}

void RandomStreams::settle(RandomStream& stream) {
  if (stream.run_count == stream.operators.size()) move_on(stream);
}

void RandomStreams::move_on(RandomStream& stream) {
  if (!stream.left_seed) return;
  if (seed_of(stream.generator) == *stream.left_seed) set_state(stream.generator, stream.next_state);
  stream.left_seed.reset();
}

RandomStreams::~RandomStreams() {
  for (auto& stream : streams_) move_on(stream);
}

}  // namespace lockstep::detail
