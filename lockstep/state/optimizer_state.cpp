#include "lockstep/state/optimizer_state.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <set>

#include "lockstep/base/str.h"
#include "lockstep/state/archive_bridge.h"
#include "lockstep/state/archive_format.h"
#include "lockstep/state/state_kind.h"

namespace lockstep {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

using detail::count_tensor;
using detail::kArchiveFormat;
using detail::read_count;

void write_values(OutputArchive& archive, const std::string& key, const NamedValues& values) {
  OutputArchive nested(archive.compilation_unit());
  for (const auto& [name, value] : values) nested.write(name, value);
  archive.write(key, nested);
}

/// `value` in the type of `present`: Python says lr=1 and lr=tensor(0.1) where libtorch wants a double.
c10::IValue in_type_of(const c10::IValue& present, const c10::IValue& value) {
  if (value.isNone()) return present;
  if (present.isDouble() && value.isInt()) return static_cast<double>(value.toInt());
  if (present.isDouble() && value.isTensor()) return value.toTensor().item<double>();
  if (present.isTuple() && (value.isTuple() || value.isList())) {
    const auto& types = present.toTupleRef().elements();
    const auto given = value.isTuple() ? value.toTupleRef().elements().vec() : value.toList().vec();
    if (given.size() != types.size()) return value;
    std::vector<c10::IValue> elements;
    for (std::size_t i = 0; i < given.size(); ++i) elements.push_back(in_type_of(types[i], given[i]));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  return value;
}

NamedValues merged(NamedValues present, const NamedValues& values) {
  for (auto& [name, value] : present) {
    if (const auto found = values.find(name); found != values.end()) value = in_type_of(value, found->second);
  }
  return present;
}

std::vector<std::size_t> group_sizes_of(const torch::optim::Optimizer& optimizer) {
  std::vector<std::size_t> sizes;
  for (const auto& group : optimizer.param_groups()) sizes.push_back(group.params().size());
  return sizes;
}

std::vector<std::string> names_in(const NamedValues& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

/// One parameter's state of each set of names tells about all with the same.
void check_nothing_is_dropped(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer,
                              const std::string& loader) {
  std::set<std::vector<std::string>> seen;
  int64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto given = dict.state.find(index++);
      if (given == dict.state.end() || !seen.insert(names_in(given->second)).second) continue;
      const auto taken = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (taken != optimizer.state().end()) detail::check_nothing_is_dropped(given->second, *taken->second, loader);
    }
  }
}

/// The optimizer's load() of what the dictionary says. Leaves it in some valid state if it throws.
void load_through_archive(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  auto complete = dict;
  for (std::size_t i = 0; i < dict.param_groups.size(); ++i) {
    complete.param_groups[i].options =
        merged(values_of(optimizer.param_groups()[i].options()), dict.param_groups[i].options);
  }
  OutputArchive archive;
  write_archive(archive, complete);
  auto opened = detail::reopened(archive);
  const auto loader = c10::demangle(typeid(optimizer).name());
  try {
    optimizer.load(opened);
  } catch (const c10::Error& error) {
    // To libtorch, state that lacks a name is an internal error.
    TORCH_CHECK(false, "[lockstep/state] ", loader, " cannot load ",
                dict.state.empty() ? "these options" : detail::kind_of(dict.state.begin()->second), ": ",
                error.what_without_backtrace());
  }
  TORCH_CHECK(optimizer.state().size() == dict.state.size(), "[lockstep/state] an optimizer was given the state of ",
              dict.state.size(), " parameters and its load() took that of ", optimizer.state().size(),
              ". An optimizer of your own must override save() and load(), as those of libtorch do.");
  check_nothing_is_dropped(dict, optimizer, loader);
}

}  // namespace

NamedValues values_of(const torch::optim::OptimizerOptions& options) {
  return detail::values_written_by(options);
}

void assign_values(torch::optim::OptimizerOptions& options, const NamedValues& values) {
  OutputArchive archive;
  for (const auto& [name, value] : merged(values_of(options), values)) archive.write(name, value);
  auto opened = detail::reopened(archive);
  options.serialize(opened);
}

std::vector<at::Tensor> optimized_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer) {
  OptimizerStateDict dict;
  int64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    auto& into = dict.param_groups.emplace_back();
    into.options = values_of(group.options());
    for (const auto& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        auto values = detail::values_written_by(*found->second);
        if (!values.empty()) dict.state.emplace(index, std::move(values));
      }
      into.params.push_back(index++);
    }
  }
  return dict;
}

void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  check_fits(dict, group_sizes_of(optimizer), "[lockstep/state] an optimizer");
  // libtorch's load() keeps the state of parameters that the archive knows nothing of.
  auto state_before = std::move(optimizer.state());
  optimizer.state().clear();
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_before;
  for (const auto& group : optimizer.param_groups()) options_before.push_back(group.options().clone());
  try {
    load_through_archive(optimizer, dict);
  } catch (...) {
    optimizer.state() = std::move(state_before);
    for (std::size_t i = 0; i < options_before.size(); ++i) {
      optimizer.param_groups()[i].set_options(std::move(options_before[i]));
    }
    throw;
  }
}

void check_fits(const OptimizerStateDict& dict, const std::vector<std::size_t>& group_sizes, const std::string& who) {
  TORCH_CHECK(dict.param_groups.size() == group_sizes.size(), who, " with ", group_sizes.size(),
              " parameter groups was given the state of ", dict.param_groups.size());
  int64_t count = 0;
  for (std::size_t i = 0; i < group_sizes.size(); ++i) {
    TORCH_CHECK(dict.param_groups[i].params.size() == group_sizes[i], who, " with ", group_sizes[i],
                " parameters in group ", i, " was given the state of ", dict.param_groups[i].params.size());
    count += static_cast<int64_t>(group_sizes[i]);
  }
  for (const auto& [index, values] : dict.state) {
    TORCH_CHECK(index >= 0 && index < count, who, " with ", count, " parameters was given state of parameter ", index);
  }
}

void check_shapes(const OptimizerStateDict& dict, const std::vector<at::Tensor>& parameters, const std::string& who) {
  for (const auto& [index, values] : dict.state) {
    const auto sizes = parameters.at(index).sizes();
    for (const auto& [name, value] : values) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const auto given = value.toTensor().sizes();
      TORCH_CHECK(given.size() != sizes.size() || given == sizes, who, ": parameter ", index, " has sizes ", sizes,
                  ", but its '", name, "' in the state that was given ", given, ". It is that of another model.");
    }
  }
}

void write_archive(OutputArchive& archive, const OptimizerStateDict& dict) {
  archive.write("pytorch_version", c10::IValue(kArchiveFormat));
  OutputArchive states(archive.compilation_unit());
  for (const auto& [index, values] : dict.state) write_values(states, std::to_string(index), values);
  archive.write("state", states);
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", count_tensor(dict.param_groups.size()));
  for (std::size_t i = 0; i < dict.param_groups.size(); ++i) {
    const auto& from = dict.param_groups[i];
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", count_tensor(from.params.size()));
    for (std::size_t j = 0; j < from.params.size(); ++j) {
      group.write("params/" + std::to_string(j), c10::IValue(std::to_string(from.params[j])));
    }
    write_values(group, "options", from.options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("param_groups", groups);
}

OptimizerStateDict read_archive(InputArchive& archive) {
  c10::IValue format;
  TORCH_CHECK(
      archive.try_read("pytorch_version", format) && format.isString() && format.toStringRef() == kArchiveFormat,
      "[lockstep/state] the archive is none of an optimizer, or not of format ", kArchiveFormat);
  InputArchive states;
  archive.read("state", states);
  InputArchive groups;
  archive.read("param_groups", groups);
  OptimizerStateDict dict;
  int64_t index = 0;
  const auto group_count = read_count(groups, "param_groups/size");
  for (std::size_t i = 0; i < group_count; ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    auto& into = dict.param_groups.emplace_back();
    const auto count = read_count(group, "params/size");
    for (std::size_t j = 0; j < count; ++j, ++index) {
      // libtorch's keys are addresses of the program that wrote them.
      c10::IValue key;
      group.read("params/" + std::to_string(j), key);
      into.params.push_back(index);
      InputArchive state;
      if (states.try_read(key.toStringRef(), state)) dict.state.emplace(index, detail::values_in(state));
    }
    InputArchive options;
    group.read("options", options);
    into.options = detail::values_in(options);
  }
  return dict;
}

}  // namespace lockstep
