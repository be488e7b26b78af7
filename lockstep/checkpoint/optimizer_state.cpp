// Optimizers in checkpoints: options of groups and state of parameters, by the names these have in a module.
//
//   groups                 a list of {options, params}
//   state.<parameter>      what is no tensor, and the names of what is
//   state.<parameter>.exp_avg
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/str.h"
#include "lockstep/checkpoint/owned_pieces.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/fsdp/stateful_parameters.h"
#include "lockstep/shard/flat.h"
#include "lockstep/state/state_kind.h"
#include "lockstep/zero/state_access.h"

namespace lockstep::dcp {
namespace {

using lockstep::detail::StatefulParameter;
using Parameters = std::vector<StatefulParameter>;
using Groups = std::vector<NamedOptimizerState::Group>;

constexpr const char* kState = "state.";
constexpr const char* kGroups = "groups";
constexpr const char* kOptions = "options";
constexpr const char* kParams = "params";
constexpr const char* kValues = "values";
constexpr const char* kTensors = "tensors";

std::string state_name(const std::string& parameter) {
  return kState + parameter;
}
std::string state_name(const std::string& parameter, const std::string& slot) {
  return str(kState, parameter, ".", slot);
}

c10::impl::GenericDict made_dict() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

c10::impl::GenericDict dict_of(const NamedValues& values) {
  auto dict = made_dict();
  for (const auto& [name, value] : values) {
    if (!lockstep::detail::is_unused(value)) dict.insert(name, value);
  }
  return dict;
}

NamedValues values_in(const c10::IValue& value) {
  NamedValues values;
  if (!value.isGenericDict()) return values;
  for (const auto& item : value.toGenericDict()) values.emplace(item.key().toStringRef(), item.value());
  return values;
}

void save_groups(Outgoing& out, const OptimizerStateDict& dict, const Parameters& parameters) {
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const auto& group : dict.param_groups) {
    c10::List<std::string> names;
    for (const auto index : group.params) {
      const auto& parameter = parameters[static_cast<std::size_t>(index)];
      if (parameter.pieces.empty()) {
        names.push_back(parameter.name());
      } else {
        for (const auto& piece : parameter.pieces) names.push_back(piece.name);
      }
    }
    auto each = made_dict();
    each.insert(kOptions, dict_of(group.options));
    each.insert(kParams, names);
    groups.push_back(each);
  }
  out.value(kGroups, groups);
}

/// All names of the optimizer's parameters, by what these are called in the checkpoint.
std::map<std::string, std::string> names_there(Incoming& in, const Parameters& parameters) {
  std::map<std::string, std::string> names;
  const auto add = [&](const std::string& name) {
    const auto full = in.name_there(state_name(name));
    const auto state = full.find(kState);
    names.emplace(state == std::string::npos ? name : full.substr(state + std::strlen(kState)), name);
  };
  for (const auto& parameter : parameters) {
    for (const auto& name : parameter.names) add(name);
    for (const auto& piece : parameter.pieces) add(piece.name);
  }
  return names;
}

/// As they were saved, with the names that parameters have here. Refuses, if it is strict, one that nobody here has.
Groups load_groups(Incoming& in, const Parameters& parameters) {
  Groups groups;
  const auto saved = in.value(kGroups);
  if (!saved.isList()) return groups;
  const auto own_names = names_there(in, parameters);
  for (const auto& each : saved.toListRef()) {
    const auto values = values_in(each);
    auto& group = groups.emplace_back();
    if (values.contains(kOptions)) group.options = values_in(values.at(kOptions));
    if (!values.contains(kParams) || !values.at(kParams).isList()) continue;
    bool is_known = false;
    for (const auto& name : values.at(kParams).toListRef()) {
      const auto own = own_names.find(name.toStringRef());
      is_known = is_known || own != own_names.end();
      group.params.push_back(own == own_names.end() ? name.toStringRef() : own->second);
    }
    if (!is_known && !group.params.empty() && in.is_strict()) {
      in.refuse(str("group ", groups.size() - 1, " of the saved optimizer, of '", group.params.front(),
                    "' and so on, has no parameter of this one"));
    }
  }
  return groups;
}

bool has_name(const Groups& groups, const StatefulParameter& parameter) {
  const auto names = parameter.saved_names();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(names.begin(), names.end(), [&](const auto& name) {
      return std::find(group.params.begin(), group.params.end(), name) != group.params.end();
    });
  });
}

/// What a parameter keeps, apart from the tensors' values.
struct Slots {
  NamedValues values = {};
  std::vector<std::string> tensors = {};
};

void save_slots(Outgoing& out, const std::string& parameter, const NamedValues& state) {
  auto values = made_dict();
  c10::List<std::string> tensors;
  for (const auto& [slot, value] : state) {
    if (lockstep::detail::is_unused(value)) continue;
    if (value.isTensor()) {
      tensors.push_back(slot);
    } else {
      values.insert(slot, value);
    }
  }
  auto slots = made_dict();
  slots.insert(kValues, values);
  slots.insert(kTensors, tensors);
  out.value(state_name(parameter), slots);
}

/// None if the parameter had no state, or is not known by any of the names.
std::optional<std::pair<std::string, Slots>> find_slots(Incoming& in, const std::vector<std::string>& names) {
  for (const auto& name : names) {
    const auto saved = in.find_value(state_name(name));
    if (!saved) continue;
    const auto items = values_in(*saved);
    Slots slots;
    if (items.contains(kValues)) slots.values = values_in(items.at(kValues));
    if (items.contains(kTensors) && items.at(kTensors).isList()) {
      for (const auto& slot : items.at(kTensors).toListRef()) slots.tensors.push_back(slot.toStringRef());
    }
    return std::pair(name, std::move(slots));
  }
  return std::nullopt;
}

bool has_sizes(const c10::IValue& value, at::IntArrayRef sizes) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().sizes() == sizes;
}

/// Those that were in no saved group. One that was, and has no state, had none.
void refuse_missing(Incoming& in, const std::vector<std::string>& missing, bool has_state) {
  if (!has_state || missing.empty() || !in.is_strict()) return;
  in.refuse(str("the optimizer's state lacks ", join(missing, ", ")));
}

class OptimizerState : public Stateful {
 public:
  OptimizerState(torch::optim::Optimizer& optimizer, const torch::nn::Module& module)
      : optimizer_(optimizer), module_(module) {}

  void save(Outgoing& out) override {
    const auto parameters = lockstep::detail::stateful_parameters(module_, optimizer_);
    const auto dict = state_dict_of(optimizer_);
    save_groups(out, dict, parameters);
    for (const auto& [index, state] : dict.state) {
      save_state(out, parameters[static_cast<std::size_t>(index)], with_dense_tensors(state));
    }
  }

  void load(Incoming& in) override {
    const auto parameters = lockstep::detail::stateful_parameters(module_, optimizer_);
    for (const auto& parameter : parameters) lockstep::detail::give_memory(parameter.tensor);
    const auto groups = load_groups(in, parameters);
    auto dict = state_dict_of(optimizer_);
    const auto before = std::exchange(dict.state, {});
    std::vector<std::string> missing;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto own = before.find(static_cast<int64_t>(i));
      auto state = load_state(in, parameters[i], own == before.end() ? NamedValues() : own->second);
      if (!state.empty()) {
        dict.state.emplace(static_cast<int64_t>(i), std::move(state));
      } else if (parameters[i].tensor.requires_grad() && !has_name(groups, parameters[i])) {
        missing.push_back(parameters[i].name());
      }
    }
    refuse_missing(in, missing, !dict.state.empty());
    lockstep::detail::take_group_options(dict, parameters, groups);
    in.then([this, dict] { load_state_dict(optimizer_, dict); });
  }

 private:
  static void save_state(Outgoing& out, const StatefulParameter& parameter, const NamedValues& state) {
    for (const auto& name : parameter.pieces.empty() ? std::vector{parameter.name()} : parameter.saved_names()) {
      save_slots(out, name, state);
    }
    for (const auto& [slot, value] : state) {
      if (lockstep::detail::is_unused(value) || !value.isTensor()) continue;
      const auto tensor = value.toTensor().detach();
      if (!has_sizes(value, parameter.tensor.sizes())) {
        for (const auto& name : parameter.saved_names()) out.tensor(state_name(name, slot), tensor);
        continue;
      }
      for (auto& owned : lockstep::detail::owned_pieces(parameter.name(), parameter.tensor, tensor, parameter.pieces)) {
        out.pieces(state_name(owned.name, slot), owned.sizes, tensor.scalar_type(), std::move(owned.pieces));
      }
    }
  }

  /// Tensors are filled later, those that the optimizer has in place: new memory costs more than reading does. Empty if
  /// it has none.
  static NamedValues load_state(Incoming& in, const StatefulParameter& parameter, const NamedValues& own) {
    NamedValues state;
    if (parameter.pieces.empty()) {
      load_state(in, state, parameter, own, parameter.names, parameter.sizes());
    } else {
      std::vector<std::string> lacking;
      for (const auto& piece : parameter.pieces) {
        if (!load_state(in, state, parameter, own, {piece.name}, piece.sizes)) lacking.push_back(piece.name);
      }
      // One step count and one memory for all: there is no such thing as state of some.
      if (!state.empty() && !lacking.empty()) {
        in.refuse(
            str("the optimizer's state lacks ", join(lacking, ", "), ", which are in one flat parameter with others"));
      }
    }
    return state;
  }

  /// The optimizer's own tensor, if it can hold what was saved; else a new one.
  static at::Tensor memory_for(const std::string& slot, at::ScalarType dtype, const StatefulParameter& parameter,
                               const NamedValues& own) {
    const auto found = own.find(slot);
    // Of another dtype, too: then it is refused, or cast.
    const bool fits = found != own.end() && has_sizes(found->second, parameter.tensor.sizes()) &&
                      found->second.toTensor().layout() == at::kStrided;
    if (fits) return found->second.toTensor();
    return at::empty_strided(parameter.tensor.sizes(), parameter.tensor.strides(),
                             parameter.tensor.options().dtype(dtype).requires_grad(false));
  }

  /// False if it has none.
  static bool load_state(Incoming& in, NamedValues& state, const StatefulParameter& parameter, const NamedValues& own,
                         const std::vector<std::string>& names, const std::vector<int64_t>& sizes) {
    const auto found = find_slots(in, names);
    if (!found) return false;
    const auto& [name, slots] = *found;
    for (const auto& [slot, value] : slots.values) {
      const auto& first = state.emplace(slot, value).first->second;
      if (first != value)
        in.refuse(str("'", slot, "' of '", name, "' differs from that of others in its flat parameter"));
    }
    for (const auto& slot : slots.tensors) {
      const auto form = in.form(state_name(name, slot));
      if (!form || form->sizes != sizes) {
        if (form && !sizes.empty() && form->sizes.size() == sizes.size()) {
          in.refuse(str("'", state_name(name, slot), "' has sizes [", join(form->sizes, ", "), "], the parameter [",
                        join(sizes, ", "), "]"));
        }
        state.emplace(slot, in.tensor(state_name(name, slot)));
        continue;
      }
      auto local = state.find(slot);
      if (local == state.end()) {
        // All parts of a flat parameter go into one.
        local = state.emplace(slot, memory_for(slot, form->dtype, parameter, own)).first;
      }
      for (auto& owned : lockstep::detail::owned_pieces(names.front(), parameter.tensor, local->second.toTensor(),
                                                        parameter.pieces)) {
        if (owned.name == names.front()) in.pieces(state_name(name, slot), sizes, std::move(owned.pieces));
      }
    }
    return true;
  }

  torch::optim::Optimizer& optimizer_;
  const torch::nn::Module& module_;
};

/// Of an optimizer that divides state itself: by elements, or by whole parameters.
class ZeroState : public Stateful {
 public:
  ZeroState(ZeroOptimizer& optimizer, const torch::nn::Module& module) : optimizer_(optimizer), module_(module) {}

  void save(Outgoing& out) override {
    const auto pieces = Access::pieces(optimizer_);
    const auto parameters = lockstep::detail::stateful_parameters(module_, optimizer_);
    save_groups(out, Access::groups(optimizer_), parameters);
    // A parameter of this rank may be in several pieces, side by side.
    std::map<std::string, std::vector<const lockstep::detail::StatePiece*>> by_name;
    for (const auto& piece : pieces) {
      by_name[parameters[static_cast<std::size_t>(piece.index)].name()].push_back(&piece);
    }
    for (const auto& [name, of_parameter] : by_name) {
      save_slots(out, name, of_parameter.front()->values);
      const auto& parameter = parameters[static_cast<std::size_t>(of_parameter.front()->index)].tensor;
      for (const auto& [slot, value] : of_parameter.front()->values) {
        if (lockstep::detail::is_unused(value) || !value.isTensor()) continue;
        save_tensor(out, state_name(name, slot), slot, of_parameter, parameter);
      }
    }
  }

  void load(Incoming& in) override {
    Access::prepare_to_load(optimizer_);
    const auto parameters = lockstep::detail::stateful_parameters(module_, optimizer_);
    auto dict = Access::groups(optimizer_);
    const auto groups = load_groups(in, parameters);
    lockstep::detail::take_group_options(dict, parameters, groups);
    std::vector<std::optional<std::pair<std::string, Slots>>> saved;
    std::vector<std::string> missing;
    OptimizerStateDict kinds;
    for (const auto& parameter : parameters) {
      saved.push_back(find_slots(in, parameter.names));
      if (saved.back()) {
        kinds.state.emplace(static_cast<int64_t>(saved.size()) - 1, kind_of(in, *saved.back(), parameter.sizes()));
      } else if (parameter.tensor.requires_grad() && !has_name(groups, parameter)) {
        missing.push_back(parameter.name());
      }
    }
    refuse_missing(in, missing, !kinds.state.empty());
    Access::check_kind(optimizer_, kinds);
    in.then([this, &in, dict, parameters, saved] {
      const auto source = [&](int64_t index, const ElementRange& elements, bool is_whole) {
        const auto at = static_cast<std::size_t>(index);
        return saved[at] ? std::optional(read(in, *saved[at], parameters[at].tensor, elements, is_whole))
                         : std::nullopt;
      };
      // A load that failed on some ranks only must not be in the way of the next.
      Access::forget_loads(optimizer_);
      Access::load_from(optimizer_, dict, source, "of a checkpoint");
    });
  }

 private:
  using Access = lockstep::detail::StateAccess;

  static void save_tensor(Outgoing& out, const std::string& name, const std::string& slot,
                          const std::vector<const lockstep::detail::StatePiece*>& pieces, const at::Tensor& parameter) {
    const auto sizes = parameter.sizes().vec();
    std::vector<BoxedValues> boxes;
    for (const auto* piece : pieces) {
      const auto tensor = piece->values.at(slot).toTensor().detach();
      if (piece->is_whole || !lockstep::detail::is_elementwise(tensor, piece->elements.size())) {
        return out.tensor(name, tensor, Replicas::kAlike);
      }
      auto run = boxed_run(piece->elements, tensor, sizes, lockstep::detail::memory_order_of(parameter));
      boxes.insert(boxes.end(), run.begin(), run.end());
    }
    out.pieces(name, sizes, pieces.front()->values.at(slot).toTensor().scalar_type(), std::move(boxes));
  }

  /// The form of it, with tensors of one element: enough to see whether the optimizer can load it.
  static NamedValues kind_of(Incoming& in, const std::pair<std::string, Slots>& saved,
                             const std::vector<int64_t>& sizes) {
    auto kind = saved.second.values;
    for (const auto& slot : saved.second.tensors) {
      const auto name = state_name(saved.first, slot);
      in.pass_over(name);
      const auto form = in.form(name);
      if (!form) {
        in.refuse(str("'", name, "' is missing"));
        continue;
      }
      if (form->sizes.size() == sizes.size() && form->sizes != sizes) {
        in.refuse(
            str("'", name, "' has sizes [", join(form->sizes, ", "), "], the parameter [", join(sizes, ", "), "]"));
      }
      const auto one = form->sizes.empty() ? std::vector<int64_t>() : std::vector<int64_t>{1};
      kind.emplace(slot, at::zeros(one, form->dtype));
    }
    return kind;
  }

  static NamedValues read(Incoming& in, const std::pair<std::string, Slots>& saved, const at::Tensor& parameter,
                          const ElementRange& elements, bool is_whole) {
    auto values = saved.second.values;
    const auto sizes = parameter.sizes().vec();
    for (const auto& slot : saved.second.tensors) {
      const auto name = state_name(saved.first, slot);
      const auto form = in.form(name);
      const bool is_by_element = form->sizes == sizes;
      at::Tensor tensor;
      std::vector<BoxedValues> into;
      if (is_by_element && !is_whole) {
        tensor = at::empty({elements.size()}, form->dtype);
        into = boxed_run(elements, tensor, sizes, lockstep::detail::memory_order_of(parameter));
      } else {
        tensor = is_by_element ? at::empty_like(parameter.detach(), at::TensorOptions(form->dtype).device(at::kCPU))
                               : at::empty(form->sizes, form->dtype);
        into = {{.box = whole_box(form->sizes), .values = tensor}};
      }
      in.read_now(name, into);
      values.emplace(slot, tensor);
    }
    return values;
  }

  ZeroOptimizer& optimizer_;
  const torch::nn::Module& module_;
};

}  // namespace

StatefulPtr stateful(torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  if (auto* zero = dynamic_cast<ZeroOptimizer*>(&optimizer)) return std::make_shared<ZeroState>(*zero, module);
  return std::make_shared<OptimizerState>(optimizer, module);
}

}  // namespace lockstep::dcp
