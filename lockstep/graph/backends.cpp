#include "lockstep/graph/backends.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>

#include "lockstep/base/str.h"
#include "lockstep/graph/autograd_part.h"
#include "lockstep/graph/executor_part.h"

namespace lockstep::graph {
namespace {

/// A graph with what must be known to run it again and again.
class Runner {
 public:
  explicit Runner(const Graph& graph) : graph_(graph), dead_after_(graph.nodes.size()) {
    std::vector<std::optional<std::size_t>> last_use(graph.values.size());
    for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
      for (const auto id : graph.nodes[n].reads) last_use[id] = n;
      for (const auto id : graph.nodes[n].makes) last_use[id] = n;
    }
    for (const auto& id : graph.outputs) {
      if (id) last_use[*id].reset();
    }
    for (ValueId id = 0; id < last_use.size(); ++id) {
      if (last_use[id]) dead_after_[*last_use[id]].push_back(id);
    }
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    TORCH_INTERNAL_ASSERT(inputs.size() == graph_.inputs.size());
    std::vector<at::Tensor> environment(graph_.values.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) environment[graph_.inputs[i]] = inputs[i];
    for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
      try {
        run_node(graph_.nodes[n], environment);
      } catch (const c10::Error& error) {
        TORCH_CHECK(false, error.what_without_backtrace(), "\n[lockstep/graph] while running ", graph_.nodes[n].name(),
                    " (node ", n, "), at ", graph_.nodes[n].place, " of the captured forward.");
      }
      for (const auto id : dead_after_[n]) environment[id] = at::Tensor();
    }
    std::vector<at::Tensor> outputs;
    outputs.reserve(graph_.outputs.size());
    for (const auto& id : graph_.outputs) outputs.push_back(id ? environment[*id] : at::Tensor());
    return outputs;
  }

 private:
  const Graph graph_;
  std::vector<std::vector<ValueId>> dead_after_;
};

GraphFunction compile_eagerly(const Graph& part, const std::vector<at::Tensor>& /*examples*/) {
  return [runner = std::make_shared<const Runner>(part)](const std::vector<at::Tensor>& inputs) {
    return runner->run(inputs);
  };
}

bool writes_to_inputs(const Graph& part) {
  for (const auto& node : part.nodes) {
    for (const auto id : node.writes) {
      const auto kind = part.values[id].kind;
      if (kind == ValueKind::kInput || kind == ValueKind::kParameter) return true;
    }
  }
  return false;
}

GraphFunction compile_as_one_node(const Graph& part, const std::vector<at::Tensor>& examples) {
  auto plain = compile_eagerly(part, examples);
  if (writes_to_inputs(part)) return plain;
  return as_one_node(std::move(plain));
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, Backend> backends = {
      {"eager", &compile_eagerly}, {"autograd", &compile_as_one_node}, {"executor", &compile_by_executor}};
};
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

Backend backend_named(const std::string& name) {
  auto& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.backends.find(name); found != all.backends.end()) return found->second;
  }
  TORCH_CHECK(false, "[lockstep/graph] there is no backend '", name, "'; there are ", join(backend_names(), ", "), ".");
}

void register_backend(const std::string& name, Backend backend) {
  TORCH_CHECK(backend, "[lockstep/graph] register_backend: '", name, "' is null.");
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK(all.backends.emplace(name, std::move(backend)).second, "[lockstep/graph] there is a backend '", name,
              "' already.");
}

std::vector<std::string> backend_names() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, backend] : all.backends) names.push_back(name);
  return names;
}

std::vector<at::Tensor> run_graph(const Graph& graph, const std::vector<at::Tensor>& inputs) {
  return Runner(graph).run(inputs);
}

}  // namespace lockstep::graph
