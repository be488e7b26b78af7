// RemoteModule<M>: a module on another worker, used as if it were here.
//
//     rpc::RemoteModule<NetImpl> net("worker1/cpu", 16, 8);
//     auto output = net.forward(input);                              // there; linked in a distributed autograd context
//     rpc::DistributedOptimizer<torch::optim::SGD> optimizer(net.remote_parameters(), 0.1);
//
// It is no torch::nn::Module: its parameters are elsewhere, and nothing here could list, save or move them. Functions
// of that name say so and what to use instead.
#pragma once

#include <string>
#include <vector>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/module_class.h"
#include "lockstep/rpc/remote_device.h"

namespace lockstep::rpc {

namespace detail {

template <class M, class = void>
struct ModuleOf {
  using Type = M;
};
template <class M>
struct ModuleOf<M, std::void_t<typename M::ContainedType>> {
  using Type = typename M::ContainedType;
};

[[noreturn]] void refuse_on_remote_module(const char* function, const char* instead);

}  // namespace detail

/// M is a module registered with module_class, or its holder. Copies refer to the same module.
template <class M>
class RemoteModule {
 public:
  using Module = typename detail::ModuleOf<M>::Type;
  using Signature = typename detail::MethodTraits<decltype(&Module::forward)>::Signature;

  RemoteModule() = default;
  /// Does not wait: if the module cannot be made, the first use says so.
  template <class... Args>
  explicit RemoteModule(const RemoteDevice& place, Args&&... args)
      : text_(place.text()), device_(place.device().str()) {
    rref_ = RRef<Module>(detail::call_remote(place.worker(), class_name(),
                                             {c10::IValue(device_), Wire<std::decay_t<Args>>::to(args)...}));
  }

  /// Another handle of a module that exists.
  static RemoteModule from_module_rref(const RemoteDevice& place, RRef<Module> rref) {
    RemoteModule module;
    module.text_ = place.text();
    module.device_ = place.device().str();
    module.rref_ = std::move(rref);
    return module;
  }

  template <class... Args>
  auto forward(Args&&... args) const {
    using R = typename Call<Signature>::Result;
    auto value = detail::call_and_wait(owner(), class_name() + ".forward",
                                       arguments(Call<Signature>::to_wires(std::forward<Args>(args)...)));
    if constexpr (!std::is_void_v<R>) return Wire<R>::from(value);
  }
  template <class... Args>
  auto operator()(Args&&... args) const {
    return forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto forward_async(Args&&... args) const {
    return Future<typename Call<Signature>::Result>(detail::call(
        owner(), class_name() + ".forward", arguments(Call<Signature>::to_wires(std::forward<Args>(args)...))));
  }

  /// References to the module's parameters, for a DistributedOptimizer.
  std::vector<RRef<at::Tensor>> remote_parameters(bool recurse = true) const {
    return Wire<std::vector<RRef<at::Tensor>>>::from(ask("parameters", {c10::IValue(recurse)}));
  }
  const RRef<Module>& module_rref() const { return rref_; }
  /// As it was given.
  const std::string& remote_device() const { return text_; }

  void train(bool mode = true) const { ask("train", {c10::IValue(mode)}); }
  void eval() const { train(false); }
  bool is_training() const { return Wire<bool>::from(ask("is_training", {})); }

  // What a module has and a remote one cannot have.
#define LOCKSTEP_REFUSED(function, instead)              \
  template <class... Args>                               \
  [[noreturn]] void function(Args&&... /*args*/) const { \
    detail::refuse_on_remote_module(#function, instead); \
  }
  LOCKSTEP_REFUSED(parameters, "remote_parameters()")
  LOCKSTEP_REFUSED(named_parameters, "remote_parameters()")
  LOCKSTEP_REFUSED(buffers, "a function of yours that is called there")
  LOCKSTEP_REFUSED(named_buffers, "a function of yours that is called there")
  LOCKSTEP_REFUSED(children, "module_rref()")
  LOCKSTEP_REFUSED(named_children, "module_rref()")
  LOCKSTEP_REFUSED(modules, "module_rref()")
  LOCKSTEP_REFUSED(named_modules, "module_rref()")
  LOCKSTEP_REFUSED(to, "another remote device for the constructor")
  LOCKSTEP_REFUSED(cuda, "another remote device for the constructor")
  LOCKSTEP_REFUSED(cpu, "another remote device for the constructor")
  LOCKSTEP_REFUSED(to_type, "a module that is made in that type")
  LOCKSTEP_REFUSED(register_buffer, "the module's own constructor")
  LOCKSTEP_REFUSED(register_parameter, "the module's own constructor")
  LOCKSTEP_REFUSED(register_module, "the module's own constructor")
  LOCKSTEP_REFUSED(register_forward_hook, "a hook inside of the module")
  LOCKSTEP_REFUSED(register_forward_pre_hook, "a hook inside of the module")
  LOCKSTEP_REFUSED(register_backward_hook, "a hook inside of the module")
  LOCKSTEP_REFUSED(apply, "a function of yours that is called there")
  LOCKSTEP_REFUSED(state_dict, "module_rref().to_here()")
  LOCKSTEP_REFUSED(load_state_dict, "a function of yours that is called there")
  LOCKSTEP_REFUSED(save, "module_rref().to_here()")
  LOCKSTEP_REFUSED(load, "a function of yours that is called there")
  LOCKSTEP_REFUSED(requires_grad_, "a function of yours that is called there")
  LOCKSTEP_REFUSED(zero_grad, "nothing: gradients are in the context")
  LOCKSTEP_REFUSED(share_memory, "nothing: the module is shared by its RRef")
#undef LOCKSTEP_REFUSED

 private:
  template <class S>
  struct Call;
  template <class R, class... Params>
  struct Call<R(Params...)> {
    using Result = typename detail::Result<R>::Type;
    template <class... Args>
    static std::vector<c10::IValue> to_wires(Args&&... args) {
      return detail::to_wires<Params...>(std::forward<Args>(args)...);
    }
  };

  static const std::string& class_name() {
    const auto& name = detail::class_name<Module>();
    if (name.empty()) {
      detail::refuse_unregistered(str("module ", detail::readable(typeid(Module))), "module_class<M>(\"name\")");
    }
    return name;
  }
  Callee owner() const { return rref_.callee(); }
  std::vector<c10::IValue> arguments(std::vector<c10::IValue> wires) const {
    wires.insert(wires.begin(), c10::IValue(device_));
    return rref_.with_handle(std::move(wires));
  }
  c10::IValue ask(const char* what, std::vector<c10::IValue> wires) const {
    return detail::call_and_wait(owner(), str(class_name(), ".", what), rref_.with_handle(std::move(wires)));
  }

  std::string text_;
  std::string device_ = "cpu";
  RRef<Module> rref_;
};

template <class M>
struct Wire<RemoteModule<M>> {
  using Module = typename RemoteModule<M>::Module;
  using Parts = std::pair<std::string, RRef<Module>>;
  static c10::IValue to(const RemoteModule<M>& module) {
    return Wire<Parts>::to({module.remote_device(), module.module_rref()});
  }
  static RemoteModule<M> from(const c10::IValue& value) {
    auto [place, rref] = Wire<Parts>::from(value);
    return RemoteModule<M>::from_module_rref(place, std::move(rref));
  }
  static std::string name() { return str("RemoteModule[", detail::readable(typeid(Module)), "]"); }
};

}  // namespace lockstep::rpc
