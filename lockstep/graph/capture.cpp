#include "lockstep/graph/capture.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "lockstep/base/str.h"
#include "lockstep/graph/backends.h"
#include "lockstep/graph/split.h"
#include "lockstep/intercept/operator_call.h"
#include "lockstep/intercept/operator_scope.h"
#include "lockstep/intercept/shape_run.h"
#include "lockstep/intercept/tensor_rule.h"
#include "lockstep/nn/capture_mark.h"
#include "lockstep/nn/saved_tensors.h"

namespace lockstep::graph {
namespace {

constexpr auto kWho = "[lockstep/graph] capture";

class CaptureScope final : public OperatorScope, public RegionRecorder {
 public:
  CaptureScope(const std::vector<at::Tensor>& inputs, const std::vector<OuterTensor>& outer,
               const CaptureOptions& options)
      : OperatorScope(Sees::kProgram), options_(options), autocast_(autocast_state()) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      fakes_.push_back(inputs[i].defined() ? enter(inputs[i], ValueKind::kInput, str("x", i)) : at::Tensor());
    }
    for (const auto& [name, tensor, is_parameter] : outer) {
      if (ids_.contains(tensor.unsafeGetTensorImpl())) continue;
      enter(tensor, is_parameter ? ValueKind::kParameter : ValueKind::kBuffer, name);
    }
    for (const auto& value : graph_.values) {
      if (value.kind == ValueKind::kConstant) continue;
      home_ = value.look.device;
      if (value.kind == ValueKind::kParameter) break;
    }
  }

  const std::vector<at::Tensor>& fakes() const { return fakes_; }

  void on_operator(OperatorCall& call) override {
    TORCH_CHECK(!c10::InferenceMode::is_enabled(), kWho, ": ", call.name(), " runs in InferenceMode. Use NoGradGuard.");
    TORCH_CHECK(autocast_state() == autocast_, kWho, ": autocast is switched inside of the forward, before ",
                call.name(), ". Switch it around the call of the compiled module.");
    TORCH_CHECK(has_gradients_ || !c10::GradMode::is_enabled(), kWho,
                ": gradients are switched on inside of a forward ", "without them, before ", call.name(), ".");
    if (is_equal_to_itself(call)) return call.replace({true});
    Node node{.op = call.op(),
              .arguments = {},
              .results = {},
              .reads = {},
              .makes = {},
              .writes = {},
              .is_random = detail::is_random(call.op()),
              .is_without_gradients = has_gradients_ && !c10::GradMode::is_enabled(),
              .place = ""};
    std::vector<at::Tensor> originals;
    for (std::size_t i = 0; i < call.argument_count(); ++i) node.arguments.push_back(take(call, i, node, originals));
    node.place = place();
    // A move to another device must be seen as one, though all devices are meta here.
    auto results = run(call);
    give(call, node, results, originals);
    graph_.nodes.push_back(std::move(node));
    call.replace(std::move(results));
  }

  std::size_t begin_region(const std::string& what) override {
    TORCH_CHECK(
        options_.keeps_regions, kWho, ": the forward uses ", what, ", behind ", place(),
        ", which holds a graph of its own: no cut goes through it. Set CompileOptions::keeps_regions to keep it ",
        "whole, as one operator with all the parameters in it; or turn splitting off with ",
        "CompileOptions::mode = SplitMode::kOff, at the cost of every overlap of reductions with backward; or ", "put ",
        what, " around the compiled module.");
    return graph_.nodes.size();
  }

  void end_region(std::size_t begin, const std::string& what, const std::vector<at::Tensor>& outputs,
                  RegionRun run) override {
    std::vector<std::size_t> inside;
    std::unordered_set<ValueId> made;
    Node node{
        .op = std::nullopt, .arguments = {}, .results = {}, .reads = {}, .makes = {}, .writes = {}, .place = place()};
    for (auto n = begin; n < graph_.nodes.size(); ++n) {
      const auto& each = graph_.nodes[n];
      inside.push_back(n);
      made.insert(each.makes.begin(), each.makes.end());
      node.is_random = node.is_random || each.is_random;
      for (const auto id : each.writes) {
        TORCH_CHECK(made.contains(id), kWho, ": ", each.name(), " inside of ", what, ", behind ", each.place,
                    ", writes to '", graph_.values[id].name, "', which is from outside. It would be written once more ",
                    "when backward runs it again: put ", what, " around the compiled module.");
      }
    }
    for (const auto& output : outputs) {
      if (!output.defined()) continue;
      const auto id = known(output, str("what ", what, " returns"));
      if (made.erase(id) > 0) node.makes.push_back(id);
    }
    hidden_.insert(made.begin(), made.end());
    if (!node.makes.empty()) {
      auto body = extract(graph_, inside, node.makes);
      Argument all{.kind = Argument::Kind::kTensorList, .plain = {}, .values = {}};
      for (const auto id : body.inputs) all.values.emplace_back(id);
      node.arguments.push_back(std::move(all));
      node.results.emplace_back(node.makes.begin(), node.makes.end());
      node.reads = std::move(body.inputs);
      auto function = backend_named("eager")(body.graph, {});
      node.region = std::make_shared<const Region>(
          Region{.name = what, .body = std::move(body.graph), .run = [function, run](const auto& inputs) {
                   return run(function, inputs);
                 }});
    }
    graph_.nodes.resize(begin, Node{});
    if (node.region) graph_.nodes.push_back(std::move(node));
  }

  Graph finish(const std::vector<at::Tensor>& outputs) {
    for (const auto& output : outputs) {
      graph_.outputs.push_back(output.defined() ? std::optional(known(output, "what the forward returns"))
                                                : std::nullopt);
    }
    check_functions(outputs, fakes_);
    return std::move(graph_);
  }

  /// Throws if the program holds on to a fake: what its forward stores is no result. REQUIRES: nobody else does.
  void check_nothing_is_kept() {
    kept_.clear();
    fakes_.clear();
    fake_of_.clear();
    twins_.clear();
    // The last one: what it was computed from lives with it.
    for (auto each = watched_.rbegin(); each != watched_.rend(); ++each) {
      const auto& [fake, what] = *each;
      TORCH_CHECK(
          fake.expired(), kWho, ": the forward keeps ", what, ", for later or for others to see: in a member, or a ",
          "variable of its surroundings. A compiled forward computes only what it returns: return it, register ",
          "it as a buffer and write to it in place, or make it in the constructor.");
    }
  }

 private:
  static torch::jit::Stack run(OperatorCall& call) {
    try {
      return detail::run_for_shapes(
          call, /*moves=*/false, kWho,
          "A compiled forward must not depend on them: do this outside of it, or do not compile the module.");
    } catch (const c10::Error& error) {
      std::set<at::ScalarType> dtypes;
      for (std::size_t i = 0; i < call.argument_count(); ++i) {
        const auto& value = call.argument(i);
        if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_floating_point()) {
          dtypes.insert(value.toTensor().scalar_type());
        }
      }
      TORCH_CHECK(false, error.what_without_backtrace(),
                  dtypes.size() > 1
                      ? "\nCasts by autocast, or by a policy of fully_shard(), are made when it runs, not "
                        "while it is captured: give the compiled module inputs of its parameters' dtype."
                      : "");
    }
  }

  /// Where the forward is, for messages.
  std::string place() const { return last_parameter_.empty() ? "the beginning" : str("'", last_parameter_, "'"); }

  /// Adds a value from outside; its fake.
  at::Tensor enter(const at::Tensor& tensor, ValueKind kind, std::string name) {
    TORCH_CHECK(dynamic_cast<const RuledTensorImpl*>(tensor.unsafeGetTensorImpl()) == nullptr &&
                    tensor.layout() == at::kStrided,
                kWho, ": ", name,
                " is no plain dense tensor. Compile modules before they are divided, and leave sparse ones out.");
    const auto look = TensorLook::of(tensor);
    auto fake = look.fake();
    if (tensor.has_storage()) {
      auto& twin = twins_[tensor.storage().unsafeGetStorageImpl()];
      // Tensors that share memory outside share it here.
      if (twin.defined()) alias_of_[fake.storage().unsafeGetStorageImpl()] = twin.storage().unsafeGetStorageImpl();
      if (!twin.defined()) twin = fake;
    }
    const auto id = add_value(fake, kind, std::move(name));
    graph_.values[id].look = look;
    if (kind == ValueKind::kConstant) graph_.values[id].constant = tensor;
    graph_.inputs.push_back(id);
    remember(tensor, id);
    fake_of_[id] = fake;
    return fake;
  }

  ValueId add_value(const at::Tensor& fake, ValueKind kind, std::string name) {
    const auto id = graph_.values.size();
    Value value{.kind = kind, .name = std::move(name), .look = TensorLook::of(fake), .constant = {}};
    value.look.device = home_;
    value.alias_group = group_of(fake);
    if (value.name.empty()) value.name = str("v", id);
    graph_.values.push_back(std::move(value));
    remember(fake, id);
    return id;
  }

  std::size_t group_of(const at::Tensor& fake) {
    auto* storage = fake.storage().unsafeGetStorageImpl();
    if (const auto found = alias_of_.find(storage); found != alias_of_.end()) storage = found->second;
    return groups_.try_emplace(storage, groups_.size()).first->second;
  }

  void remember(const at::Tensor& tensor, ValueId id) {
    ids_.insert_or_assign(tensor.unsafeGetTensorImpl(), id);
    kept_.push_back(tensor);  // so that no other gets its address
  }

  ValueId known(const at::Tensor& tensor, const std::string& where) {
    const auto found = ids_.find(tensor.unsafeGetTensorImpl());
    if (found != ids_.end()) {
      TORCH_CHECK(!hidden_.contains(found->second), kWho, ": ", where, ", ", TensorLook::of(tensor).to_string(),
                  ", was computed inside of a checkpoint() that does not return it. Return it from there.");
      return found->second;
    }
    if (const auto same = twin_of(tensor)) return *same;
    TORCH_CHECK(
        !tensor.is_meta(), kWho, ": ", where, ", ", TensorLook::of(tensor).to_string(),
        ", was made by no operator: data() does so, for which use detach(); or it is left over from another capture, ",
        "whose forward kept it.");
    TORCH_CHECK(!tensor.requires_grad(), kWho, ": ", where, ", ", TensorLook::of(tensor).to_string(),
                ", needs gradients, but is neither an input nor a registered parameter, behind ",
                last_parameter_.empty() ? "no parameter" : str("'", last_parameter_, "'"),
                ". Register it, or pass it to forward().");
    enter(tensor, ValueKind::kConstant, str("constant", graph_.count(ValueKind::kConstant)));
    return ids_.at(tensor.unsafeGetTensorImpl());
  }

  /// torch::ones() and its like give what at::ones() made another TensorImpl. With gradients it would be data(), which
  /// cuts them off without a word to anybody.
  std::optional<ValueId> twin_of(const at::Tensor& tensor) {
    if (!tensor.is_meta() || !tensor.has_storage()) return std::nullopt;
    for (auto each = kept_.rbegin(); each != kept_.rend(); ++each) {
      if (!each->is_meta() || each->requires_grad() || !each->is_alias_of(tensor) || each->sizes() != tensor.sizes() ||
          each->strides() != tensor.strides() || each->storage_offset() != tensor.storage_offset() ||
          each->scalar_type() != tensor.scalar_type()) {
        continue;
      }
      const auto id = ids_.at(each->unsafeGetTensorImpl());
      remember(tensor, id);
      return id;
    }
    return std::nullopt;
  }

  std::optional<ValueId> take(const at::Tensor& tensor, const OperatorCall& call, Node& node) {
    if (!tensor.defined()) return std::nullopt;
    const auto id = known(tensor, str("an argument of ", call.name()));
    if (std::find(node.reads.begin(), node.reads.end(), id) == node.reads.end()) node.reads.push_back(id);
    if (graph_.values[id].kind == ValueKind::kParameter) last_parameter_ = graph_.values[id].name;
    return id;
  }

  /// Notes an argument and puts fakes in its place.
  Argument take(OperatorCall& call, std::size_t index, Node& node, std::vector<at::Tensor>& originals) {
    auto& value = call.argument(index);
    Argument argument;
    const auto fake = [&](const at::Tensor& tensor, const std::optional<ValueId>& id) {
      const auto found = id ? fake_of_.find(*id) : fake_of_.end();
      return found == fake_of_.end() ? tensor : found->second;
    };
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      argument.kind = Argument::Kind::kTensor;
      argument.values = {take(tensor, call, node)};
      originals.push_back(tensor);
      value = fake(tensor, argument.values[0]);
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::kTensorList;
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) {
        argument.values.push_back(take(tensor, call, node));
        list.push_back(fake(tensor, argument.values.back()));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::kOptionalTensorList;
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        argument.values.push_back(tensor ? take(*tensor, call, node) : std::nullopt);
        list.push_back(tensor ? std::optional(fake(*tensor, argument.values.back())) : std::nullopt);
      }
      value = list;
    } else {
      argument.plain = value.deepcopy();
      // From options of a fake: it means where the program is at home.
      if (value.isDevice() && value.toDevice().is_meta()) argument.plain = home_;
    }
    const auto* const alias = call.schema().arguments()[index].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (const auto& id : argument.values) {
        if (id) node.writes.push_back(*id);
      }
    }
    return argument;
  }

  /// Notes results; what was written in place is given back as the program knows it.
  void give(const OperatorCall& call, Node& node, torch::jit::Stack& results,
            const std::vector<at::Tensor>& originals) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      auto& ids = node.results.emplace_back();
      if (results[i].isTensor()) {
        const auto tensor = results[i].toTensor();
        ids.push_back(give(tensor, node));
        if (const auto* const alias = call.schema().returns()[i].alias_info();
            alias != nullptr && alias->isWrite() && ids.back()) {
          for (const auto& original : originals) {
            if (original.defined() && ids_.at(original.unsafeGetTensorImpl()) == *ids.back()) results[i] = original;
          }
        }
      } else if (results[i].isTensorList()) {
        for (const at::Tensor& tensor : results[i].toTensorList()) ids.push_back(give(tensor, node));
      }
    }
  }

  std::optional<ValueId> give(const at::Tensor& fake, Node& node) {
    if (!fake.defined()) return std::nullopt;
    if (const auto found = ids_.find(fake.unsafeGetTensorImpl()); found != ids_.end()) return found->second;
    node.makes.push_back(add_value(fake, ValueKind::kResult, ""));
    watched_.emplace_back(c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(fake.getIntrusivePtr()),
                          str("a result of ", node.name()));
    return node.makes.back();
  }

  /// at::equal() of a tensor and itself, which libtorch answers without a look at its elements. Its attention asks so
  /// whether query, key and value are one.
  bool is_equal_to_itself(const OperatorCall& call) const {
    if (call.name() != "aten::equal") return false;
    const auto id_of = [&](std::size_t index) {
      const auto found = ids_.find(call.argument(index).toTensor().unsafeGetTensorImpl());
      return found == ids_.end() ? std::nullopt : std::optional(found->second);
    };
    const auto first = id_of(0);
    return first && first == id_of(1);
  }

  /// Autograd functions that were written in C++ have a backward that the operators inside do not tell of; hooks are no
  /// operators at all.
  static void check_functions(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& fakes) {
    std::vector<torch::autograd::Node*> open;
    std::unordered_set<torch::autograd::Node*> seen;
    const auto visit = [&](torch::autograd::Node* node) {
      if (node != nullptr && seen.insert(node).second) open.push_back(node);
    };
    for (const auto& output : outputs) {
      if (output.defined()) visit(output.grad_fn().get());
    }
    for (const auto& fake : fakes) {
      TORCH_CHECK(!fake.defined() || !fake.requires_grad() || torch::autograd::impl::hooks(fake).empty(), kWho,
                  ": the forward registers a hook on an input. Register it outside, before the call.");
    }
    while (!open.empty()) {
      auto* const node = open.back();
      open.pop_back();
      TORCH_CHECK(node->name().find("CppNode") == std::string::npos, kWho, ": the forward uses the autograd function ",
                  node->name(), ", whose backward is its own. Call it outside of the compiled module.");
      // A parameter's own hooks are there in every run; what the forward adds here would be there in none.
      const bool is_leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node) != nullptr;
      TORCH_CHECK(is_leaf || (node->pre_hooks().empty() && node->post_hooks().empty() &&
                              node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty()),
                  kWho, ": the forward registers a hook on what it computes, or lets it retain its gradient, at ",
                  node->name(), ". A captured graph does not hold hooks: register them on what it returns.");
      for (const auto& edge : node->next_edges()) visit(edge.function.get());
    }
  }

  const CaptureOptions options_;
  Graph graph_;
  at::Device home_ = at::kCPU;
  const AutocastState autocast_;
  const bool has_gradients_ = c10::GradMode::is_enabled();
  std::string last_parameter_;
  std::vector<at::Tensor> fakes_;  // of the inputs
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, std::string>> watched_;
  std::unordered_map<c10::TensorImpl*, ValueId> ids_;
  std::unordered_set<ValueId> hidden_;               // that only the inside of a region has
  std::unordered_map<ValueId, at::Tensor> fake_of_;  // of what comes from outside
  std::unordered_map<c10::StorageImpl*, at::Tensor> twins_;
  std::unordered_map<c10::StorageImpl*, c10::StorageImpl*> alias_of_;
  std::unordered_map<c10::StorageImpl*, std::size_t> groups_;
};

class FakeScope final : public OperatorScope {
 public:
  FakeScope() : OperatorScope(Sees::kProgram) {}
  void on_operator(OperatorCall& call) override {
    call.replace(detail::run_for_shapes(call, /*moves=*/false, kWho, "Fakes have none."));
  }
};

/// Fakes are nobody's activations: a checkpoint around the capture must not count them.
class SavedAsTheyAre final : public lockstep::detail::SavingRule {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return nullptr; }
};

}  // namespace

std::vector<OuterTensor> outer_tensors(const torch::nn::Module& module) {
  std::vector<OuterTensor> tensors;
  for (const auto& item : module.named_parameters()) tensors.push_back({item.key(), item.value(), true});
  for (const auto& item : module.named_buffers()) tensors.push_back({item.key(), item.value(), false});
  std::erase_if(tensors, [](const OuterTensor& each) { return !each.tensor.defined(); });
  return tensors;
}

Graph capture(const std::vector<at::Tensor>& inputs, const std::vector<OuterTensor>& outer,
              const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& fakes)>& forward,
              const CaptureOptions& options) {
  const auto scope = std::make_shared<CaptureScope>(inputs, outer, options);
  const CaptureMark capturing(*scope);
  std::vector<at::Tensor> outputs;
  {
    const EnterScope entered(scope);
    const lockstep::detail::EnterSaving saving(std::make_shared<SavedAsTheyAre>());
    outputs = forward(scope->fakes());
  }
  auto graph = scope->finish(outputs);
  outputs.clear();
  scope->check_nothing_is_kept();
  return graph;
}

std::vector<at::Tensor> run_on_fakes(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>& function,
    const std::vector<at::Tensor>& fakes) {
  const EnterScope entered(std::make_shared<FakeScope>());
  return function(fakes);
}

AutocastState autocast_state() {
  AutocastState state;
  for (const auto device : {at::kCPU, at::kCUDA}) {
    if (at::autocast::is_autocast_enabled(device)) state.emplace_back(device, at::autocast::get_autocast_dtype(device));
  }
  return state;
}

}  // namespace lockstep::graph
