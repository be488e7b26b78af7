// Random training programs for fully_shard(): a tree of modules, which of them are units under which options, and what
// the steps do. A program runs on ranks as threads and by one process on the batches of all ranks; both must come to
// the same losses, gradients and parameters. One that does not is made as simple as it still does not.
//
//   for (uint64_t seed = 0; seed < 100; ++seed) check_program(random_program(seed));
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/fsdp/options.h"

namespace lockstep::testing {

struct TreeNode {
  enum class Kind {
    kLinear,    // followed by tanh
    kNorm,      // a LayerNorm
    kMlp,       // to three times the width and back: rows that few numbers of ranks divide
    kChain,     // its children one behind the other
    kResidual,  // the same, and the input is added
    kTwice,     // the same, called twice
    kIdle,      // has children that it does not call
  };
  Kind kind = Kind::kLinear;
  std::vector<TreeNode> children = {};  // of the last four
  bool is_unit = false;
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;  // a number only if it divides the ranks
  bool is_frozen = false;                                                   // its own parameters
  enum class Checkpoint {
    kNone,
    kPlain,      // its forward runs again in backward
    kToTheEnd,   // without an early stop
    kSelective,  // without its products
  };
  Checkpoint checkpoint = Checkpoint::kNone;

  bool operator==(const TreeNode&) const = default;
};

struct RandomProgram {
  enum class Step {
    kTrain,
    kAccumulate,   // a batch under no_sync(), and another one
    kClip,         // gradients are clipped
    kEvaluate,     // a forward without gradients
    kDiscard,      // a forward without a backward
    kTwoForwards,  // one backward for two batches
    kThrow,        // a backward that throws half-way
  };
  /// A trainable layer of the root stands behind it.
  TreeNode model = {};
  std::vector<Step> steps = {Step::kTrain};
  int world_size = 2;
  /// Of four ranks two shard and two replicate.
  bool is_hybrid = false;
  bool forward_prefetch = true;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kBackwardPre;
  bool limit_all_gathers = true;
  /// One flat parameter per unit. Only if nothing is frozen: such a parameter is as a whole.
  bool is_flat = false;
  /// Weights whose columns the ranks divide evenly are cut along these.
  bool cuts_columns = false;
  /// Computes in float, reduces and steps in double.
  bool is_low = false;

  /// "2 ranks: train, clip; chain(unit linear, frozen norm)"
  std::string describe() const;
  bool operator==(const RandomProgram&) const = default;
};

/// Everything follows from the seed.
RandomProgram random_program(uint64_t seed);

/// Runs `body` on a rank: for tests that put something around it.
using AroundRank = std::function<void(const World& world, const std::function<void()>& body)>;

/// What is wrong with the program; empty if nothing is. Starts ranks as threads, whose collectives complete late.
std::string run_program(const RandomProgram& program, const AroundRank& around = nullptr);

/// A program that `fails` too, and none that is simpler by one thing does: a node, a unit, an option, a step, a rank.
RandomProgram simplest(RandomProgram program, const std::function<bool(const RandomProgram& program)>& fails);

/// Runs it; throws CheckFailure with the simplest program that fails, and what is wrong with it.
void check_program(const RandomProgram& program, const AroundRank& around = nullptr);

}  // namespace lockstep::testing
