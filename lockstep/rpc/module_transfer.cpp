#include "lockstep/rpc/module_transfer.h"

#include <torch/csrc/autograd/grad_mode.h>

#include <set>

#include "lockstep/base/str.h"
#include "lockstep/rpc/functions.h"
#include "lockstep/rpc/remote_error.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/rpc/session.h"

namespace lockstep::rpc::detail {
namespace {

/// `value` with every tensor in it replaced.
c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> elements;
  for (const auto& each : value.toTupleRef().elements()) elements.push_back(mapped(each, change));
  return c10::ivalue::Tuple::create(std::move(elements));
}

/// A function of the object that the first argument names.
class ObjectFunction final : public Callable {
 public:
  using Body = std::function<c10::IValue(torch::nn::Module&, const std::vector<c10::IValue>&)>;
  ObjectFunction(std::string signature, std::size_t count, ModuleIn module_in, Body body)
      : signature_(std::move(signature)), count_(count), module_in_(std::move(module_in)), body_(std::move(body)) {}

  std::string signature() const override { return signature_; }
  Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
    if (arguments.size() != count_ + 1) refuse_count(signature_, arguments.size());
    if (form != Form::kWire) throw Refused("it has no result to keep");
    return with_object(arguments[0], [body = body_, module_in = module_in_, arguments](const c10::IValue& object) {
      return Answer{.value = body(*module_in(object), arguments)};
    });
  }

 private:
  std::string signature_;
  std::size_t count_;
  ModuleIn module_in_;
  Body body_;
};

struct ModuleState {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;
  std::vector<bool> are_training;  // of all modules inside, in their order
};
auto rpc_fields(ModuleState& state) {
  return std::tie(state.names, state.tensors, state.requires_grad, state.are_training);
}

/// Parameters, then buffers.
std::vector<std::pair<std::string, at::Tensor>> tensors_in(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

}  // namespace

c10::IValue ForwardPlace::brought(const c10::IValue& value) const {
  return mapped(value, [&](const at::Tensor& tensor) { return tensor.to(device_); });
}

c10::IValue ForwardPlace::taken_back(const c10::IValue& value) const {
  // A map to the caller would carry them; without one only CPU tensors travel.
  if (device_.is_cpu() || !current_agent("a forward")->getDevices().empty()) return value;
  return mapped(value, [](const at::Tensor& tensor) { return tensor.cpu(); });
}

void register_module_functions(const std::string& name, ModuleIn module_in) {
  const auto add = [&](const char* function, std::string signature, std::size_t count, ObjectFunction::Body body) {
    register_function(str(name, ".", function),
                      std::make_shared<ObjectFunction>(std::move(signature), count, module_in, std::move(body)));
  };
  add("parameters", "(bool) -> List[RRef[Tensor]]", 1,
      [](torch::nn::Module& module, const std::vector<c10::IValue>& arguments) {
        std::vector<RRef<at::Tensor>> references;
        std::set<const c10::TensorImpl*> seen;  // tied ones come once
        for (const auto& each : module.parameters(Wire<bool>::from(arguments[1]))) {
          if (seen.insert(each.unsafeGetTensorImpl()).second) references.emplace_back(each);
        }
        return Wire<std::vector<RRef<at::Tensor>>>::to(references);
      });
  add("train", "(bool) -> None", 1, [](torch::nn::Module& module, const std::vector<c10::IValue>& arguments) {
    module.train(Wire<bool>::from(arguments[1]));
    return c10::IValue();
  });
  add("is_training", "() -> bool", 0, [](torch::nn::Module& module, const std::vector<c10::IValue>& /*arguments*/) {
    return c10::IValue(module.is_training());
  });
}

c10::IValue wire_of_module(const torch::nn::Module& module, const c10::IValue& recipe) {
  TORCH_CHECK(recipe.isTuple(), "[lockstep/rpc] a copy of module ", module.name(),
              " cannot be made elsewhere: nobody knows what it was made of. Register its class with module_class<M>() "
              "and make ",
              "it by remote() or RemoteModule.");
  ModuleState state;
  for (const auto& [name, tensor] : tensors_in(module)) {
    state.names.push_back(name);
    state.tensors.push_back(tensor.detach());
    state.requires_grad.push_back(tensor.requires_grad());
  }
  for (const auto& each : module.modules(/*include_self=*/false)) state.are_training.push_back(each->is_training());
  state.are_training.push_back(module.is_training());
  return c10::ivalue::Tuple::create({recipe, Wire<ModuleState>::to(state)});
}

c10::IValue module_from_wire(const c10::IValue& wire, const std::string& class_name) {
  const auto maker = find_function(class_name);
  if (!maker) refuse_unregistered("the module's class", "module_class<M>(\"name\")");
  const auto parts = elements_of(wire, "module");
  check_count(parts.size(), 2, "module");
  std::vector<c10::IValue> arguments = {c10::IValue("cpu")};
  for (const auto& each : elements_of(parts[0], "recipe")) arguments.push_back(each);
  auto copy = maker->call(arguments, Form::kBoxed).value;
  const auto state = Wire<ModuleState>::from(parts[1]);
  const auto own = any_box(copy).module();
  const torch::NoGradGuard no_grad;
  const auto tensors = tensors_in(*own);
  TORCH_CHECK(tensors.size() == state.names.size(), "[lockstep/rpc] a copy of module ", own->name(), " has ",
              tensors.size(), " tensors, its original ", state.names.size(), ".");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    TORCH_CHECK(name == state.names[i], "[lockstep/rpc] a copy of module ", own->name(), " has '", name,
                "' where its original has '", state.names[i], "'.");
    TORCH_CHECK(tensor.sizes() == state.tensors[i].sizes(), "[lockstep/rpc] a copy of module ", own->name(), " has '",
                name, "' of [", join(tensor.sizes().vec(), ", "), "], its original one of [",
                join(state.tensors[i].sizes().vec(), ", "), "].");
    if (tensor.scalar_type() == state.tensors[i].scalar_type()) {
      tensor.copy_(state.tensors[i]);
    } else {
      tensor.set_data(state.tensors[i].clone());  // the original was cast since
    }
    if (tensor.is_leaf()) tensor.set_requires_grad(state.requires_grad[i]);
  }
  auto modules = own->modules(/*include_self=*/false);
  TORCH_CHECK(modules.size() + 1 == state.are_training.size(), "[lockstep/rpc] a copy of module ", own->name(), " has ",
              modules.size(), " modules inside, its original ", state.are_training.size() - 1, ".");
  // Each its own flag: train() of a module sets those inside too, so from the outside in.
  own->train(state.are_training.back());
  for (std::size_t i = 0; i < modules.size(); ++i) modules[i]->train(state.are_training[i]);
  return copy;
}

}  // namespace lockstep::rpc::detail
