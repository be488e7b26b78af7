#include "lockstep/fsdp/optimizer_state.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/fsdp/stateful_parameters.h"
#include "lockstep/shard/gather.h"
#include "lockstep/shard/layout_of.h"
#include "lockstep/state/optimizer_state.h"
#include "lockstep/state/state_kind.h"
#include "lockstep/state/stream.h"

namespace lockstep {
namespace {

using detail::stateful_parameters;
using detail::StatefulParameter;

bool has_sizes(const c10::IValue& value, at::IntArrayRef sizes) {
  return value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().sizes() == sizes;
}

/// Options and names of groups; state as the optimizer has it, without slots that are not in use.
NamedOptimizerState named_state_of(const std::vector<StatefulParameter>& parameters,
                                   const torch::optim::Optimizer& optimizer, bool leaves_out_frozen) {
  const auto dict = state_dict_of(optimizer);
  NamedOptimizerState named;
  for (const auto& group : dict.param_groups) {
    auto& into = named.param_groups.emplace_back();
    into.options = group.options;
    for (const auto index : group.params) {
      const auto& parameter = parameters[static_cast<std::size_t>(index)];
      if (leaves_out_frozen && !parameter.tensor.requires_grad()) continue;
      into.params.push_back(parameter.name());
      const auto state = dict.state.find(index);
      if (state == dict.state.end()) continue;
      auto values = state->second;
      std::erase_if(values, [](const auto& item) { return detail::is_unused(item.second); });
      if (!values.empty()) named.state.emplace(parameter.name(), std::move(values));
    }
  }
  return named;
}

/// Puts the names of what a flat parameter consists of in the place of its own.
void split(NamedOptimizerState& state, const StatefulParameter& parameter) {
  if (parameter.pieces.empty()) return;
  for (auto& group : state.param_groups) {
    std::vector<std::string> names;
    for (const auto& name : group.params) {
      if (name != parameter.name()) {
        names.push_back(name);
        continue;
      }
      for (const auto& piece : parameter.pieces) names.push_back(piece.name);
    }
    group.params = std::move(names);
  }
  const auto found = state.state.find(parameter.name());
  if (found == state.state.end()) return;
  const auto values = found->second;
  state.state.erase(found);
  const auto sizes = parameter.sizes();
  for (const auto& piece : parameter.pieces) {
    auto& into = state.state[piece.name];
    for (const auto& [name, value] : values) {
      into.emplace(name, has_sizes(value, sizes) ? c10::IValue(piece.in(value.toTensor()).clone()) : value);
    }
  }
}

/// Ranks gather the same tensors, or throw together.
void check_same_state(const std::vector<StatefulParameter>& parameters, const NamedOptimizerState& state,
                      const DeviceMesh& mesh) {
  Facts facts;
  for (const auto& parameter : parameters) {
    std::string text;
    if (const auto found = state.state.find(parameter.name()); found != state.state.end()) {
      for (const auto& [name, value] : found->second) {
        text += str(name, has_sizes(value, parameter.tensor.sizes()) ? " by element, " : ", ");
      }
    }
    facts.emplace_back(str("the state of '", parameter.name(), "'"), text.empty() ? "none" : text);
  }
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    check_same_on_all_ranks("[lockstep/fsdp] the state of the optimizers", facts, mesh.get_group(axis));
  }
}

/// What rank 0 has, tensor by tensor, given to `take`; the others have described pieces of it.
void pass_on(const DeviceMesh& mesh, const NamedOptimizerState& state, bool is_source, c10::Device device,
             const std::function<void(const NamedOptimizerState& one)>& take) {
  std::vector<detail::StatePiece> pieces;
  for (const auto& [name, values] : state.state) pieces.push_back({.name = name, .values = values});
  for (auto& piece : pieces) {
    std::erase_if(piece.values, [](const auto& item) { return detail::is_unused(item.second); });
  }
  for (const auto& group : state.param_groups) {
    auto& piece = pieces.emplace_back(detail::StatePiece{.index = 1, .values = group.options});
    for (const auto& name : group.params) piece.name += name + "\n";
  }
  std::string bytes;
  if (is_source) {
    std::vector<detail::StatePiece> described;
    for (const auto& piece : pieces) described.push_back(detail::described(piece));
    const auto packed = torch::jit::pickle_save(detail::to_ivalue(described));
    bytes.assign(packed.begin(), packed.end());
  }
  bytes = broadcast_over(mesh, bytes);
  const auto described = detail::pieces_from(torch::jit::pickle_load({bytes.begin(), bytes.end()}));
  for (std::size_t i = 0; i < described.size(); ++i) {
    auto values = described[i].values;
    for (auto& [name, value] : values) {
      const auto form = detail::form_of(value);
      if (!form) continue;
      const auto options = at::TensorOptions(device).dtype(form->dtype);
      const auto tensor =
          is_source ? pieces[i].values.at(name).toTensor().to(options).contiguous() : at::empty(form->sizes, options);
      broadcast_over(mesh, tensor);
      value = tensor;
    }
    NamedOptimizerState one;
    if (described[i].index == 0) {
      one.state.emplace(described[i].name, std::move(values));
    } else {
      auto& group = one.param_groups.emplace_back();
      group.options = std::move(values);
      std::istringstream names(described[i].name);
      for (std::string name; std::getline(names, name);) group.params.push_back(name);
    }
    take(one);
  }
}

}  // namespace

NamedOptimizerState full_optimizer_state_dict(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                              const FullStateOptions& options) {
  const at::NoGradGuard no_grad;
  const auto parameters = stateful_parameters(module, optimizer);
  auto state = named_state_of(parameters, optimizer, options.ignore_frozen_params);
  const auto mesh = largest_mesh(optimized_parameters(optimizer));
  if (mesh) check_same_state(parameters, state, *mesh);
  const bool is_kept = !options.rank0_only || is_first_rank(mesh);
  for (const auto& parameter : parameters) {
    const auto found = state.state.find(parameter.name());
    if (found == state.state.end()) continue;
    for (auto& [name, value] : found->second) {
      if (!value.isTensor()) continue;
      const bool is_divided = parameter.layout && has_sizes(value, parameter.tensor.sizes());
      auto whole = is_divided ? gather_whole(value.toTensor(), *parameter.layout) : value.toTensor().clone();
      value = !is_kept ? at::Tensor() : options.cpu_offload ? whole.cpu() : whole;
    }
  }
  if (!is_kept) return {};
  for (const auto& parameter : parameters) split(state, parameter);
  return state;
}

NamedOptimizerState sharded_optimizer_state_dict(const torch::nn::Module& module,
                                                 const torch::optim::Optimizer& optimizer,
                                                 const ShardedStateOptions& options) {
  const auto parameters = stateful_parameters(module, optimizer);
  auto state = named_state_of(parameters, optimizer, options.ignore_frozen_params);
  for (const auto& parameter : parameters) {
    auto sharding = sharding_of(parameter.tensor);
    if (sharding && state.state.contains(parameter.name())) {
      state.shardings.emplace(parameter.name(), std::move(*sharding));
    }
  }
  return state;
}

void load_full_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                    const NamedOptimizerState& state, const LoadFullStateOptions& options) {
  detail::OptimizerStateLoader loader(module, optimizer, {options.strict, options.ignore_frozen_params});
  const auto mesh = options.broadcast_from_rank0 ? largest_mesh(optimized_parameters(optimizer)) : std::nullopt;
  if (mesh) {
    pass_on(*mesh, state, is_first_rank(mesh), optimized_parameters(optimizer).front().device(),
            [&](const NamedOptimizerState& one) { loader.add(one); });
  } else {
    loader.add(state);
  }
  loader.finish();
}

void load_sharded_optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                       const std::vector<NamedOptimizerState>& parts,
                                       const LoadShardedStateOptions& options) {
  detail::OptimizerStateLoader loader(module, optimizer, options);
  for (const auto& part : parts) loader.add(part);
  loader.finish();
}

namespace detail {

struct OptimizerStateLoader::Wanted {
  StatefulParameter parameter;
  std::map<std::string, PartialTensor> tensors = {};
  NamedValues others = {};

  PartialTensor& tensor(const std::string& name) {
    const auto found = tensors.find(name);
    if (found != tensors.end()) return found->second;
    const auto part = parameter.layout ? parameter.layout->part() : whole_part(parameter.sizes());
    const auto text = str(parameter.name(), "' ('", name);
    return tensors.emplace(name, PartialTensor(text, parameter.sizes(), part, parameter.tensor.options()))
        .first->second;
  }
};

OptimizerStateLoader::OptimizerStateLoader(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                           const LoadShardedStateOptions& options)
    : optimizer_(optimizer), options_(options) {
  for (auto& parameter : stateful_parameters(module, optimizer)) wanted_.push_back({std::move(parameter)});
  for (const auto& item : module.named_parameters()) module_names_.insert(item.key());
  for (const auto& wanted : wanted_) {
    for (const auto& piece : wanted.parameter.pieces) module_names_.insert(piece.name);
  }
}

OptimizerStateLoader::~OptimizerStateLoader() = default;

void OptimizerStateLoader::add(const NamedOptimizerState& part) {
  has_state_ = has_state_ || !part.state.empty();
  // All parts of a save have the same; whole state that is passed on comes group by group.
  for (const auto& group : part.param_groups) {
    const bool is_known =
        std::any_of(groups_.begin(), groups_.end(), [&](const auto& each) { return each.params == group.params; });
    if (!is_known) groups_.push_back(group);
  }
  for (auto& wanted : wanted_) {
    for (const auto& name : wanted.parameter.names) {
      const auto found = part.state.find(name);
      if (found == part.state.end()) continue;
      const auto sharding = part.shardings.find(name);
      add(wanted, found->second, sharding == part.shardings.end() ? nullptr : &sharding->second);
      break;
    }
    for (const auto& piece : wanted.parameter.pieces) {
      if (const auto found = part.state.find(piece.name); found != part.state.end()) add(wanted, found->second, piece);
    }
  }
  for (const auto& [name, values] : part.state) {
    if (!module_names_.contains(name)) unknown_.insert(name);
  }
}

void OptimizerStateLoader::add(Wanted& wanted, const NamedValues& values, const Sharding* sharding) {
  const auto& parameter = wanted.parameter;
  if (options_.ignore_frozen_params && !parameter.tensor.requires_grad()) return;
  const auto given_sizes = sharding == nullptr ? parameter.sizes() : sharding->part().sizes();
  for (const auto& [name, value] : values) {
    if (is_unused(value)) continue;
    const bool is_by_element =
        has_sizes(value, given_sizes) ||
        (value.isTensor() && value.toTensor().dim() == parameter.tensor.dim() && value.toTensor().dim() > 0);
    if (!is_by_element) {
      wanted.others.emplace(name, value);
      continue;
    }
    wanted.tensor(name).add(
        {.local = value.toTensor(), .sharding = sharding == nullptr ? std::nullopt : std::optional(*sharding)});
  }
}

void OptimizerStateLoader::add(Wanted& wanted, const NamedValues& values, const FlatPiece& piece) {
  if (options_.ignore_frozen_params && !wanted.parameter.tensor.requires_grad()) return;
  for (const auto& [name, value] : values) {
    if (is_unused(value)) continue;
    if (!value.isTensor() || value.toTensor().dim() == 0) {
      wanted.others.emplace(name, value);
      continue;
    }
    TORCH_CHECK(has_sizes(value, piece.sizes), "[lockstep/fsdp] '", name, "' of '", piece.name, "' has sizes ",
                value.toTensor().sizes(), ", not ", at::IntArrayRef(piece.sizes));
    wanted.tensor(name).add(value.toTensor().reshape({-1}),
                            {.offsets = {piece.offset}, .sizes = {piece.elements}, .local_offsets = {0}});
  }
}

void OptimizerStateLoader::check_complete() const {
  if (!options_.strict) return;
  TORCH_CHECK(unknown_.empty(),
              "[lockstep/fsdp] the optimizer's state is of parameters that the module does not have: ",
              join(unknown_, ", "), ". Is it that of another model? strict = false passes them over.");
  if (!has_state_) return;
  std::vector<std::string> missing;
  for (const auto& wanted : wanted_) {
    const bool has_come = !wanted.tensors.empty() || !wanted.others.empty();
    if (!has_come && wanted.parameter.tensor.requires_grad()) missing.push_back(wanted.parameter.name());
  }
  TORCH_CHECK(missing.empty(), "[lockstep/fsdp] the optimizer's state lacks ", join(missing, ", "),
              ", which require gradients. With strict = false they begin anew.");
}

void OptimizerStateLoader::finish() {
  check_complete();
  auto dict = state_dict_of(optimizer_);
  dict.state.clear();
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    auto values = wanted_[i].others;
    for (const auto& [name, tensor] : wanted_[i].tensors) values.emplace(name, tensor.finished());
    if (!values.empty()) dict.state.emplace(static_cast<int64_t>(i), std::move(values));
  }
  std::vector<StatefulParameter> parameters;
  for (const auto& wanted : wanted_) parameters.push_back(wanted.parameter);
  take_group_options(dict, parameters, groups_);
  load_state_dict(optimizer_, dict);
}

}  // namespace detail
}  // namespace lockstep
