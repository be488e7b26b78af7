#include "lockstep/testing/fsdp/random_programs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/mesh/device_mesh.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/testing/checks.h"
#include "lockstep/testing/fsdp/parity.h"
#include "lockstep/testing/fsdp/states.h"
#include "lockstep/testing/fsdp/tree_model.h"
#include "lockstep/testing/seeds.h"
#include "lockstep/testing/thread_ranks.h"

namespace lockstep::testing {
namespace {

using NodeKind = TreeNode::Kind;
using ProgramStep = RandomProgram::Step;

constexpr double kMaxNorm = 0.1;
// In double precision: what is summed in another order is far nearer than what is wrong.
constexpr double kProgramTolerance = 1e-9;
constexpr double kLowTolerance = 1e-4;

bool has_frozen(const TreeNode& node) {
  return node.is_frozen || std::any_of(node.children.begin(), node.children.end(), has_frozen);
}

bool has_children(NodeKind kind) {
  return kind == NodeKind::kChain || kind == NodeKind::kResidual || kind == NodeKind::kTwice || kind == NodeKind::kIdle;
}

/// Draws the same on every platform, which std's distributions do not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int below(int limit) { return static_cast<int>(engine_() % static_cast<uint64_t>(limit)); }
  bool one_in(int n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

TreeNode random_node(Dice& dice, int depth) {
  static constexpr NodeKind kLeaves[] = {NodeKind::kLinear, NodeKind::kLinear, NodeKind::kNorm, NodeKind::kMlp};
  static constexpr NodeKind kInner[] = {NodeKind::kChain, NodeKind::kChain, NodeKind::kResidual, NodeKind::kTwice,
                                        NodeKind::kIdle};
  TreeNode node;
  const bool is_leaf = depth == 0 || dice.one_in(3);
  node.kind = is_leaf ? kLeaves[dice.below(4)] : kInner[dice.below(5)];
  if (!is_leaf) {
    for (int i = 1 + dice.below(3); i > 0; --i) node.children.push_back(random_node(dice, depth - 1));
  }
  node.is_unit = !dice.one_in(3);
  if (node.is_unit && dice.one_in(2)) {
    const int choice = dice.below(3);
    node.reshard_after_forward = choice == 2 ? ReshardAfterForward(2) : ReshardAfterForward(choice == 1);
  }
  node.is_frozen = dice.one_in(5);
  return node;
}

/// Half of the programs have checkpoints. From dice of their own: programs without are what they were before there were
/// any.
void add_checkpoints(TreeNode& node, Dice& dice) {
  if (dice.one_in(3)) node.checkpoint = static_cast<TreeNode::Checkpoint>(1 + dice.below(3));
  for (auto& child : node.children) add_checkpoints(child, dice);
}

TreeNode without_checkpoints(TreeNode node) {
  node.checkpoint = TreeNode::Checkpoint::kNone;
  for (auto& child : node.children) child = without_checkpoints(child);
  return node;
}

const char* name_of_kind(NodeKind kind) {
  static constexpr const char* kNames[] = {"linear", "norm", "mlp", "chain", "residual", "twice", "idle"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* name_of_step(ProgramStep step) {
  static constexpr const char* kNames[] = {"train",   "accumulate",   "clip", "evaluate",
                                           "discard", "two forwards", "throw"};
  return kNames[static_cast<std::size_t>(step)];
}

std::string describe_node(const TreeNode& node) {
  std::string text = node.is_frozen ? "frozen " : "";
  static constexpr const char* kCheckpoints[] = {"", "checkpointed ", "wholly checkpointed ", "partly checkpointed "};
  text += kCheckpoints[static_cast<std::size_t>(node.checkpoint)];
  if (node.is_unit) text += "unit ";
  if (const auto& reshard = node.reshard_after_forward) {
    text += reshard->is_count() ? "halving " : reshard->ranks() == 1 ? "staying " : "resharding ";
  }
  text += name_of_kind(node.kind);
  if (!has_children(node.kind)) return text;
  std::vector<std::string> children;
  for (const auto& child : node.children) children.push_back(describe_node(child));
  return text + "(" + join(children, ", ") + ")";
}

at::Tensor random_batch(int rank, std::size_t step, int number) {
  const auto seed = 1000 * (step + 1) + static_cast<std::size_t>(10 * number + rank);
  return at::randn({2, detail::TreeModule::kWidth}, at::detail::createCPUGenerator(seed), at::kDouble);
}

at::Tensor tree_loss(detail::TreeModel& model, int rank, std::size_t step, int number) {
  return model.forward(random_batch(rank, step, number)).pow(2).mean();
}

/// Trains a model by the program's steps. What differs between one process and a rank is given.
struct Trainer {
  detail::TreeModel& model;
  std::function<void(std::size_t step, std::vector<int> numbers)> backward;  // of the mean loss over the ranks
  std::function<void(std::size_t step)> accumulate;                          // the same, to be followed by a backward
  std::function<void(std::size_t step)> forward;
  std::function<void(std::size_t step)> throwing;
  std::function<void()> clip;

  void train(const RandomProgram& program) const {
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (std::size_t i = 0; i < program.steps.size(); ++i) {
      const auto kind = program.steps[i];
      if (kind == ProgramStep::kEvaluate || kind == ProgramStep::kDiscard) {
        const at::AutoGradMode grad_mode(kind == ProgramStep::kDiscard);
        forward(i);
        continue;
      }
      optimizer.zero_grad();
      if (kind == ProgramStep::kThrow) {
        throwing(i);
        continue;
      }
      if (kind == ProgramStep::kAccumulate) accumulate(i);
      backward(i, kind == ProgramStep::kTwoForwards ? std::vector{0, 2} : std::vector{0});
      if (kind == ProgramStep::kClip) clip();
      optimizer.step();
    }
  }
};

std::vector<at::Tensor> train_in_one_process(const RandomProgram& program, detail::TreeModel& model, int rank) {
  std::vector<at::Tensor> losses;
  const auto mean_backward = [&](std::size_t step, const std::vector<int>& numbers) {
    for (int each = 0; each < program.world_size; ++each) {
      for (const int number : numbers) {
        const auto loss = tree_loss(model, each, step, number);
        if (each == rank) losses.push_back(loss.detach());
        (loss / program.world_size).backward();
      }
    }
  };
  Trainer{.model = model,
          .backward = mean_backward,
          .accumulate = [&](std::size_t step) { mean_backward(step, {1}); },
          .forward = [&](std::size_t step) { losses.push_back(tree_loss(model, rank, step, 0).detach()); },
          .throwing = [&](std::size_t step) { losses.push_back(tree_loss(model, rank, step, 0).detach()); },
          .clip = [&] { clip_grad_norm_(model.parameters(), kMaxNorm); }}
      .train(program);
  return losses;
}

std::vector<at::Tensor> train_sharded(const RandomProgram& program, detail::TreeModel& model, FsdpUnit& root,
                                      int rank) {
  std::vector<at::Tensor> losses;
  const auto run = [&](std::size_t step, int number) {
    const auto loss = tree_loss(model, rank, step, number);
    losses.push_back(loss.detach());
    return loss;
  };
  Trainer{.model = model,
          .backward =
              [&](std::size_t step, const std::vector<int>& numbers) {
                auto loss = run(step, numbers.front());
                if (numbers.size() > 1) loss = loss + run(step, numbers.back());
                loss.backward();
              },
          .accumulate =
              [&](std::size_t step) {
                const auto no_sync = root.no_sync();
                run(step, 1).backward();
              },
          .forward = [&](std::size_t step) { run(step, 0); },
          .throwing =
              [&](std::size_t step) {
                model.throw_in_backward();
                const auto loss = run(step, 0);
                expect_error([&] { loss.backward(); }, {"thrown on purpose"});
              },
          .clip = [&] { root.clip_grad_norm_(kMaxNorm); }}
      .train(program);
  return losses;
}

FullyShardOptions options_of(const RandomProgram& program, const World& world) {
  FullyShardOptions options{.use_orig_params = !program.is_flat,
                            .forward_prefetch = program.forward_prefetch,
                            .backward_prefetch = program.backward_prefetch,
                            .limit_all_gathers = program.limit_all_gathers};
  if (program.is_hybrid) {
    options.mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"replicate", "shard"}});
  }
  if (program.is_low) options.mp_policy = {.param_dtype = at::kFloat, .reduce_dtype = at::kDouble};
  options = with_mesh(options, world.group());
  if (program.cuts_columns) {
    options.shard_placement_fn = [ranks = options.mesh->size(options.mesh->ndim() - 1)](const std::string& /*name*/,
                                                                                        const at::Tensor& parameter) {
      const bool is_cut = parameter.dim() == 2 && parameter.size(1) % ranks == 0;
      return is_cut ? std::optional(ShardPlacement{.dim = 1}) : std::nullopt;
    };
  }
  return options;
}

/// Parameters have no names of their own in a flat one, nor their gradients.
void compare_flat(const torch::nn::Module& whole, const torch::nn::Module& model, const Tolerance& tolerance) {
  const auto found = get_full_params(model);
  for (const auto& item : whole.named_parameters()) {
    check_equal(str("parameter '", item.key(), "'"), found.at(item.key()), item.value().detach(), tolerance);
  }
}

void compare_rank(const RandomProgram& program, const World& world) {
  const auto build_of = [](const TreeNode& node) {
    return build_deterministically_as([&] { return std::make_shared<detail::TreeModel>(node); });
  };
  const auto whole = build_of(without_checkpoints(program.model));
  const auto expected = train_in_one_process(program, *whole, world.rank());
  const auto model = build_of(program.model);
  auto root = model->shard(options_of(program, world));
  const auto losses = train_sharded(program, *model, root, world.rank());
  const auto close = program.is_low ? kLowTolerance : kProgramTolerance;
  const Tolerance tolerance{.relative = close, .absolute = close, .compare_dtype = !program.is_low};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    check_equal(str("loss ", i), losses.at(i), expected[i], tolerance);
  }
  if (program.is_flat) {
    compare_flat(*whole, *model, tolerance);
  } else {
    check_sharded_parity(*whole, *model, {}, close);
  }
}

/// Changes that make the tree simpler by one thing, each applied to a copy.
std::vector<TreeNode> simpler_trees(const TreeNode& node) {
  std::vector<TreeNode> trees = node.children;  // one of them in its place
  const auto with = [&](const std::function<void(TreeNode&)>& change) {
    auto changed = node;
    change(changed);
    if (changed != node) trees.push_back(std::move(changed));
  };
  with([](TreeNode& each) { each.is_unit = false, each.reshard_after_forward.reset(); });
  with([](TreeNode& each) { each.reshard_after_forward.reset(); });
  with([](TreeNode& each) { each.is_frozen = false; });
  with([](TreeNode& each) { each.checkpoint = TreeNode::Checkpoint::kNone; });
  with([](TreeNode& each) {
    if (each.checkpoint != TreeNode::Checkpoint::kNone) each.checkpoint = TreeNode::Checkpoint::kPlain;
  });
  with([](TreeNode& each) { each.kind = has_children(each.kind) ? NodeKind::kChain : NodeKind::kLinear; });
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    if (node.children.size() > 1) {
      with([i](TreeNode& each) { each.children.erase(each.children.begin() + static_cast<std::ptrdiff_t>(i)); });
    }
    for (auto& simpler : simpler_trees(node.children[i])) {
      with([&](TreeNode& each) { each.children[i] = std::move(simpler); });
    }
  }
  return trees;
}

std::vector<RandomProgram> simpler_programs(const RandomProgram& program) {
  std::vector<RandomProgram> programs;
  const auto with = [&](const std::function<void(RandomProgram&)>& change) {
    auto changed = program;
    change(changed);
    if (changed != program) programs.push_back(std::move(changed));
  };
  with([](RandomProgram& each) { each.is_hybrid = false; });
  with([](RandomProgram& each) { each.forward_prefetch = true; });
  with([](RandomProgram& each) { each.backward_prefetch = BackwardPrefetch::kBackwardPre; });
  with([](RandomProgram& each) { each.limit_all_gathers = true; });
  with([](RandomProgram& each) { each.is_flat = false; });
  with([](RandomProgram& each) { each.cuts_columns = false; });
  with([](RandomProgram& each) { each.is_low = false; });
  for (int size = 1; size < program.world_size; ++size) {
    with([size](RandomProgram& each) { each.world_size = size, each.is_hybrid = false; });
  }
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    if (program.steps.size() > 1) {
      with([i](RandomProgram& each) { each.steps.erase(each.steps.begin() + static_cast<std::ptrdiff_t>(i)); });
    }
    with([i](RandomProgram& each) { each.steps[i] = ProgramStep::kTrain; });
  }
  for (auto& tree : simpler_trees(program.model)) with([&](RandomProgram& each) { each.model = std::move(tree); });
  return programs;
}

}  // namespace

std::string RandomProgram::describe() const {
  std::vector<std::string> names;
  for (const auto step : steps) names.emplace_back(name_of_step(step));
  static constexpr const char* kPrefetches[] = {"", "prefetch behind gradients, ", "no prefetch in backward, "};
  return str(world_size,
             is_hybrid ? " ranks in two replicas: " : " ranks: ", forward_prefetch ? "" : "no prefetch in forward, ",
             kPrefetches[static_cast<std::size_t>(backward_prefetch)], limit_all_gathers ? "" : "all ahead, ",
             is_flat ? "flat, " : "", cuts_columns ? "columns cut, " : "", is_low ? "in float, " : "",
             join(names, ", "), "; ", describe_node(model));
}

RandomProgram random_program(uint64_t seed) {
  Dice dice(seed);
  RandomProgram program;
  program.model = random_node(dice, 3);
  program.steps.clear();
  for (int i = 2 + dice.below(4); i > 0; --i) program.steps.push_back(static_cast<ProgramStep>(dice.below(7)));
  program.world_size = 1 + dice.below(4);
  program.is_hybrid = program.world_size == 4 && dice.one_in(2);
  program.forward_prefetch = !dice.one_in(4);
  if (dice.one_in(2)) program.backward_prefetch = static_cast<BackwardPrefetch>(dice.below(3));
  program.limit_all_gathers = !dice.one_in(4);
  program.is_flat = !has_frozen(program.model) && dice.one_in(2);
  program.cuts_columns = !program.is_flat && dice.one_in(3);
  program.is_low = dice.one_in(4);
  Dice checkpoints(seed + 1'000'000);
  if (checkpoints.one_in(2)) add_checkpoints(program.model, checkpoints);
  return program;
}

std::string run_program(const RandomProgram& program, const AroundRank& around) {
  const auto report = run_threads({.world_size = program.world_size, .completes_late = true}, [&](const World& world) {
    const auto body = [&] { compare_rank(program, world); };
    if (around) {
      around(world, body);
    } else {
      body();
    }
  });
  return report.has_passed() ? "" : report.describe();
}

RandomProgram simplest(RandomProgram program, const std::function<bool(const RandomProgram& program)>& fails) {
  for (bool is_simpler = true; is_simpler;) {
    is_simpler = false;
    for (auto& candidate : simpler_programs(program)) {
      if (!fails(candidate)) continue;
      program = std::move(candidate);
      is_simpler = true;
      break;
    }
  }
  return program;
}

void check_program(const RandomProgram& program, const AroundRank& around) {
  if (run_program(program, around).empty()) return;
  const auto small = simplest(program, [&](const RandomProgram& each) { return !run_program(each, around).empty(); });
  throw CheckFailure(str("this program differs from one process:\n  ", small.describe(), "\n",
                         run_program(small, around), "found as:\n  ", program.describe()));
}

}  // namespace lockstep::testing
