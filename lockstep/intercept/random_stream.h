// Internal to intercept. The numbers a deferred build would have drawn: where its generators stood, and which operators
// draw from them in which order, so that each can be run later, alone, with the numbers of an ordinary build.
//
// While a deferred build runs, a generator it has met stands at a mark, a state no seed leads to by accident: a program
// that seeds it meanwhile is noticed, and so is another thread that defers with it. Guarded by the recording's mutex.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep::detail {

/// Draws from one generator, from one seed (or the state the build found) on.
struct RandomStream {
  at::Generator generator;
  at::Tensor next_state;                        // before the first operator that has not run yet
  std::vector<std::size_t> operators;           // positions in the recording
  std::size_t run_count = 0;                    // of `operators`, from the first
  std::optional<std::uint64_t> left_seed = {};  // what the generator was left with, if this stream is its last
};

class RandomStreams {
 public:
  RandomStreams() = default;
  /// Generators of a build that nobody will materialise any more go on from where it is.
  ~RandomStreams();
  RandomStreams(const RandomStreams&) = delete;
  RandomStreams& operator=(const RandomStreams&) = delete;

  /// Notes that the operator at `position` draws from `generator`; returns the number of its stream.
  std::size_t add_operator(const at::Generator& generator, std::size_t position);

  /// The build is over. Where its numbers end is not known yet, so what is drawn before they are comes from another
  /// seed. A generator that the program seeded meanwhile stays as it is.
  void leave();

  /// Moves a generator to where an ordinary build would have left it, if all its operators have run, unless it was
  /// seeded since leave().
  void settle(RandomStream& stream);

  RandomStream& operator[](std::size_t index) { return streams_[index]; }
  std::size_t size() const { return streams_.size(); }

 private:
  struct Watched {
    at::Generator generator;
    std::size_t stream;
  };

  static void move_on(RandomStream& stream);

  std::vector<RandomStream> streams_;
  std::vector<Watched> watched_;
};

/// A copy of the generator's state, and how to put it back. Take the generator's lock.
at::Tensor state_of(const at::Generator& generator);
void set_state(const at::Generator& generator, const at::Tensor& state);

}  // namespace lockstep::detail
