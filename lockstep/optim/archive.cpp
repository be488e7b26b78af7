#include "lockstep/optim/archive.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <string>

#include "lockstep/state/archive_bridge.h"
#include "lockstep/state/archive_format.h"
#include "lockstep/state/state_kind.h"

namespace lockstep::optim::detail {

using lockstep::detail::count_tensor;
using lockstep::detail::kArchiveFormat;
using lockstep::detail::read_count;

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

void read_state(InputArchive& saved, torch::optim::OptimizerParamState& into, const std::string& loader) {
  const auto given = lockstep::detail::values_in(saved);
  try {
    into.serialize(saved);
  } catch (const c10::Error& error) {
    // To libtorch, state that lacks a name is an internal error.
    TORCH_CHECK(false, "[lockstep/optim] ", loader, " cannot load ", lockstep::detail::kind_of(given), ": ",
                error.what_without_backtrace());
  }
  lockstep::detail::check_nothing_is_dropped(given, into, loader);
}

}  // namespace

void save_optimizer(OutputArchive& archive, const torch::optim::Optimizer& optimizer) {
  archive.write("pytorch_version", c10::IValue(kArchiveFormat));
  OutputArchive states(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", count_tensor(optimizer.param_groups().size()));
  std::size_t position = 0;
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& from = optimizer.param_groups()[i];
    OutputArchive group(groups.compilation_unit());
    group.write("params/size", count_tensor(from.params().size()));
    for (std::size_t j = 0; j < from.params().size(); ++j, ++position) {
      const auto key = std::to_string(position);
      group.write("params/" + std::to_string(j), c10::IValue(key));
      const auto found = optimizer.state().find(from.params()[j].unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      OutputArchive state(states.compilation_unit());
      found->second->serialize(state);
      states.write(key, state);
    }
    OutputArchive options(group.compilation_unit());
    from.options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

void load_optimizer(InputArchive& archive, torch::optim::Optimizer& optimizer, const LoadTargets& targets) {
  c10::IValue format;
  archive.read("pytorch_version", format);
  TORCH_CHECK(format.toStringRef() == kArchiveFormat, "[lockstep/optim] the archive has format ", format.toStringRef(),
              ", not ", kArchiveFormat);
  InputArchive states;
  archive.read("state", states);
  InputArchive groups;
  archive.read("param_groups", groups);
  auto& into = optimizer.param_groups();
  const auto group_count = read_count(groups, "param_groups/size");
  TORCH_CHECK(group_count == into.size(), "[lockstep/optim] the archive has ", group_count,
              " parameter groups, the optimizer ", into.size());

  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> new_options;
  std::remove_reference_t<decltype(optimizer.state())> new_state;
  for (std::size_t i = 0; i < into.size(); ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    const auto count = read_count(group, "params/size");
    TORCH_CHECK(count == into[i].params().size(), "[lockstep/optim] parameter group ", i, " of the archive has ", count,
                " parameters, that of the optimizer ", into[i].params().size());
    for (std::size_t j = 0; j < count; ++j) {
      c10::IValue key;
      group.read("params/" + std::to_string(j), key);
      InputArchive saved;
      if (!states.try_read(key.toStringRef(), saved)) continue;
      auto state = targets.state();
      read_state(saved, *state, c10::demangle(typeid(optimizer).name()));
      new_state[into[i].params()[j].unsafeGetTensorImpl()] = std::move(state);
    }
    InputArchive saved;
    group.read("options", saved);
    new_options.push_back(targets.options(into[i].options()));
    new_options.back()->serialize(saved);
  }
  for (std::size_t i = 0; i < into.size(); ++i) into[i].set_options(std::move(new_options[i]));
  optimizer.state() = std::move(new_state);
}

}  // namespace lockstep::optim::detail
