// State of a ZeroOptimizer as a whole: collected from the ranks, and given back to them.
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <set>

#include "lockstep/base/str.h"
#include "lockstep/comm/values.h"
#include "lockstep/ddp/averaging_group.h"
#include "lockstep/ddp/engine.h"
#include "lockstep/zero/master_weights.h"
#include "lockstep/zero/optimizer.h"
#include "lockstep/zero/sharding.h"

namespace lockstep {
namespace {

std::vector<std::size_t> sizes_of(const std::vector<std::vector<at::Tensor>>& groups) {
  std::vector<std::size_t> sizes;
  for (const auto& group : groups) sizes.push_back(group.size());
  return sizes;
}

/// For comparison among ranks.
std::string description_of(const OptimizerStateDict& dict) {
  int64_t steps = 0;
  for (const auto& [index, values] : dict.state) {
    const auto step = values.find("step");
    if (step != values.end() && step->second.isInt()) steps = std::max(steps, step->second.toInt());
  }
  return str("of ", dict.state.size(), " parameters after ", steps, " steps");
}

}  // namespace

void ZeroOptimizer::consolidate_state_dict(int to) {
  TORCH_CHECK(to >= 0 && to < group_->getSize(), who(), ": state cannot be consolidated to rank ", to,
              " of a group of ", group_->getSize());
  prepare_for_state("consolidation");
  set_consolidated(std::nullopt);
  const auto pieces = own_pieces();
  const auto parameters = all_parameters();
  const bool is_target = group_->getRank() == to;
  OptimizerStateDict dict = exposed_groups();
  const auto add = [&](const std::vector<detail::StatePiece>& added) {
    for (const auto& piece : added) detail::add_piece(dict.state, piece, parameters[piece.index]);
  };
  announce_if_throws([&] {
    // Broadcasts, not a gather, which NCCL does not have. In rank order.
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      if (rank == to) {
        if (is_target) add(pieces);
        continue;
      }
      const auto sent = group_->getRank() == rank ? detail::to_ivalue(pieces) : c10::IValue();
      const auto received = send_value(sent, rank, to, group_, default_device_);
      if (is_target) add(detail::pieces_from(received));
    }
  });
  if (is_target) set_consolidated(std::move(dict));
}

void ZeroOptimizer::set_consolidated(std::optional<OptimizerStateDict> dict) {
  consolidated_ = std::move(dict);
  steps_since_consolidation_ = 0;
}

void ZeroOptimizer::prepare_for_state(const char* what) {
  sharding_->check_has_state(what);
  wait_for_parameters();
  // State is counted by the elements' order in memory, so parameters must lie as they did.
  notice_changes();
  sharding_->follow_parameters();
  sharding_->take_options();
}

std::vector<std::string> ZeroOptimizer::parameter_names() const {
  const auto parameters = all_parameters();
  if (!options_.parameter_names.empty()) {
    auto names = options_.parameter_names;
    names.resize(parameters.size());
    return names;
  }
  const auto ddp = options_.ddp.engine();
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const auto& parameter : parameters) {
    names.push_back(averaged_name(parameter, ddp.get()));
    // Of two wrapped modules: names that mean two parameters mean none.
    const bool is_clear = names.back().empty() || seen.insert(names.back()).second;
    if (!is_clear) return std::vector<std::string>(parameters.size());
  }
  return names;
}

std::vector<detail::StatePiece> ZeroOptimizer::own_pieces() const {
  if (options_.stage == ZeroStage::kReplicated && group_->getRank() > 0) return {};
  auto pieces = sharding_->pieces();
  const auto names = parameter_names();
  for (auto& piece : pieces) piece.name = names[piece.index];
  return pieces;
}

OptimizerStateDict ZeroOptimizer::exposed_groups() const {
  OptimizerStateDict dict;
  int64_t index = 0;
  for (const auto& group : param_groups_) {
    auto& into = dict.param_groups.emplace_back();
    into.options = values_of(group.options());
    for (std::size_t i = 0; i < group.params().size(); ++i) into.params.push_back(index++);
  }
  return dict;
}

const OptimizerStateDict& ZeroOptimizer::state_dict() const {
  sharding_->check_has_state("state_dict()");
  TORCH_CHECK(consolidated_, who(), ": the state was not consolidated on this rank. Call consolidate_state_dict(",
              group_->getRank(), ") on all ranks first.");
  return *consolidated_;
}

void ZeroOptimizer::load_state_dict(const OptimizerStateDict& dict) {
  prepare_for_state("loading state");
  check_fits(dict, sizes_of(parameter_groups()), who());
  const auto parameters = all_parameters();
  check_shapes(dict, parameters, who());
  check_kind(dict);
  load_from(dict, detail::source_of(dict.state, parameters), description_of(dict));
}

void ZeroOptimizer::load_from(const OptimizerStateDict& groups, const detail::StateSource& source,
                              const std::string& description) {
  sharding_->check_has_state("loading state");
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    options.push_back(param_groups_[i].options().clone());
    assign_values(*options.back(), groups.param_groups[i].options);
  }
  sharding_->load(source);
  for (std::size_t i = 0; i < param_groups_.size(); ++i) {
    if (!type_.assign(*options[i], param_groups_[i].options())) param_groups_[i].set_options(std::move(options[i]));
  }
  sharding_->take_options();
  consolidated_.reset();
  ++loads_;
  loaded_ = description;
  must_compare_ = true;
}

void ZeroOptimizer::check_kind(const OptimizerStateDict& dict) const {
  std::set<std::vector<std::string>> seen;
  for (const auto& [index, values] : dict.state) {
    std::vector<std::string> names;
    for (const auto& [name, value] : values) names.push_back(name);
    if (!seen.insert(std::move(names)).second) continue;
    const bool has_master = values.contains(detail::kMasterName);
    TORCH_CHECK(!has_master || options_.master_dtype, who(), ": the state of parameter ", index, " has a master of ",
                "more precision than the parameter, which would be lost. Set ZeroOptions::master_dtype.");
    if (has_master && values.size() == 1) continue;
    // Tried on a parameter of one element, so that ranks whose shard is empty notice it too.
    OptimizerStateDict tried{.state = {{0, values}}, .param_groups = {{.options = {}, .params = {0}}}};
    tried.state.at(0).erase(detail::kMasterName);
    for (auto& [name, value] : tried.state.at(0)) {
      if (value.isTensor() && value.toTensor().dim() > 0) {
        value = at::zeros({1}, value.toTensor().options().layout(at::kStrided));
      }
    }
    const auto parameter = at::zeros({1}, all_parameters().front().options().requires_grad(false)).requires_grad_();
    const auto optimizer = type_.make({{std::vector<at::Tensor>{parameter}, param_groups_[0].options().clone()}});
    try {
      lockstep::load_state_dict(*optimizer, tried);
    } catch (const c10::Error& error) {
      // To libtorch, state that lacks a name is an internal error.
      TORCH_CHECK(false, who(), ": the state of parameter ", index, " does not fit ", type_.name,
                  ". Is it that of another optimizer? ", error.what_without_backtrace());
    }
  }
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const auto& dict = state_dict();
  if (steps_since_consolidation_ > 0) {
    TORCH_WARN(who(), ": the state is that of ", steps_since_consolidation_,
               " steps ago: consolidate_state_dict() first, on all ranks.");
  }
  write_archive(archive, dict);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  load_state_dict(read_archive(archive));
}

}  // namespace lockstep
