#include "lockstep/intercept/random_stream.h"

#include <ATen/ops/equal.h>

#include <algorithm>
#include <mutex>

namespace lockstep::detail {
namespace {

constexpr std::uint64_t kMarkSeed = 0x4c6f636b53746570;

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
      watched != watched_.end() || !is_marked,
      "[lockstep/intercept] deferred_init: another thread is inside of a deferred build that draws from the same "
      "generator, so neither could tell its numbers. Build one after the other, or give each its own generator.");
  if (!is_marked) {
    streams_.push_back({.generator = generator, .next_state = std::move(state), .operators = {}, .left_state = {}});
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
    stream.left_state = stream.next_state.clone();
    set_state(watched.generator, stream.left_state);
  }
  watched_.clear();
}

void RandomStreams::settle(RandomStream& stream) {
  if (!stream.left_state.defined() || stream.run_count < stream.operators.size()) return;
  if (at::equal(state_of(stream.generator), stream.left_state)) set_state(stream.generator, stream.next_state);
  stream.left_state.reset();
}

}  // namespace lockstep::detail
