// Modules that other workers may make here, and use: what RemoteModule needs of them.
//
//     const auto net = rpc::module_class<NetImpl>("Net").constructor<int64_t, int64_t>();
//     const auto linear = rpc::module_class<torch::nn::LinearImpl>("Linear").made_by(
//         [](int64_t in, int64_t out, bool bias) { return torch::nn::Linear(torch::nn::LinearOptions(in,
//         out).bias(bias)); });
//
// Registered on both sides, as functions are. The module's forward() must not be overloaded.
#pragma once

#include <torch/nn/module.h>

#include "lockstep/rpc/function.h"
#include "lockstep/rpc/module_transfer.h"
#include "lockstep/rpc/rref.h"

namespace lockstep::rpc {

namespace detail {

/// Makes the module on the device given first, and remembers what it was made of: copies are made of the same.
template <class M>
class ModuleMaker final : public Callable {
 public:
  explicit ModuleMaker(std::shared_ptr<const Callable> maker) : maker_(std::move(maker)) {}

  std::string signature() const override { return maker_->signature(); }
  Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
    if (form != Form::kBoxed) throw std::runtime_error("a module does not travel: make it with remote()");
    if (arguments.empty()) refuse_count(signature(), 0);
    const std::vector<c10::IValue> rest(arguments.begin() + 1, arguments.end());
    auto module = unboxed<M>(maker_->call(rest, Form::kBoxed).value);
    if (!module) throw std::runtime_error("there is no module: the function that makes it returned null");
    module->to(c10::Device(Wire<std::string>::from(arguments[0])));
    return {.value = boxed(std::move(module), c10::ivalue::Tuple::create(rest))};
  }

 private:
  std::shared_ptr<const Callable> maker_;
};

/// forward() on the module's device: arguments go there, results come back to the CPU unless a device map carries them.
template <class M, class Forward, class R, class... Args>
class ModuleForward final : public Callable {
  static_assert((Wired<std::decay_t<Args>> && ...),
                "an argument of this module's forward() does not travel: give its type rpc_fields()");

 public:
  explicit ModuleForward(Forward forward) : forward_(forward) {}

  std::string signature() const override { return text(); }
  Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
    if (arguments.size() < 2) refuse_count(text(), 0);
    const ForwardPlace place(Wire<std::string>::from(arguments[1]));
    auto moved = arguments;
    for (std::size_t i = 2; i < moved.size(); ++i) moved[i] = place.brought(moved[i]);
    auto values = arguments_from<Args...>(moved, 2, &ModuleForward::text);
    return with_object(arguments[0], [forward = forward_, place, form, values](const c10::IValue& object) {
      const auto& module = unboxed<M>(object);
      auto all = values;
      auto answer = answer_of<R>(
          [&]() -> R {
            return std::apply([&](auto&... each) -> R { return (module.get()->*forward)(std::move(each)...); }, all);
          },
          form);
      if (form == Form::kWire && !answer.pending) answer.value = place.taken_back(answer.value);
      return answer;
    });
  }

 private:
  static const std::string& text() {
    static const auto signature = SignatureOf<R(Args...)>::text();
    return signature;
  }

  Forward forward_;
};

/// forward() may be a base's, or const.
template <class M, class Class, class R, class... Args>
std::shared_ptr<const Callable> module_forward(R (Class::*forward)(Args...)) {
  return std::make_shared<ModuleForward<M, decltype(forward), R, Args...>>(forward);
}
template <class M, class Class, class R, class... Args>
std::shared_ptr<const Callable> module_forward(R (Class::*forward)(Args...) const) {
  return std::make_shared<ModuleForward<M, decltype(forward), R, Args...>>(forward);
}

}  // namespace detail

template <class M>
class module_class {  // NOLINT(readability-identifier-naming): as class_
  static_assert(std::derived_from<M, torch::nn::Module>,
                "module_class<M> is for modules: name the implementation, such as torch::nn::LinearImpl");

 public:
  explicit module_class(std::string name) : name_(std::move(name)) {
    detail::name_class<M>(name_);
    using detail::register_function;
    register_function(name_ + ".forward", detail::module_forward<M>(&M::forward));
    detail::register_module_functions(name_, [](const c10::IValue& object) -> std::shared_ptr<torch::nn::Module> {
      return detail::unboxed<M>(object);
    });
  }

  template <class... Args>
  module_class& constructor() {
    return made_by([](std::decay_t<Args>... args) { return std::make_shared<M>(std::move(args)...); });
  }

  /// `make` returns a pointer to a module or its holder.
  template <class Make>
  module_class& made_by(Make make) {
    using Function = detail::RegisteredFunction<Make, detail::Signature<Make>>;
    detail::register_function(name_,
                              std::make_shared<detail::ModuleMaker<M>>(std::make_shared<Function>(std::move(make))));
    return *this;
  }

 private:
  std::string name_;
};

}  // namespace lockstep::rpc
