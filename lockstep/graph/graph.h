// A forward pass as a list of operators: what capture() records, split_graph() cuts and backends compile.
//
// Vocabulary: a *value* is a tensor on its way through the graph; a *node* is one operator call. Values are numbered;
// an operator that writes in place gives back the value it was given, so an environment of tensors, filled from front
// to back, holds at every node what the program's own variables held. Everything that is no tensor (sizes, dtypes,
// scales) is part of the node.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::graph {

using ValueId = std::size_t;

/// Where a value comes from. What is no result of a node enters the graph from outside.
enum class ValueKind { kInput, kParameter, kBuffer, kConstant, kResult };

/// How a tensor looks, without its elements.
struct TensorLook {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool requires_grad = false;

  static TensorLook of(const at::Tensor& tensor);
  bool operator==(const TensorLook&) const = default;
  /// "Float[2, 3]"
  std::string to_string() const;
  /// A tensor that looks so and has no elements.
  at::Tensor fake() const;
};

struct Value {
  ValueKind kind = ValueKind::kResult;
  std::string name;  // "x0", a parameter's dotted name, "v17"
  TensorLook look;
  /// Of a constant: a tensor that the forward uses and nobody passes. Read at every run, as the program would.
  at::Tensor constant;
  /// Values with the same number may share memory.
  std::size_t alias_group = 0;
};

struct Argument {
  enum class Kind { kPlain, kTensor, kTensorList, kOptionalTensorList };
  Kind kind = Kind::kPlain;
  c10::IValue plain;
  std::vector<std::optional<ValueId>> values;  // none: an undefined tensor
};

struct Region;

struct Node {
  std::optional<c10::OperatorHandle> op;  // none: a region
  std::vector<Argument> arguments;
  /// By result of the operator: its tensors; a result that is no list has one, none if it is no tensor.
  std::vector<std::vector<std::optional<ValueId>>> results;
  std::vector<ValueId> reads;   // each once, in order
  std::vector<ValueId> makes;   // values that were not there before
  std::vector<ValueId> writes;  // that it changes in place
  bool is_random = false;
  bool is_without_gradients = false;  // though the forward is with them
  std::string place;                  // which parameters were used before it, for messages
  /// Instead of an operator: a graph that is run in a way of its own, such as a checkpoint. No cut goes through it.
  std::shared_ptr<const Region> region = nullptr;

  const std::string& name() const;
};

class Graph {
 public:
  std::vector<Value> values;
  std::vector<Node> nodes;
  /// What comes from outside, in this order: inputs of the program, parameters, buffers, constants not among them.
  std::vector<ValueId> inputs;
  /// What is returned; one value may be there twice, and may be an input. None: an undefined tensor.
  std::vector<std::optional<ValueId>> outputs;

  std::size_t count(ValueKind kind) const;
  /// A line per node.
  std::string to_string() const;
  /// For Graphviz: dot -Tsvg. `part_of` gives each node's part, if it was split.
  std::string to_dot(const std::vector<std::size_t>& part_of = {}) const;
};

/// Draws what to_dot() gave into an SVG file. Throws if Graphviz's program `dot` is not there, or fails.
void save_svg(const std::string& dot, const std::string& path);

/// One list of tensors goes in, one comes out.
struct Region {
  std::string name;  // "checkpoint()"
  Graph body;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> run;
};

/// Runs a node on tensors by value. Results that are new go into `environment`; operators are called as the program
/// called them, above autograd.
void run_node(const Node& node, std::vector<at::Tensor>& environment);

/// Text for debug lines: T[2, 3] for tensors.
std::string describe(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep::graph
