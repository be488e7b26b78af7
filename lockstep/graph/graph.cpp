#include "lockstep/graph/graph.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "lockstep/base/str.h"
#include "lockstep/base/unique_fd.h"

namespace lockstep::graph {
namespace {

std::string text_of(const std::vector<std::optional<ValueId>>& ids, const std::vector<Value>& values) {
  std::vector<std::string> names;
  for (const auto& id : ids) names.push_back(id ? values[*id].name : "none");
  return join(names, ", ");
}

std::string text_of(const Argument& argument, const std::vector<Value>& values) {
  if (argument.kind == Argument::Kind::kTensor) return text_of(argument.values, values);
  if (argument.kind != Argument::Kind::kPlain) return str("[", text_of(argument.values, values), "]");
  std::ostringstream out;
  out << argument.plain;
  return out.str();
}

c10::IValue argument_of(const Argument& argument, const std::vector<at::Tensor>& environment) {
  const auto tensor_of = [&](const std::optional<ValueId>& id) { return id ? environment[*id] : at::Tensor(); };
  switch (argument.kind) {
    case Argument::Kind::kPlain:
      return argument.plain;
    case Argument::Kind::kTensor:
      return tensor_of(argument.values[0]);
    case Argument::Kind::kTensorList: {
      c10::List<at::Tensor> list;
      list.reserve(argument.values.size());
      for (const auto& id : argument.values) list.push_back(tensor_of(id));
      return list;
    }
    case Argument::Kind::kOptionalTensorList: {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& id : argument.values) list.push_back(id ? std::optional(environment[*id]) : std::nullopt);
      return list;
    }
  }
  return {};
}

}  // namespace

TensorLook TensorLook::of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.layout() == at::kStrided ? tensor.strides().vec() : std::vector<std::int64_t>(),
          .dtype = tensor.scalar_type(),
          .device = tensor.device(),
          .requires_grad = tensor.requires_grad()};
}

std::string TensorLook::to_string() const {
  return lockstep::str(c10::toString(dtype), "[", join(sizes, ", "), "]");
}

at::Tensor TensorLook::fake() const {
  auto tensor = at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(at::kMeta));
  if (requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

const std::string& Node::name() const {
  return region ? region->name : op->schema().name();
}

std::size_t Graph::count(ValueKind kind) const {
  return static_cast<std::size_t>(
      std::count_if(values.begin(), values.end(), [&](const Value& value) { return value.kind == kind; }));
}

std::string Graph::to_string() const {
  std::ostringstream out;
  out << "graph(";
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    out << (i > 0 ? ", " : "") << values[inputs[i]].name << ": " << values[inputs[i]].look.to_string();
  }
  out << ")\n";
  for (const auto& node : nodes) {
    std::vector<std::string> results;
    for (const auto& result : node.results) results.push_back(text_of(result, values));
    std::vector<std::string> arguments;
    for (const auto& argument : node.arguments) arguments.push_back(text_of(argument, values));
    out << "  " << join(results, ", ") << " = " << node.name() << "(" << join(arguments, ", ") << ")";
    if (node.region) out << " of " << node.region->body.nodes.size() << " operators";
    out << "\n";
  }
  out << "  return " << text_of(outputs, values) << "\n";
  return out.str();
}

std::string Graph::to_dot(const std::vector<std::size_t>& part_of) const {
  std::ostringstream out;
  out << "digraph forward {\n  node [shape=box, fontname=monospace];\n";
  std::vector<std::optional<std::size_t>> maker(values.size());
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    for (const auto id : nodes[n].makes) maker[id] = n;
    if (!part_of.empty()) out << "  subgraph cluster_" << part_of[n] << " { label=\"part " << part_of[n] << "\"; ";
    out << (part_of.empty() ? "  " : "") << "n" << n << " [label=\"" << nodes[n].name() << "\"];"
        << (part_of.empty() ? "\n" : " }\n");
  }
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    for (const auto id : nodes[n].reads) {
      if (maker[id]) {
        out << "  n" << *maker[id] << " -> n" << n << " [label=\"" << values[id].look.to_string() << "\"];\n";
      } else {
        out << "  v" << id << " [label=\"" << values[id].name << "\", shape=ellipse];\n  v" << id << " -> n" << n
            << ";\n";
      }
    }
  }
  out << "}\n";
  return out.str();
}

void save_svg(const std::string& dot, const std::string& path) {
  const UniqueFd text(::memfd_create("graph", MFD_CLOEXEC));
  TORCH_CHECK(text && ::write(text.get(), dot.data(), dot.size()) == static_cast<ssize_t>(dot.size()) &&
                  ::lseek(text.get(), 0, SEEK_SET) == 0,
              "[lockstep/graph] save_svg: no room for the graph's text: ", std::strerror(errno));
  std::array<std::string, 4> words = {"dot", "-Tsvg", "-o", path};
  std::array<char*, 5> arguments = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, text.get(), STDIN_FILENO);
  pid_t child = -1;
  const auto error = ::posix_spawnp(&child, "dot", &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  TORCH_CHECK(error == 0, "[lockstep/graph] save_svg: the program 'dot' does not start: ", std::strerror(error),
              ". Install graphviz, or draw the text of to_dot() elsewhere.");
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  TORCH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "[lockstep/graph] save_svg: 'dot' failed to write '", path,
              "'; it says why on standard error.");
}

void run_node(const Node& node, std::vector<at::Tensor>& environment) {
  torch::jit::Stack stack;
  stack.reserve(node.arguments.size());
  for (const auto& argument : node.arguments) stack.push_back(argument_of(argument, environment));
  {
    const c10::AutoGradMode grad_mode(c10::GradMode::is_enabled() && !node.is_without_gradients);
    if (node.region) {
      stack = {node.region->run(stack.front().toTensorVector())};
    } else {
      node.op->callBoxed(stack);
    }
  }
  const auto put = [&](const std::optional<ValueId>& id, const at::Tensor& tensor) {
    if (id) environment[*id] = tensor;
  };
  for (std::size_t i = 0; i < node.results.size(); ++i) {
    const auto& ids = node.results[i];
    if (stack[i].isTensor()) {
      if (!ids.empty()) put(ids[0], stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      const auto list = stack[i].toTensorList();
      for (std::size_t k = 0; k < ids.size(); ++k) put(ids[k], list.get(k));
    }
  }
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::vector<std::string> texts;
  for (const auto& tensor : tensors) {
    texts.push_back(tensor.defined() ? str("T[", join(tensor.sizes().vec(), ", "), "]") : "none");
  }
  return str("(", join(texts, ", "), ")");
}

}  // namespace lockstep::graph
