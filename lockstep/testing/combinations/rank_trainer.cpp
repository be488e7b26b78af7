// A program on a rank: trained, compared with the one process after every step, and judged.
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/failure.h"
#include "lockstep/comm/objects.h"
#include "lockstep/comm/threads/thread_backend.h"
#include "lockstep/fsdp/join.h"
#include "lockstep/fsdp/optimizer_state.h"
#include "lockstep/join/join.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/testing/combinations/trainer.h"
#include "lockstep/testing/run.h"

namespace lockstep::testing::combinations {
namespace {

constexpr double kSmallBuckets = 1e-4;  // MiB: several buckets in nets of a few hundred weights

/// Warnings of this thread, kept for the report.
class KeptWarnings : c10::WarningHandler {
 public:
  KeptWarnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  const c10::WarningUtils::WarningHandlerGuard guard_;
};

class RankTrainer : public Trainer {
 public:
  RankTrainer(const Program& program, const World& world, std::vector<Snapshot> expected, bool compares)
      : Trainer(program), world_(world), expected_(std::move(expected)), compares_(compares) {
    const auto tp_size = program.wrapper.tp_size;
    rank_ = world.rank() / tp_size;
    if (tp_size > 1) mesh_ = init_device_mesh("cpu", {program.data_ranks, tp_size}, {.mesh_dim_names = {"dp", "tp"}});
  }

  void run() {
    set_up(kFirstSeed + static_cast<uint64_t>(rank_));
    train();
  }
  /// Ranks have the same parameters, bit by bit, after each step that they took. Collective.
  void check_replicas() const;
  /// Of parameters, by step; empty where this rank took none.
  const std::vector<std::string>& hashes() const { return hashes_; }
  /// Where parameters are not what they were when a step, or an event, had been completed.
  std::string change_since_completed() const {
    // A rank without inputs may have mirrored a step that the others do not take.
    if (completed_.empty() || has_run_out_) return "";
    return difference(parameters(), completed_, program_.wrapper.tolerance);
  }

  void backward(const at::Tensor& loss) override { loss.backward(); }
  void weighted_backward(const at::Tensor& loss) override {
    auto& ddp = part().ddp;
    if (program_.wrapper.is_bare) return backward(loss);
    ddp.root ? ddp.root->backward(loss, weight_of(rank_)) : ddp.base->backward(loss, weight_of(rank_));
  }
  void penalize_weights() override { weight_penalty().backward(); }
  void without_sync(const std::function<void()>& body) override {
    std::vector<std::unique_ptr<NoSyncGuard>> guards;
    std::vector<std::unique_ptr<FsdpNoSync>> of_units;
    for (auto& each : parts_) {
      if (each.ddp.root) {
        of_units.emplace_back(new FsdpNoSync(each.ddp.root->no_sync()));
      } else if (each.ddp.base != nullptr) {
        guards.push_back(std::make_unique<NoSyncGuard>(each.ddp.base->engine()));
      }
    }
    body();
  }
  void backward_with(Fault fault) override {
    if (is_special(step_)) fail_once(fault);
    backward(loss());
  }

 protected:
  void wrap(Part& part) override {
    if (mesh_) divide_layers(part);
    if (program_.wrapper.is_bare) {
      part.ddp = {.group = data_group(), .forward = part.model.forward};
      return;
    }
    if (program_.wrapper.is_sharded) return shard(part);
    DdpOptions options{.process_group = data_group(), .bucket_cap_mb = kSmallBuckets};
    program_.wrapper.set(options, *part.model.net);
    if (program_.way.overlap) {
      // Else its first steps update nothing.
      options.bucket_plan = part.model.wrap(options).base->bucket_plan().save();
    }
    part.ddp = part.model.wrap(options);
    program_.wrapper.after(part.ddp);
    // A wrapper that was made anew.
    if (program_.way.overlap && part.optimizer.zero != nullptr) program_.way.overlap(part.ddp, part.optimizer);
  }
  AnyOptimizer made_optimizer(const std::vector<at::Tensor>& parameters, const Part& part) override {
    return program_.way.make(parameters, program_.kind, part.ddp);
  }
  void resume(Part& part, const AnyNet& fresh) override {
    if (!program_.wrapper.is_sharded) return Trainer::resume(part, fresh);
    const auto model = full_state_dict(*part.model.net);
    const auto optimizer = full_optimizer_state_dict(*part.model.net, *part.optimizer.optimizer);
    part = {.model = fresh, .first = part.first};
    wrap(part);
    load_full_state_dict(*part.model.net, model);
    make_optimizer(part);
    // Some branches have not been taken.
    load_full_optimizer_state_dict(*part.model.net, *part.optimizer.optimizer, optimizer, {.strict = false});
  }
  std::string saved(const AnyOptimizer& optimizer) override {
    if (optimizer.zero == nullptr) return saved_optimizer(*optimizer.optimizer);
    optimizer.zero->consolidate_state_dict(0);
    const auto mine = rank_ == 0 ? saved_optimizer(*optimizer.optimizer) : "";
    return broadcast_object(mine, 0, data_group());
  }
  const Forward& forward_of(const Part& part) const override { return part.ddp.forward; }
  bool has_step(int step) const override { return has_inputs(rank_, step); }
  void play_ranks() override { program_.loop.run(*this); }
  void in_scope(const std::function<void()>& steps, int last_step) override;
  void on_parameters_changed() override { completed_ = parameters(); }
  void on_step(int step) override { compare(step); }
  bool counts_buffers() const override { return rank_ == leader(); }

 private:
  /// The ranks with batches of their own.
  GroupPtr data_group() const { return mesh_ ? mesh_->get_group("dp") : world_.group(); }
  void divide_layers(Part& part);
  void shard(Part& part);
  void fail_once(Fault fault);
  void compare(int step);
  /// What this rank should have.
  Snapshot expected_after(int step) const;

  const World& world_;
  const std::vector<Snapshot> expected_;
  const bool compares_;
  std::optional<DeviceMesh> mesh_;  // if layers are divided
  Snapshot completed_;
  bool has_run_out_ = false;  // of inputs, in a Join scope
  std::vector<std::string> hashes_ = std::vector<std::string>(kSteps);
};

void RankTrainer::divide_layers(Part& part) {
  auto& net = *part.model.net;
  const auto parameters = net.parameters();
  const bool is_divided = std::any_of(parameters.begin(), parameters.end(),
                                      [](const at::Tensor& each) { return layout_of(each) != nullptr; });
  // What stands around layers may be made anew.
  if (!is_divided || program_.wrapper.is_bare) parallelize_module(net, (*mesh_)["tp"], plan_of(net));
}

void RankTrainer::shard(Part& part) {
  auto& net = *part.model.net;
  if (!unit_of(net)) {  // else it is refused, with its parameters as they are
    const at::NoGradGuard no_grad;
    for (auto& each : net.parameters()) broadcast(each, 0, data_group());
    for (auto& each : net.buffers()) broadcast(each, 0, data_group());
  }
  const FullyShardOptions options{.mesh = mesh_ ? (*mesh_)["dp"] : DeviceMesh::from_group(world_.group(), "cpu"),
                                  .reshard_after_forward = program_.wrapper.reshards_after_forward};
  // A parameter is in one unit, also if it has two names.
  std::map<const void*, int> names;
  for (const auto& each : net.parameters()) ++names[each.unsafeGetTensorImpl()];
  for (const auto& child : net.children()) {
    const auto of_child = child->parameters();
    const bool is_unit = std::all_of(of_child.begin(), of_child.end(),
                                     [&](const at::Tensor& each) { return names[each.unsafeGetTensorImpl()] == 1; });
    if (is_unit && !unit_of(*child)) fully_shard(*child, options);
  }
  part.ddp = {.root = fully_shard(net, options),
              .group = data_group(),
              .forward = program_.wrapper.is_compiled ? part.model.compile() : part.model.forward};
}

void RankTrainer::fail_once(Fault fault) {
  part().model.net->fault = fault;
  bool has_failed = false;
  try {
    const auto value = loss();
    if (fault == Fault::kInLoss) throw InjectedFault("injected fault in the loss");
    backward(value);
  } catch (const std::exception& error) {
    if (std::string(error.what()).find("injected fault") == std::string::npos) throw;
    has_failed = true;
  }
  part().model.net->fault = Fault::kNone;
  if (!has_failed) throw CheckFailure("the injected fault did not come out of the step");
  zero_grad();
}

void RankTrainer::in_scope(const std::function<void()>& steps, int last_step) {
  if (!program_.has_uneven_inputs) return steps();
  std::vector<Joinable*> joinables;
  std::vector<std::unique_ptr<FsdpJoinable>> of_units;
  JoinSettings settings;
  settings.options.weighted = program_.loop.name == "weighted";
  for (auto& each : parts_) {
    if (each.ddp.root) of_units.push_back(std::make_unique<FsdpJoinable>(*each.ddp.root));
    joinables.push_back(each.ddp.root ? static_cast<Joinable*>(of_units.back().get()) : each.ddp.base);
    if (each.optimizer.zero != nullptr && !each.optimizer.steps_in_backward) joinables.push_back(each.optimizer.zero);
  }
  if (program_.loop.before_step) settings.before_mirrored_step = [&] { program_.loop.before_step(*this); };
  const auto update = [&] {
    for (auto& each : parts_) {
      if (each.optimizer.zero != nullptr) continue;
      each.optimizer.step();
      each.optimizer.zero_grad();
    }
    on_parameters_changed();
  };
  if (of_units.empty()) settings.on_mirrored_step = update;
  Join scope(joinables, settings);
  if (!of_units.empty()) scope.mirror(update);
  scope.run([&] {
    steps();
    has_run_out_ = true;
  });
  has_run_out_ = false;
  compare(last_step);
}

Snapshot RankTrainer::expected_after(int step) const {
  auto expected = expected_[static_cast<std::size_t>(step) + 1];
  std::size_t index = 0;
  for (const auto& each : parts_) {
    for (const auto& parameter : each.model.net->parameters()) {
      auto& value = expected[index++].second;
      if (const auto layout = layout_of(parameter)) value = layout->cut(value);
    }
  }
  return expected;
}

void RankTrainer::compare(int step) {
  if (!compares_) return;
  const auto off = difference(snapshot(), expected_after(step), program_.wrapper.tolerance);
  if (!off.empty()) throw CheckFailure(str("rank ", rank_, ", after step ", step, ": ", off));
  if (program_.wrapper.is_sharded) return;  // ranks have different parts
  std::size_t hash = 1;
  for (const auto& each : parts_) {
    for (const auto& parameter : each.model.net->parameters()) {
      const auto values = parameter.detach().contiguous();
      const std::string bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
      hash = c10::hash_combine(hash, std::hash<std::string>()(bytes));
    }
  }
  hashes_[static_cast<std::size_t>(step)] = str(hash);
}

void RankTrainer::check_replicas() const {
  std::string mine;
  for (const auto& hash : hashes_) mine += hash + ";";
  const auto all = all_gather_object(mine, data_group());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream others(all[rank]);
    std::string other;
    for (std::size_t step = 0; step < hashes_.size() && std::getline(others, other, ';'); ++step) {
      if (!hashes_[step].empty() && !other.empty() && hashes_[step] != other) {
        throw CheckFailure(str("after step ", step, " the parameters of ranks ", rank_, " and ", rank,
                               " are close to those of one process, but not the same bits"));
      }
    }
  }
}

void check_equals_plain(const Program& program, const World& world, const std::vector<std::string>& hashes) {
  const Program plain{program.kind,          ways().front(),    program.wrapper,
                      program.loop,          program.event,     program.has_uneven_inputs,
                      program.zeroes_module, program.data_ranks};
  RankTrainer trainer(plain, world, train_in_one_process(plain), /*compares=*/true);
  trainer.run();
  for (std::size_t step = 0; step < hashes.size(); ++step) {
    if (hashes[step] == trainer.hashes()[step]) continue;
    throw CheckFailure(str("rank ", world.rank(), ", after step ", step,
                           ": parameters are close to those of the plain ", "optimizer, but not the same bits"));
  }
}

/// What is wrong with a program that ended by `error`, or by none if that is empty.
std::string judged(const std::vector<const Rule*>& refusals, const std::string& error, const std::string& change) {
  if (refusals.empty()) return error;
  const auto& rule = *refusals.front();
  if (error.empty()) return str("it was not refused, which is expected: '", rule.text, "'");
  if (error.find(rule.text) == std::string::npos) return str("it is to be refused by '", rule.text, "', but: ", error);
  if (!rule.is_late && !change.empty()) return str("it was refused after parameters had been changed: ", change);
  return "";
}

}  // namespace

void run_program(const World& world, const Combination& combination) {
  const auto program = program_of(combination);
  if (const auto size = world_size_of(combination); world.world_size() != size) {
    throw CheckFailure(str("the program is one for ", size, " ranks, and this world has ", world.world_size(),
                           ". Say \"world=", world.world_size() / program.wrapper.tp_size,
                           "\" in it, or run it on as many ranks as it says."));
  }
  const auto rules = programs().rules_of(combination);
  const bool compares = rules.empty() || !rules.front()->is_late;
  KeptWarnings warnings;
  std::string problem;
  std::exception_ptr peer_failure;
  {
    RankTrainer trainer(program, world, train_in_one_process(program), compares);
    try {
      trainer.run();
      if (rules.empty()) trainer.check_replicas();
      if (rules.empty() && program.way.equals_plain) check_equals_plain(program, world, trainer.hashes());
      problem = judged(rules, "", "");
    } catch (const CheckFailure& wrong_numbers) {
      problem = rules.empty() ? wrong_numbers.what() : str("it is not refused, and ", wrong_numbers.what());
    } catch (const std::exception& caught) {
      problem = judged(rules, lockstep::detail::message_of(caught), trainer.change_since_completed());
      // The one to report is the other rank's.
      if (dynamic_cast<const PeerFailure*>(&caught) != nullptr) peer_failure = std::current_exception();
    }
  }
  if (problem.empty()) return;
  if (peer_failure) std::rethrow_exception(peer_failure);
  for (const auto& warning : warnings.texts()) problem += "\n  warned: " + warning;
  throw CheckFailure(problem);
}

}  // namespace lockstep::testing::combinations
