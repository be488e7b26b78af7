#include "lockstep/graph/program.h"

#include <c10/util/Exception.h>

#include <numeric>

#include "lockstep/base/str.h"
#include "lockstep/graph/capture.h"

namespace lockstep::graph {
namespace {

std::size_t outer_count(const Graph& graph) {
  return graph.count(ValueKind::kParameter) + graph.count(ValueKind::kBuffer);
}

}  // namespace

Program::Program(Graph graph, const std::optional<SplitOptions>& split, Backend backend,
                 const std::vector<at::Tensor>& outer, const Dump& dump)
    : graph_(std::move(graph)), backend_(std::move(backend)) {
  TORCH_CHECK(backend_, "[lockstep/graph] the backend is null.");
  if (split) {
    buckets_ = plan_split(graph_, *split);
  } else {
    buckets_.emplace_back().nodes.resize(graph_.nodes.size());
    std::iota(buckets_[0].nodes.begin(), buckets_[0].nodes.end(), 0);
  }
  for (const auto& value : graph_.values) known_looks_.push_back(value.look);
  if (dump) dump("original", graph_.to_string());
  for (auto& extracted : extract_parts(graph_, buckets_)) {
    const auto number = parts_.size();
    CompiledPart part{.part = std::move(extracted)};
    part.name = str("compiled_part_", number);
    part.reason = buckets_.size() == 1
                      ? "whole: nothing asked for a cut"
                      : "cut where a gradient bucket ends, so that its reduction overlaps with backward; "
                        "CompileOptions::mode = SplitMode::kOff turns it off";
    if (dump) dump(str("part ", number), part.part.graph.to_string());
    parts_.push_back(std::move(part));
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) compile(i, outer);
  if (dump) {
    std::string text;
    for (const auto& part : parts_) {
      std::vector<std::string> names;
      for (const auto id : part.part.outputs) names.push_back(graph_.values[id].name);
      text += str(join(names, ", "), " = ", part.name, part.is_compiled ? "" : " (as captured)", "\n");
    }
    dump("final", text);
    if (buckets_.size() > 1) dump("buckets", bucket_table(buckets_));
  }
  dead_after_.resize(parts_.size());
  std::vector<std::optional<std::size_t>> last_use(graph_.values.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    for (const auto id : parts_[i].part.inputs) last_use[id] = i;
  }
  for (const auto& id : graph_.outputs) {
    if (id) last_use[*id].reset();
  }
  for (ValueId id = 0; id < last_use.size(); ++id) {
    if (last_use[id]) dead_after_[*last_use[id]].push_back(id);
  }
}

void Program::compile(std::size_t index, const std::vector<at::Tensor>& outer) {
  auto& compiled = parts_[index];
  auto& part = compiled.part;
  // Parameters stay real: a backend may look at them.
  std::vector<at::Tensor> outer_of(graph_.values.size());
  std::size_t next = 0;
  for (const auto id : graph_.inputs) {
    const auto kind = graph_.values[id].kind;
    if (kind == ValueKind::kParameter || kind == ValueKind::kBuffer) outer_of[id] = outer[next++];
  }
  std::vector<at::Tensor> examples;
  for (std::size_t i = 0; i < part.inputs.size(); ++i) {
    const auto id = part.inputs[i];
    examples.push_back(graph_.values[id].kind == ValueKind::kParameter ? outer_of[id] : known_looks_[id].fake());
  }
  try {
    compiled.function = backend_(part.graph, examples);
    TORCH_CHECK(compiled.function, "it returned no function");
    compiled.is_compiled = true;
  } catch (const std::exception& error) {
    const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
    TORCH_WARN("[lockstep/graph] the backend failed on part ", index, " of ", parts_.size(),
               ", which runs as it was captured: ",
               torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
    compiled.function = backend_named("eager")(part.graph, examples);
    compiled.is_compiled = false;
  }
  // With what its real outputs look like, if it runs on fakes; else as captured.
  compiled.looks.clear();
  for (const auto id : part.outputs) compiled.looks.push_back(known_looks_[id]);
  try {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> fakes;
    for (const auto id : part.inputs) fakes.push_back(known_looks_[id].fake().detach());
    const auto outputs = run_on_fakes(compiled.function, fakes);
    for (std::size_t i = 0; i < outputs.size() && i < part.outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].is_meta() || outputs[i].sizes() != compiled.looks[i].sizes) continue;
      auto& look = known_looks_[part.outputs[i]];
      look.strides = outputs[i].strides().vec();
      compiled.looks[i] = look;
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a backend need not run on fakes
  }
}

void Program::check_looks(std::size_t index, const std::vector<at::Tensor>& outputs,
                          const std::vector<at::Tensor>& outer) {
  auto& part = parts_[index];
  TORCH_CHECK(outputs.size() == part.part.outputs.size(), "[lockstep/graph] ", part.name, " returned ", outputs.size(),
              " tensors instead of ", part.part.outputs.size(), ".");
  bool differs = false;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = outputs[i];
    auto& look = part.looks[i];
    TORCH_CHECK(!output.defined() || !output.is_meta() || look.device.is_meta(), "[lockstep/graph] ", part.name,
                " returned a tensor without elements for '", graph_.values[part.part.outputs[i]].name, "'.");
    TORCH_CHECK(output.defined() && output.sizes() == look.sizes, "[lockstep/graph] ", part.name, " returned ",
                graph::describe({output}), " for '", graph_.values[part.part.outputs[i]].name, "', ", look.to_string(),
                ".");
    if (output.layout() != at::kStrided || output.strides() == look.strides) continue;
    look.strides = output.strides().vec();
    known_looks_[part.part.outputs[i]] = look;
    differs = true;
  }
  if (!differs) return;
  for (auto later = index + 1; later < parts_.size(); ++later) {
    compile(later, outer);
    ++recompilations_;
  }
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outer) {
  TORCH_INTERNAL_ASSERT(outer.size() == outer_count(graph_));
  std::vector<at::Tensor> environment(graph_.values.size());
  std::size_t next_input = 0;
  std::size_t next_outer = 0;
  for (const auto id : graph_.inputs) {
    const auto& value = graph_.values[id];
    switch (value.kind) {
      case ValueKind::kInput:
        // Undefined ones have no value.
        while (!inputs[next_input].defined()) ++next_input;
        environment[id] = inputs[next_input++];
        break;
      case ValueKind::kConstant:
        environment[id] = value.constant;
        break;
      default:
        environment[id] = outer[next_outer++];
    }
  }
  std::vector<at::Tensor> arguments;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    auto& [part, function, name, reason, is_compiled, looks] = parts_[i];
    arguments.clear();
    for (const auto id : part.inputs) arguments.push_back(environment[id]);
    for (const auto id : dead_after_[i]) environment[id] = at::Tensor();
    auto outputs = function(arguments);
    check_looks(i, outputs, outer);
    for (std::size_t k = 0; k < outputs.size(); ++k) environment[part.outputs[k]] = std::move(outputs[k]);
  }
  std::vector<at::Tensor> results;
  for (const auto& id : graph_.outputs) results.push_back(id ? environment[*id] : at::Tensor());
  return results;
}

std::string Program::to_dot() const {
  std::vector<std::size_t> part_of(graph_.nodes.size(), 0);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    for (const auto node : buckets_[i].nodes) part_of[node] = i;
  }
  return graph_.to_dot(part_of);
}

std::string Program::describe() const {
  auto text = str(graph_.nodes.size(), " operators in ", parts_.size(), parts_.size() == 1 ? " part" : " parts", "\n");
  if (buckets_.size() > 1) text += bucket_table(buckets_);
  for (const auto& part : parts_) {
    if (!part.is_compiled) text += str(part.name, " runs as it was captured: the backend failed on it\n");
  }
  return text;
}

}  // namespace lockstep::graph
