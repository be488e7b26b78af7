#include "lockstep/tp/parallelize_module.h"

#include <fnmatch.h>
#include <torch/nn/module.h>

#include "lockstep/base/str.h"
#include "lockstep/comm/agreement.h"
#include "lockstep/comm/call_label.h"
#include "lockstep/dtensor/mesh_generator.h"
#include "lockstep/tp/layers.h"

namespace lockstep {
namespace {

using Found = std::vector<std::pair<std::string, torch::nn::Module*>>;

void warn_of_no_match(const Found& parents, const std::string& token, const std::string& pattern) {
  constexpr std::size_t kMost = 12;
  std::vector<std::string> names;
  for (const auto& [path, parent] : parents) {
    for (const auto& child : parent->named_children()) {
      names.push_back(path.empty() ? child.key() : path + "." + child.key());
    }
  }
  const auto count = names.size();
  if (count > kMost) names.resize(kMost);
  TORCH_WARN("[lockstep/tp] parallelize_module: '", token, "' of '", pattern, "' matches no module; what it names is ",
             "not parallelized. There ", count == 0 ? "is no module below" : "are " + join(names, ", "),
             count > kMost ? str(" and ", count - kMost, " more") : "", ".");
}

/// The modules below `module` that the tokens of a path name.
Found find(torch::nn::Module& module, const std::string& pattern) {
  Found found = {{"", &module}};
  std::size_t begin = 0;
  while (begin <= pattern.size() && !pattern.empty()) {
    const auto end = std::min(pattern.find('.', begin), pattern.size());
    const auto token = pattern.substr(begin, end - begin);
    Found deeper;
    for (const auto& [path, parent] : found) {
      for (const auto& child : parent->named_children()) {
        if (fnmatch(token.c_str(), child.key().c_str(), 0) != 0) continue;
        deeper.emplace_back(path.empty() ? child.key() : path + "." + child.key(), child.value().get());
      }
    }
    if (deeper.empty()) {
      warn_of_no_match(found, token, pattern);
      return {};
    }
    found = std::move(deeper);
    begin = end + 1;
  }
  return found;
}

std::string text_of(const ParallelPlan& plan, const ParallelizeOptions& options) {
  std::string text = options.src_data_rank ? str("from ", *options.src_data_rank) : "own weights";
  for (const auto& [path, style] : plan) text += str("; ", path, ": ", style->to_string());
  return text;
}

/// What ranks must agree on before anything is cut or sent: backends that do not compare calls would mix up whatever
/// they are given.
Facts facts_of(const ParallelPlan& plan, const std::vector<Found>& found, const ParallelizeOptions& options) {
  Facts facts = {{"the plan", text_of(plan, options)}};
  for (const auto& modules : found) {
    for (const auto& [path, module] : modules) {
      facts.emplace_back(str("module '", path, "'"), module->name());
      for (const auto& [name, member] : detail::layer_of(*module).parameters) {
        facts.emplace_back(str("parameter '", path, path.empty() ? "" : ".", name, "'"),
                           lockstep::str(member->scalar_type(), " [", join(member->sizes().vec(), ", "), "]",
                                         member->requires_grad() ? ", requires_grad" : ", frozen"));
      }
    }
  }
  return facts;
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        const ParallelizeOptions& options) {
  TORCH_CHECK(mesh.ndim() == 1, "[lockstep/tp] rank ", mesh.get_rank(), ": parallelize_module() takes a mesh of one ",
              "axis, and got ", mesh, ". Give it the axis that is to divide layers: mesh[\"tp\"].");
  TORCH_CHECK(mesh.is_member(), "[lockstep/tp] rank ", mesh.get_rank(), " is outside of ", mesh,
              " and cannot hold a part of a layer.");
  TORCH_CHECK(!options.src_data_rank || (*options.src_data_rank >= 0 && *options.src_data_rank < mesh.size()),
              "[lockstep/tp] rank ", mesh.get_rank(), ": src_data_rank is ", options.src_data_rank.value_or(0),
              ", and ", mesh, " has ranks 0 to ", mesh.size() - 1, ".");
  const LabelScope label({"parallelize_module()"});
  std::vector<Found> found;
  for (const auto& [pattern, style] : plan) found.push_back(find(module, pattern));
  check_same_on_all_ranks("what parallelize_module() divides", facts_of(plan, found, options), mesh.get_group());
  detail::Divisions divisions(mesh, options.src_data_rank);
  divisions.look_for_dropouts(module);
  const StyleContext context{divisions};
  for (std::size_t i = 0; i < plan.size(); ++i) {
    for (const auto& [path, each] : found[i]) plan[i].second->apply(*each, path, context);
  }
  divisions.check_memory(module);
  divisions.run();
  // Now, as Python does, and not in a forward that may have to be run again. Of a deferred module the draws are still
  // to come: its generator is looked at when it is first used.
  const auto parameters = module.parameters();
  if (!parameters.empty() && !parameters.front().is_meta()) detail::mesh_generator(mesh, parameters.front().device());
}

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Style& style,
                        const ParallelizeOptions& options) {
  parallelize_module(module, mesh, ParallelPlan{{"", style}}, options);
}

}  // namespace lockstep
