// Rules of operators: how placements go through an operator. A rule names, for one axis of a mesh at a time, the ways
// in which the ranks of that axis may hold operands and results so that each computes its part from what it holds. The
// dispatcher (dispatch.cpp) takes the way that moves the fewest bytes, moves operands to it, runs the operator on local
// tensors and wraps what comes out. A rule is a small function; rules/*.cpp hold them by family. Internal to dtensor
// and tp.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/dtensor_impl.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/shard/layout.h"

namespace lockstep::detail {

using Sizes = std::vector<int64_t>;

/// A tensor among the arguments of an operator, elements of lists included. Undefined ones are left out.
struct Operand {
  at::Tensor tensor;
  LayoutPtr layout;  // of an ordinary tensor that of a replica
  std::size_t argument = 0;
  bool is_written = false;
  bool is_out = false;  // written only: what it held does not matter

  const Sizes& sizes() const { return layout->sizes(); }
  int64_t dim() const { return static_cast<int64_t>(sizes().size()); }
  const Placement& on(int64_t axis) const { return layout->placements()[static_cast<std::size_t>(axis)]; }
};

/// What a rule may look at: an operator, its arguments, and its operands on one mesh.
class RuleCall {
 public:
  /// Refuses operands of several meshes, ordinary tensors of more than one number beside DTensors, unless the rule
  /// takes them, and to write what should be a view but is a copy.
  explicit RuleCall(const OperatorCall& call, bool takes_ordinary = false);

  const c10::OperatorHandle& op() const { return call_.op(); }
  const std::string& name() const { return call_.name(); }
  const c10::IValue& argument(std::size_t index) const { return call_.argument(index); }
  std::size_t argument_count() const { return call_.argument_count(); }
  const std::vector<Operand>& operands() const { return operands_; }
  /// The first one of the argument; null if that is no defined tensor.
  const Operand* operand_of(std::size_t argument) const;
  /// Its position among the operands. REQUIRES: it is there.
  std::size_t position_of(std::size_t argument) const;
  const DeviceMesh& mesh() const { return operands_[first_].layout->mesh(); }
  /// The first DTensor's.
  const LayoutPtr& first_layout() const { return operands_[first_].layout; }
  /// A dim argument, counted from the front, of a tensor of `dims` dims.
  static int64_t dim_from_front(int64_t dim, int64_t dims) { return dim < 0 ? dim + dims : dim; }
  /// One of the operands does (DTensorImpl::takes_replicas()), and so does what comes of it.
  bool takes_replicas() const { return takes_replicas_; }
  /// "[lockstep/dtensor] rank 1 of 4: aten::mm(…)", with sizes and placements of all operands.
  std::string describe() const;

 private:
  const OperatorCall& call_;
  std::vector<Operand> operands_;
  std::size_t first_ = 0;
  bool takes_replicas_ = false;
};

/// One way an axis may hold everything: a placement per operand and per result.
struct Choice {
  Placements operands;
  Placements results;
};

/// The operator on local tensors: what a rule may change before it runs, or run in its own way.
struct LocalCall {
  const RuleCall& call;
  torch::jit::Stack arguments;             // with local tensors in the places of DTensors
  const std::vector<LayoutPtr>& operands;  // as they were moved
  std::vector<LayoutPtr>& results;         // may be replaced, where sizes are known only afterwards

  /// Runs the operator; the results are local tensors, as the operator returns them.
  torch::jit::Stack run();
};

/// What a rule says of a call.
struct Plan {
  /// Global sizes of every tensor that is returned, elements of lists included, in order.
  std::vector<Sizes> result_sizes = {};
  /// The ways of an axis, the preferred ones first among those that move equally much. None: there is no way.
  std::function<std::vector<Choice>(int64_t axis)> choices = {};
  /// For operators whose axes depend on each other, instead of `choices`: by operand and by result, for all axes.
  std::vector<Placements> operand_placements = {};
  std::vector<Placements> result_placements = {};
  /// Global strides of views, like result_sizes. Without: dense, in the order of the local tensor's.
  std::vector<Sizes> result_strides = {};
  /// A view that one device could not give either: it holds a copy, whatever the ranks' local tensors allow.
  bool is_copied = false;
  /// With operand_placements: this argument is not written in this call, whatever the schema says, and may be moved.
  std::optional<std::size_t> only_read = std::nullopt;
  /// This argument holds the sizes of the result: it becomes the local ones.
  std::optional<std::size_t> sizes_argument = std::nullopt;
  /// Instead of the operator itself.
  std::function<torch::jit::Stack(LocalCall&)> run = {};
};

/// How an operator that works element by element treats terms of a sum.
enum class Linearity {
  kNone,      // needs the sum
  kAdditive,  // add, sub, neg: of terms it gives terms
  kFactor     // mul, div: of terms in the first operand, or in one of them, and whole values in the others
};

struct OpRule {
  Plan (*plan)(const RuleCall& call) = nullptr;
  /// Works element by element, so operands of one layout without Partial lead to results of that layout, and nobody has
  /// to be asked.
  bool is_pointwise = false;
  /// Ordinary tensors beside DTensors are replicas for it, of any size; it refuses those itself that it must.
  bool takes_ordinary = false;
};

/// By name with overload, "aten::sum.dim_IntList" or "aten::sum." for the one without a name, or by name alone for all
/// overloads.
using RuleTable = std::map<std::string, OpRule>;

/// The parts of the table, one per file in rules/.
void add_pointwise_rules(RuleTable& table);
void add_matrix_rules(RuleTable& table);
void add_copy_rules(RuleTable& table);
void add_element_loss_rules(RuleTable& table);
void add_attention_rules(RuleTable& table);
void add_optimizer_rules(RuleTable& table);
void add_shape_rules(RuleTable& table);
void add_rearrange_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_search_rules(RuleTable& table);
void add_softmax_rules(RuleTable& table);
void add_norm_rules(RuleTable& table);
void add_embedding_rules(RuleTable& table);
void add_index_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_random_rules(RuleTable& table);

/// Null if the operator has none. Thread-safe.
const OpRule* find_op_rule(const c10::OperatorHandle& op);

// What rules are made of.

/// All operands and results Replicate.
Choice replicate_all(const RuleCall& call, std::size_t result_count = 1);
/// The placement cuts a dim among the ranks.
bool is_cut(const Placement& placement);
/// The same cut of another dim. REQUIRES: is_cut(), and no RaggedShard if sizes differ.
Placement cut_of(const Placement& cut, int64_t dim);
bool is_partial(const Placement& placement);
/// A sum or an average that is still to be made.
bool is_linear_partial(const Placement& placement);
/// The different cuts that operands have on an axis, as cuts of `dim_of(operand position, dim)`; those it answers -1
/// for are left out.
std::vector<Placement> cuts_on(const RuleCall& call, int64_t axis,
                               const std::function<int64_t(std::size_t, int64_t)>& dim_of);
/// Sizes of operands broadcast against each other. Refuses to write the result into a tensor of other sizes.
Sizes broadcast_sizes(const RuleCall& call);
/// Numbers of this dtype can be terms of a sum or an average that are computed on one by one.
bool can_be_terms(at::ScalarType dtype, const Placement& placement);
/// For operators that work element by element, on broadcast operands.
Plan pointwise_plan(const RuleCall& call, Linearity linearity);

}  // namespace lockstep::detail
