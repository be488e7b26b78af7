#include "lockstep/graph/executor_part.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>

#include "lockstep/base/str.h"
#include "lockstep/graph/capture.h"

namespace lockstep::graph {
namespace {

using TsGraph = torch::jit::Graph;
using TsValue = torch::jit::Value;

class Translator {
 public:
  explicit Translator(const Graph& part) : part_(part), values_(part.values.size(), nullptr) {}

  std::shared_ptr<TsGraph> translate() {
    for (const auto id : part_.inputs) {
      values_[id] = graph_->addInput();
      values_[id]->setType(c10::TensorType::get());
    }
    for (const auto& node : part_.nodes) add(node);
    for (const auto& id : part_.outputs) graph_->registerOutput(id ? values_[*id] : none());
    return graph_;
  }

 private:
  TsValue* none() { return graph_->insertConstant(c10::IValue()); }
  TsValue* value_of(const std::optional<ValueId>& id) { return id ? values_[*id] : none(); }

  TsValue* argument_of(const Argument& argument, const c10::TypePtr& type) {
    if (argument.kind == Argument::Kind::kTensor) return value_of(argument.values[0]);
    if (argument.kind == Argument::Kind::kPlain) {
      // A constant without elements must be of the type the operator wants.
      auto value = argument.plain;
      TORCH_CHECK(!value.isGenerator(), "a generator of the program's own cannot be compiled");
      return graph_->insertConstant(value);
    }
    std::vector<TsValue*> items;
    for (const auto& id : argument.values) items.push_back(value_of(id));
    auto element = c10::TypePtr(c10::TensorType::get());
    if (const auto list = type->cast<c10::ListType>()) element = list->getElementType();
    return graph_->insertNode(graph_->createList(element, items))->output();
  }

  void add(const lockstep::graph::Node& node) {
    TORCH_CHECK(node.op, node.name(), " is no operator");
    // TorchScript differentiates complex products without conjugation, and fixes the device of hidden states.
    for (const auto id : node.reads) {
      TORCH_CHECK(!c10::isComplexType(part_.values[id].look.dtype), node.name(), " of complex numbers");
    }
    for (const auto* const name : {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}) {
      TORCH_CHECK(node.name() != name, node.name(), " is not compiled");
    }
    const auto& schema = node.op->schema();
    std::vector<TsValue*> inputs;
    for (std::size_t i = 0; i < node.arguments.size(); ++i) {
      inputs.push_back(argument_of(node.arguments[i], schema.arguments()[i].type()));
    }
    TORCH_CHECK(!node.is_without_gradients, node.name(), " runs without gradients inside of the forward");
    auto* const made = graph_->insertNode(graph_->create(c10::Symbol::fromQualString(schema.name()), inputs, 0));
    for (std::size_t i = 0; i < schema.returns().size(); ++i) {
      auto* const output = made->addOutput();
      output->setType(schema.returns()[i].type());
      const auto& ids = node.results[i];
      if (schema.returns()[i].type()->kind() == c10::TypeKind::TensorType) {
        if (!ids.empty() && ids[0]) values_[*ids[0]] = output;
      } else if (!ids.empty()) {
        auto* const unpack = graph_->insertNode(graph_->createListUnpack(output, ids.size()));
        for (std::size_t k = 0; k < ids.size(); ++k) {
          if (ids[k]) values_[*ids[k]] = unpack->outputs()[k];
        }
      }
    }
    TORCH_CHECK(made->maybeOperator() != nullptr, "TorchScript has no operator ", schema.name(),
                " with these arguments");
  }

  const Graph& part_;
  std::shared_ptr<TsGraph> graph_ = std::make_shared<TsGraph>();
  std::vector<TsValue*> values_;
};

std::vector<at::Tensor> run(torch::jit::GraphExecutor& executor, const std::vector<at::Tensor>& inputs) {
  torch::jit::Stack stack(inputs.begin(), inputs.end());
  executor.run(stack);
  std::vector<at::Tensor> outputs;
  for (const auto& value : stack) outputs.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
  return outputs;
}

/// Profiles, optimizes, and profiles the backward, on zeros of the examples' looks.
void warm_up(torch::jit::GraphExecutor& executor, const Graph& part) {
  std::vector<at::Tensor> zeros;
  for (const auto id : part.inputs) {
    const auto& look = part.values[id].look;
    auto zero = at::empty_strided(look.sizes, look.strides, at::TensorOptions(look.dtype).device(look.device)).zero_();
    if (look.requires_grad) zero.set_requires_grad(true);
    zeros.push_back(std::move(zero));
  }
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> ones;
    for (const auto& output : run(executor, zeros)) {
      if (!output.defined() || !output.requires_grad()) continue;
      roots.push_back(output);
      ones.push_back(at::zeros_like(output));
    }
    if (!roots.empty()) torch::autograd::backward(roots, ones);
  }
}

bool is_pure(const Graph& part) {
  return std::all_of(part.nodes.begin(), part.nodes.end(),
                     [](const auto& node) { return node.writes.empty() && !node.is_random; });
}

}  // namespace

GraphFunction compile_by_executor(const Graph& part, const std::vector<at::Tensor>& /*examples*/) {
  TORCH_CHECK(autocast_state().empty(), "TorchScript's executor does not cast as autocast does");
  const auto executor = std::make_shared<torch::jit::GraphExecutor>(Translator(part).translate(), "lockstep_part");
  // Statistics would change, and random numbers be drawn.
  if (is_pure(part)) warm_up(*executor, part);
  return [executor](const std::vector<at::Tensor>& inputs) { return run(*executor, inputs); };
}

}  // namespace lockstep::graph
