// The order in which units gather, compute and reduce, as tables. Another order may be as right, but should be meant.
//
// f: a unit's forward begins; g: its gather is launched; |: backward begins; b: the gradient of its output is there;
// r: its reduction is launched. Units are 1 to 3, the root is 0. The input needs no gradient, so backward does not need
// the parameters of the unit that is called first, and from the second step on it is known that it does not.
#include "lockstep/base/observer.h"
#include "lockstep/base/str.h"
#include "lockstep/testing/fsdp/test_model.h"
#include "lockstep/testing/recorder.h"
#include "lockstep/testing/seeds.h"

namespace lockstep::fsdp_order_test {

using testing::Recorder;

void mark(const std::string& kind, const std::string& unit) {
  announce({.kind = kind, .unit = unit, .state = "launch"});
}

/// Where checkpoints are: in each unit, around each, or one around all.
enum class Checkpoints { kNone, kInUnits, kAroundEach, kAroundAll };

/// Runs it in a checkpoint if told to. Ranks are threads here and share the default generator.
at::Tensor checkpoint_if(bool is_checkpointed, const std::function<at::Tensor(const at::Tensor&)>& run,
                         const at::Tensor& input) {
  return is_checkpointed ? checkpoint({.preserve_rng_state = false}, run, input) : run(input);
}

/// Tells when its forward begins, and when the gradient of its output is there. Each unit has a type of its own.
template <int kNumber>
struct LayerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input, Checkpoints checkpoints) {
    return checkpoint_if(checkpoints == Checkpoints::kInUnits, [this](const at::Tensor& in) { return run(in); }, input);
  }
  at::Tensor run(const at::Tensor& input) {
    const std::string name = "unit" + std::to_string(kNumber);
    mark("forward", name);
    auto output = at::tanh(linear->forward(input));
    if (output.requires_grad()) {
      output.register_hook([name](const at::Tensor&) { mark("backward", name); });
    }
    return output;
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 4));
};
using Unit1Impl = LayerImpl<1>;
using Unit2Impl = LayerImpl<2>;
using Unit3Impl = LayerImpl<3>;

/// Three units, and a layer of the root behind them.
struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input, const std::vector<int>& path, Checkpoints checkpoints) {
    const auto run_unit = [this, checkpoints](int unit, const at::Tensor& in) {
      return unit == 1   ? unit1->forward(in, checkpoints)
             : unit == 2 ? unit2->forward(in, checkpoints)
                         : unit3->forward(in, checkpoints);
    };
    const auto run_path = [run_unit, path, checkpoints](at::Tensor hidden) {
      for (const int unit : path) {
        hidden = checkpoint_if(
            checkpoints == Checkpoints::kAroundEach,
            [run_unit, unit](const at::Tensor& in) { return run_unit(unit, in); }, hidden);
      }
      return hidden;
    };
    const auto hidden = checkpoint_if(checkpoints == Checkpoints::kAroundAll, run_path, input);
    mark("forward", "root");
    return head->forward(hidden);
  }
  std::shared_ptr<Unit1Impl> unit1 = register_module("unit1", std::make_shared<Unit1Impl>());
  std::shared_ptr<Unit2Impl> unit2 = register_module("unit2", std::make_shared<Unit2Impl>());
  std::shared_ptr<Unit3Impl> unit3 = register_module("unit3", std::make_shared<Unit3Impl>());
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 2));
};
TORCH_MODULE(Net);

enum class Kind { kTrain, kNoSync, kEvaluate };

struct Step {
  std::string expected;
  std::vector<int> path = {1, 2, 3};
  Kind kind = Kind::kTrain;
};

struct Row {
  std::string what;
  FullyShardOptions options = {};
  std::vector<Step> steps = {};
  Checkpoints checkpoints = Checkpoints::kNone;
};

const std::string kFirst = "f1 g1 f2 g2 f3 g3 f0 g0 | g3 r0 b3 g2 r3 b2 g1 r2 b1 r1";
const std::string kLater = "f1 g1 g2 f2 g3 f3 g0 f0 | g3 r0 b3 g2 r3 b2 r2 b1 r1";

// Units that run again in backward. The first one needs its parameters for that.
const std::string kFirstAgain = "f1 g1 f2 g2 f3 g3 f0 g0 | g3 r0 b3 f3 g2 r3 b2 f2 g1 r2 b1 f1 r1";
const std::string kLaterAgain = "f1 g1 g2 f2 g3 f3 g0 f0 | g3 r0 b3 f3 g2 r3 b2 f2 g1 r2 b1 f1 r1";
const std::vector<Step> kKeptWhole = {{"f1 g1 f2 g2 f3 g3 f0 g0 | r0 b3 r3 b2 r2 b1 r1"},
                                      {"f1 g1 g2 f2 g3 f3 g0 f0 | r0 b3 r3 b2 r2 b1 r1"}};

const std::vector<Row>& table() {
  static const std::vector<Row> rows = {
      {"the next unit is gathered while one computes, in forward from the second step on",
       {},
       {{kFirst}, {kLater}, {kLater}}},
      {"reshard_after_forward: the root too, once it is known to be the last",
       {.reshard_after_forward = true},
       {{kFirst}, {"f1 g1 g2 f2 g3 f3 g0 f0 | g0 g3 r0 b3 g2 r3 b2 r2 b1 r1"}}},
      {"no reshard_after_forward: backward gathers nothing", {.reshard_after_forward = false}, kKeptWhole},
      {"reshard_after_forward = 1 is false", {.reshard_after_forward = 1}, kKeptWhole},
      {"without forward prefetch units are gathered when they are touched",
       {.forward_prefetch = false},
       {{kFirst}, {"f1 g1 f2 g2 f3 g3 f0 g0 | g3 r0 b3 g2 r3 b2 r2 b1 r1"}}},
      {"backward prefetch behind the gradients of a unit",
       {.backward_prefetch = BackwardPrefetch::kBackwardPost},
       {{"f1 g1 f2 g2 f3 g3 f0 g0 | r0 g3 b3 r3 g2 b2 r2 g1 b1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | r0 g3 b3 r3 g2 b2 r2 b1 r1"}}},
      {"no backward prefetch",
       {.backward_prefetch = BackwardPrefetch::kNone},
       {{"f1 g1 f2 g2 f3 g3 f0 g0 | r0 b3 g3 r3 b2 g2 r2 b1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | r0 b3 g3 r3 b2 g2 r2 b1 r1"}}},
      {"no_sync: nothing is reduced until the step after it",
       {},
       {{kFirst}, {"f1 g1 g2 f2 g3 f3 g0 f0 | g3 b3 g2 b2 b1", {1, 2, 3}, Kind::kNoSync}, {kLater}}},
      {"a unit that is called twice is gathered twice and reduced once",
       {},
       {{"f1 g1 f2 g2 f1 g1 f3 g3 f0 g0 | g3 r0 b3 g1 r3 b1 g2 b2 r2 b1 r1", {1, 2, 1, 3}},
        {"f1 g1 g2 f2 g1 f1 g3 f3 g0 f0 | g3 r0 b3 g1 r3 b1 g2 b2 r2 b1 r1", {1, 2, 1, 3}}}},
      {"a unit nobody uses does nothing",
       {},
       {{"f1 g1 f3 g3 f0 g0 | g3 r0 b3 g1 r3 b1 r1", {1, 3}}, {"f1 g1 g3 f3 g0 f0 | g3 r0 b3 r3 b1 r1", {1, 3}}}},
      {"another path than the last step's costs gathers",
       {},
       {{kFirst},
        {"f1 g1 g2 f3 g3 f0 g0 | g3 r0 b3 r3 b1 r1", {1, 3}},
        {"f1 g1 g3 f2 g2 f3 f0 g0 | g3 r0 b3 r3 b2 g2 r2 b1 r1"}}},
      {"evaluation: the root stays whole",
       {},
       {{kFirst},
        {"f1 g1 g2 f2 g3 f3 g0 f0", {1, 2, 3}, Kind::kEvaluate},
        {"f1 g1 g2 f2 g3 f3 f0", {1, 2, 3}, Kind::kEvaluate}}},
      {"a checkpoint in each unit: what runs again needs the gather that backward makes anyway",
       {},
       {{kFirstAgain}, {kLaterAgain}, {kLaterAgain}},
       Checkpoints::kInUnits},
      {"a checkpoint around each unit: the same",
       {},
       {{"f1 g1 f2 g2 f3 g3 f0 g0 | g3 r0 b3 f3 g2 r3 b2 f2 g1 r2 b1 f1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | g3 r0 b3 f3 g2 r3 b2 f2 g1 r2 b1 f1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | g3 r0 b3 f3 g2 r3 b2 f2 g1 r2 b1 f1 r1"}},
       Checkpoints::kAroundEach},
      {"a checkpoint around all units: gathered as they run again, and freed by backward",
       {},
       {{"f1 g1 f2 g2 f3 g3 f0 g0 | g3 r0 b3 f1 g1 f2 g2 f3 r3 b2 r2 b1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | g1 r0 b3 f1 g2 f2 g3 f3 r3 b2 r2 b1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | g1 r0 b3 f1 g2 f2 g3 f3 r3 b2 r2 b1 r1"}},
       Checkpoints::kAroundAll},
      {"a checkpoint around each unit that stays whole: backward gathers nothing",
       {.reshard_after_forward = false},
       {{"f1 g1 f2 g2 f3 g3 f0 g0 | r0 b3 f3 r3 b2 f2 r2 b1 f1 r1"},
        {"f1 g1 g2 f2 g3 f3 g0 f0 | r0 b3 f3 r3 b2 f2 r2 b1 f1 r1"}},
       Checkpoints::kAroundEach},
      {"a checkpoint around a unit that is called twice",
       {},
       {{"f1 g1 f2 g2 f1 g1 f3 g3 f0 g0 | g3 r0 b3 f3 g1 r3 b1 f1 g2 b2 f2 r2 b1 f1 r1", {1, 2, 1, 3}},
        {"f1 g1 g2 f2 g1 f1 g3 f3 g0 f0 | g3 r0 b3 f3 g1 r3 b1 f1 g2 b2 f2 r2 b1 f1 r1", {1, 2, 1, 3}}},
       Checkpoints::kAroundEach},
  };
  return rows;
}

FsdpUnit shard(NetImpl& net, const FullyShardOptions& options) {
  fully_shard(*net.unit1, options);
  fully_shard(*net.unit2, options);
  fully_shard(*net.unit3, options);
  return fully_shard(net, options);
}

void run(Net& net, FsdpUnit& root, const Step& step, Checkpoints checkpoints) {
  const at::AutoGradMode grad_mode(step.kind != Kind::kEvaluate);
  const std::unique_ptr<FsdpNoSync> no_sync(step.kind == Kind::kNoSync ? new FsdpNoSync(root.no_sync()) : nullptr);
  const auto loss = net->forward(at::ones({2, 4}), step.path, checkpoints).sum();
  if (step.kind == Kind::kEvaluate) return;
  mark("|", "");
  loss.backward();
}

/// "1" of "unit1", and of labels that hold the unit's name or type.
std::string digit_of(const std::string& unit) {
  for (const auto* digit : {"1", "2", "3"}) {
    for (const auto* before : {"unit", "LayerImpl<"}) {
      if (unit.find(std::string(before) + digit) != std::string::npos) return digit;
    }
  }
  return "0";
}

std::string letters_of(const std::vector<Event>& events) {
  std::vector<std::string> letters;
  for (const auto& event : events) {
    const auto digit = digit_of(event.unit);
    if (event.kind == "|") {
      letters.emplace_back("|");
    } else if (event.kind.starts_with("all_gather")) {
      letters.push_back("g" + digit);
    } else {
      letters.push_back(event.kind.substr(0, 1) + digit);
    }
  }
  return join(letters, " ");
}

// TEST-58, FSDP-83, FSDP-25, FSDP-26, FSDP-29, FSDP-30, FSDP-44, FSDP-45, FSDP-62
LOCKSTEP_THREAD_TEST(FsdpOrder, IsAsInTheTable, 2) {
  for (const auto& row : table()) {
    SCOPED_TRACE(row.what);
    auto net = testing::build_deterministically_as([] { return Net(); });
    auto root = shard(*net, testing::with_mesh(row.options, world.group()));
    for (const auto& step : row.steps) {
      const Recorder recorder;
      run(net, root, step, row.checkpoints);
      EXPECT_EQ(letters_of(recorder.events("launch")), step.expected);
    }
  }
}

// FSDP-46
LOCKSTEP_THREAD_TEST(FsdpOrder, ListsNameAllUnitsThatAreGatheredAheadOrNone, 2) {
  auto net = testing::build_deterministically_as([] { return Net(); });
  auto root = shard(*net, testing::with_mesh({}, world.group()));
  auto first = *unit_of(*net->unit1);
  auto last = *unit_of(*net->unit3);
  const auto expect_step = [&](const std::string& expected) {
    const Recorder recorder;
    run(net, root, {}, Checkpoints::kNone);
    EXPECT_EQ(letters_of(recorder.events("launch")), expected);
  };
  first.set_modules_to_forward_prefetch({*unit_of(*net->unit2), last});
  last.set_modules_to_backward_prefetch({*unit_of(*net->unit2), first});
  expect_step("f1 g1 g2 g3 f2 f3 f0 g0 | g3 r0 b3 g2 g1 r3 b2 r2 b1 r1");
  first.set_modules_to_forward_prefetch({});
  last.set_modules_to_backward_prefetch({});
  expect_step("f1 g1 f2 g2 g3 f3 g0 f0 | g3 r0 b3 r3 b2 g2 r2 b1 r1");
}

}  // namespace lockstep::fsdp_order_test
