#include "lockstep/dtensor/rule.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "lockstep/base/str.h"
#include "lockstep/dtensor/rules/loss.h"

namespace lockstep::detail {
namespace {

RuleTable make_table() {
  RuleTable table;
  add_pointwise_rules(table);
  add_matrix_rules(table);
  add_copy_rules(table);
  add_element_loss_rules(table);
  add_attention_rules(table);
  add_optimizer_rules(table);
  add_shape_rules(table);
  add_rearrange_rules(table);
  add_reduction_rules(table);
  add_search_rules(table);
  add_softmax_rules(table);
  add_norm_rules(table);
  add_embedding_rules(table);
  add_index_rules(table);
  add_factory_rules(table);
  add_loss_rules(table);
  add_random_rules(table);
  return table;
}

/// Of an ordinary tensor among DTensors.
LayoutPtr replica_layout(const DeviceMesh& mesh, at::IntArrayRef sizes) {
  return std::make_shared<const Layout>(mesh, Placements(static_cast<std::size_t>(mesh.ndim()), Replicate()),
                                        sizes.vec());
}

/// The gradient of split() or unbind(): zeros where an output was not used, which libtorch makes as ordinary tensors.
bool joins_gradients(const OperatorCall& call) {
  return (call.name() == "aten::cat" || call.name() == "aten::stack") && torch::autograd::get_current_node() != nullptr;
}

/// What forward took as a replica, a mask or factors, is one in its backward, whose gradient may come from elsewhere.
bool is_gradient_by_replica(const OperatorCall& call) {
  return (call.name() == "aten::masked_fill" || call.name() == "aten::mul") &&
         torch::autograd::get_current_node() != nullptr;
}

/// Label smoothing in a LossParallel: it masks losses by an ordinary target, and weighs logarithms by ordinary weights,
/// one for each class.
bool smooths_labels(const OperatorCall& call, const at::Tensor& ordinary) {
  if (loss_parallel_depth() == 0) return false;
  if (call.name() == "aten::masked_fill_") return true;
  return call.name() == "aten::mul" && ordinary.dim() >= 2 && ordinary.numel() == ordinary.size(1);
}

void check_writable(const OperatorCall& call, DTensorImpl& impl) {
  TORCH_CHECK(
      impl.try_write(), "[lockstep/dtensor] rank ", impl.mesh().get_rank(), ": ", call.name(),
      " writes a view of sizes ", impl.sizes(), " and placements ", to_string(impl.placements()),
      " that had to be copied, because what it is a view of lies on the ranks in another way. That tensor would "
      "not see it. Use the form that returns a new tensor, clone() the view, or redistribute() before it.");
}

const OpRule* rule_of_schema(const c10::FunctionSchema& schema) {
  static const RuleTable table = make_table();
  auto found = table.find(str(schema.name(), ".", schema.overload_name()));
  if (found == table.end()) found = table.find(schema.name());
  return found != table.end() ? &found->second : nullptr;
}

struct KnownRule {
  const c10::FunctionSchema* schema;
  const OpRule* rule;
};

}  // namespace

const OpRule* find_op_rule(const c10::OperatorHandle& op) {
  // A schema lives as long as its operator. Per thread, so that nobody waits; two that fall on one place take turns.
  constexpr std::size_t kPlaces = 256;
  thread_local std::array<KnownRule, kPlaces> known = {};
  const auto* schema = &op.schema();
  auto& place = known[(reinterpret_cast<std::uintptr_t>(schema) / alignof(std::max_align_t)) % kPlaces];
  if (place.schema != schema) place = {schema, rule_of_schema(*schema)};
  return place.rule;
}

RuleCall::RuleCall(const OperatorCall& call, bool takes_ordinary) : call_(call) {
  const DTensorImpl* first = nullptr;
  for_each_tensor(call, [&](const at::Tensor& tensor, std::size_t argument) {
    const auto* alias = call.schema().arguments()[argument].alias_info();
    auto* impl = dtensor_impl(tensor);
    if (impl != nullptr && first == nullptr) {
      first = impl;
      first_ = operands_.size();
    }
    operands_.push_back({.tensor = tensor,
                         .layout = impl != nullptr ? impl->layout() : nullptr,
                         .argument = argument,
                         .is_written = alias != nullptr && alias->isWrite(),
                         .is_out = call.schema().arguments()[argument].is_out()});
    if (impl != nullptr && operands_.back().is_written) check_writable(call, *impl);
    takes_replicas_ = takes_replicas_ || (impl != nullptr && impl->takes_replicas());
  });
  for (auto& operand : operands_) {
    if (operand.layout == nullptr) {
      TORCH_CHECK(operand.tensor.dim() == 0 || !operand.is_written, "[lockstep/dtensor] ", name(),
                  " would write a DTensor's values into an ordinary tensor of sizes ", operand.tensor.sizes(),
                  ". Use DTensor::to_local() or full_tensor() of the other, or make this one a DTensor.");
      const bool is_replica = operand.tensor.dim() == 0 || takes_ordinary || takes_replicas_ || joins_gradients(call) ||
                              is_gradient_by_replica(call) || smooths_labels(call, operand.tensor);
      TORCH_CHECK(is_replica && !operand.tensor.requires_grad(), "[lockstep/dtensor] rank ", first->mesh().get_rank(),
                  ": ", name(), " gets an ordinary tensor of sizes ", operand.tensor.sizes(), " for '",
                  call.schema().arguments()[operand.argument].name(), "' beside a DTensor of sizes ", first->sizes(),
                  " and placements ", to_string(first->placements()),
                  ". Make it a DTensor with DTensor::from_local() or distribute_tensor(), or open a scope of "
                  "ImplicitReplication if all ranks hold the same values in it.");
      operand.layout = replica_layout(first->mesh(), operand.tensor.sizes());
    } else if (operand.layout != first->layout()) {
      TORCH_CHECK(operand.layout->mesh() == first->mesh(), "[lockstep/dtensor] rank ", first->mesh().get_rank(), ": ",
                  name(), " gets DTensors of two meshes, ", first->mesh(), " and ", operand.layout->mesh(),
                  ". Bring them to one: full_tensor() and distribute_tensor().");
    }
  }
}

const Operand* RuleCall::operand_of(std::size_t argument) const {
  const auto found =
      std::find_if(operands_.begin(), operands_.end(), [&](const auto& each) { return each.argument == argument; });
  return found != operands_.end() ? &*found : nullptr;
}

std::size_t RuleCall::position_of(std::size_t argument) const {
  const auto* operand = operand_of(argument);
  TORCH_INTERNAL_ASSERT(operand != nullptr);
  return static_cast<std::size_t>(operand - operands_.data());
}

std::string RuleCall::describe() const {
  std::vector<std::string> texts;
  for (const auto& operand : operands_) {
    texts.push_back(str(call_.schema().arguments()[operand.argument].name(), " [", join(operand.sizes(), ", "), "] ",
                        to_string(operand.layout->placements())));
  }
  return str("[lockstep/dtensor] rank ", mesh().get_rank(), ", ", mesh(), ": ", name(), "(", join(texts, ", "), ")");
}

torch::jit::Stack LocalCall::run() {
  auto stack = std::move(arguments);
  call.op().callBoxed(&stack);
  return stack;
}

Choice replicate_all(const RuleCall& call, std::size_t result_count) {
  return {.operands = Placements(call.operands().size(), Replicate()),
          .results = Placements(result_count, Replicate())};
}

bool is_cut(const Placement& placement) {
  return sharded_dim(placement).has_value();
}

Placement cut_of(const Placement& cut, int64_t dim) {
  auto moved = cut;
  std::visit(
      [&](auto& kind) {
        if constexpr (requires { kind.dim; }) kind.dim = dim;
      },
      moved);
  return moved;
}

bool is_partial(const Placement& placement) {
  return std::holds_alternative<Partial>(placement);
}

bool is_linear_partial(const Placement& placement) {
  const auto* partial = std::get_if<Partial>(&placement);
  return partial != nullptr && (partial->op == ReduceOp::SUM || partial->op == ReduceOp::AVG);
}

std::vector<Placement> cuts_on(const RuleCall& call, int64_t axis,
                               const std::function<int64_t(std::size_t, int64_t)>& dim_of) {
  std::vector<Placement> cuts;
  for (std::size_t i = 0; i < call.operands().size(); ++i) {
    const auto& placement = call.operands()[i].on(axis);
    const auto dim = sharded_dim(placement);
    if (!dim) continue;
    const auto mapped = dim_of(i, *dim);
    if (mapped < 0) continue;
    const auto cut = cut_of(placement, mapped);
    if (std::find(cuts.begin(), cuts.end(), cut) == cuts.end()) cuts.push_back(cut);
  }
  return cuts;
}

}  // namespace lockstep::detail
