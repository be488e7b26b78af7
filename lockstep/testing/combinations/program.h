// Training programs composed of axes, and compared step by step with one process that trains on all ranks' batches:
//
//   LOCKSTEP_THREAD_TEST(Mine, TrainsAsOneProcess, 2) {
//     run_program(world, programs().parse("model=tied, way=elements, loop=accumulate"));
//   }
//
// A value of an axis is a row of a table: model_kinds() in models.cpp, ways() and wrappers() in ways.cpp, loops() in
// loops.cpp, events() in events.cpp. What the library refuses is a row of rules.cpp; all else must train. See
// docs/testing.md.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/testing/combinations/covering.h"
#include "lockstep/testing/combinations/models.h"
#include "lockstep/zero/optimizer.h"

namespace lockstep::testing::combinations {

class Trainer;

/// An optimizer, divided among ranks or not.
struct AnyOptimizer {
  std::shared_ptr<torch::optim::Optimizer> optimizer = nullptr;
  ZeroOptimizer* zero = nullptr;  // null: a plain one
  bool steps_in_backward = false;

  void step() const;
  void zero_grad() const;
  void add_param_group(const torch::optim::OptimizerParamGroup& group) const;
};

struct Way {
  std::string name;
  /// The optimizer's line in a program's text.
  std::string text;
  std::function<AnyOptimizer(const std::vector<at::Tensor>& parameters, const ModelKind& kind, const AnyDdp& ddp)> make;
  /// Backwards do the steps, once this has made the wrapper's hook do them.
  std::function<void(const AnyDdp& ddp, const AnyOptimizer& optimizer)> overlap = nullptr;
  /// Parameters are those of the plain optimizer, bit by bit.
  bool equals_plain = false;
};

struct Wrapper {
  std::string name;
  /// The wrapper's options in a program's text, and what follows.
  std::string options;
  std::string text = "";
  std::function<void(DdpOptions& options, const Net& net)> set = [](DdpOptions&, const Net&) {};
  std::function<void(const AnyDdp& ddp)> after = [](const AnyDdp&) {};
  /// Units of fully_shard() in place of a wrapper.
  bool is_sharded = false;
  bool is_compiled = false;  // the module around those units
  /// None of either: ranks have the same batch.
  bool is_bare = false;
  bool reshards_after_forward = true;
  /// On how many ranks each layer is divided. Those have the same batch.
  int tp_size = 1;
  /// How far parameters may be from those of one process, relative to 1 and to themselves.
  double tolerance = 2e-5;
};

/// How a step computes its gradients.
struct Loop {
  std::string name;
  std::string text;
  std::function<void(Trainer& trainer)> run;
  /// What of it ranks without inputs must do as well.
  std::function<void(Trainer& trainer)> before_step = nullptr;
};

/// What happens between two epochs.
struct Event {
  std::string name;
  std::string text;
  std::function<void(Trainer& trainer)> run = [](Trainer&) {};
  /// The last layer is frozen, or not the optimizer's, until then.
  bool begins_frozen = false;
  bool begins_without_last = false;
};

const std::vector<Way>& ways();
const std::vector<Wrapper>& wrappers();
const std::vector<Loop>& loops();
const std::vector<Event>& events();

/// One program.
struct Program {
  const ModelKind& kind;
  const Way& way;
  const Wrapper& wrapper;
  const Loop& loop;
  const Event& event;
  bool has_uneven_inputs = false;
  bool zeroes_module = false;
  /// That have batches of their own.
  int data_ranks = 1;
};

/// All programs, with the library's refusals as rules.
const Combinations& programs();
Program program_of(const Combination& combination);
/// The axis "world" says how many ranks have batches of their own; layers may be divided among several for each.
int world_size_of(const Combination& combination);
/// How to run it again, and its text.
std::string description_of(const Combination& combination);

/// Runs it on this rank of a world of its size. Throws CheckFailure, saying what differed, unless it trains as one
/// process does, or is refused as programs() has it; and in a world of another size. Collective.
void run_program(const World& world, const Combination& combination);

/// What LOCKSTEP_COMBINATIONS asks for: nothing or "pairs", "triples:SEED", "random:SEED, way=plain", or one program:
/// "model=tied, world=2".
std::vector<Combination> asked_for();

}  // namespace lockstep::testing::combinations
