// Functions and classes that other workers may call, registered by name on the caller and the callee.
//
//     const auto add = rpc::function("add", [](at::Tensor a, at::Tensor b) { return a + b; });
//     const auto counter = rpc::class_<Counter>("Counter").constructor<int>().method("add", &Counter::add);
//     …
//     rpc::rpc_sync("worker1", add, x, y);
//     auto rref = rpc::remote<Counter>("worker1", 10);
//     rref.rpc_sync(&Counter::add, 2);
//
// Register everywhere before init_rpc(), best in constants of a file that all workers share: init_rpc() compares what
// workers registered under one name. A function that returns Future<T> answers when that completes, and its thread
// serves others meanwhile.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/rpc/callable.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/object_handle.h"

namespace lockstep::rpc {

namespace detail {

/// What the caller gets from a function that returns R.
template <class R>
struct Result {
  using Type = R;
};
template <class T>
struct Result<Future<T>> {
  using Type = T;
};

template <class T>
std::string wire_name() {
  if constexpr (std::is_void_v<T>) {
    return "None";
  } else if constexpr (Wired<T>) {
    return Wire<T>::name();
  } else {
    return readable(typeid(T));
  }
}

template <class Signature>
struct SignatureOf;
template <class R, class... Args>
struct SignatureOf<R(Args...)> {
  static std::string text() {
    return str("(", join(std::vector<std::string>{wire_name<std::decay_t<Args>>()...}, ", "), ") -> ",
               wire_name<typename Result<R>::Type>());
  }
};

/// The result of `call` in the wanted form.
template <class R, class Call>
Answer answer_of(const Call& call, Form form) {
  using T = typename Result<R>::Type;
  if constexpr (IsFuture<R>::value) {
    auto future = call().impl();
    check_valid(future);
    if (form == Form::kWire) return {.value = {}, .pending = std::move(future)};
    return {.value = {}, .pending = then(future, [](c10::ivalue::Future& done) {
                           if constexpr (std::is_void_v<T>) {
                             done.value();
                             return boxed(std::make_shared<None>());
                           } else {
                             return boxed(Held<T>::pointer(Wire<T>::from(done.value())));
                           }
                         })};
  } else if constexpr (std::is_void_v<R>) {
    call();
    return {.value = form == Form::kWire ? c10::IValue() : boxed(std::make_shared<None>())};
  } else {
    if (form == Form::kBoxed) return {.value = boxed(Held<R>::pointer(call()))};
    if constexpr (Wired<R>) {
      return {.value = Wire<R>::to(call())};
    } else {
      throw std::runtime_error(str("a ", readable(typeid(R)), " does not travel: make it with remote()"));
    }
  }
}

/// Arguments from the wire, each in its type.
template <class... Args>
std::tuple<std::decay_t<Args>...> arguments_from(const std::vector<c10::IValue>& values, std::size_t first,
                                                 const std::string& (*signature)()) {
  if (values.size() != first + sizeof...(Args))
    refuse_count(signature(), values.size() - std::min(first, values.size()));
  std::size_t next = first;
  [[maybe_unused]] const auto get = [&]<class T>(std::type_identity<T> /*type*/) {
    const auto position = next++;
    try {
      return Wire<T>::from(values[position]);
    } catch (const WireMismatch& mismatch) {
      refuse_argument(signature(), position - first, mismatch.what());
    }
  };
  return std::tuple<std::decay_t<Args>...>{get(std::type_identity<std::decay_t<Args>>())...};  // in this order
}

template <class F, class Signature>
class RegisteredFunction;

template <class F, class R, class... Args>
class RegisteredFunction<F, R(Args...)> final : public Callable {
  static_assert((Wired<std::decay_t<Args>> && ...),
                "an argument of this function does not travel: give its type rpc_fields() (see lockstep/rpc/wire.h)");

 public:
  explicit RegisteredFunction(F function) : function_(std::move(function)) {}

  std::string signature() const override { return text(); }
  Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
    auto values = arguments_from<Args...>(arguments, 0, &RegisteredFunction::text);
    return answer_of<R>([&] { return std::apply(function_, std::move(values)); }, form);
  }

 private:
  static const std::string& text() {
    static const auto signature = SignatureOf<R(Args...)>::text();
    return signature;
  }

  F function_;
};

template <class T, class Method, class R, class... Args>
class RegisteredMethod final : public Callable {
  static_assert((Wired<std::decay_t<Args>> && ...),
                "an argument of this method does not travel: give its type rpc_fields() (see lockstep/rpc/wire.h)");

 public:
  explicit RegisteredMethod(Method method) : method_(method) {}

  std::string signature() const override { return text(); }
  Answer call(const std::vector<c10::IValue>& arguments, Form form) const override {
    if (arguments.empty()) refuse_count(text(), 0);
    auto values = arguments_from<Args...>(arguments, 1, &RegisteredMethod::text);
    const auto call_on = [method = method_](const std::shared_ptr<T>& object, std::tuple<std::decay_t<Args>...> all,
                                            Form wanted) {
      const auto call = [&]() -> R {
        return std::apply([&](auto&... each) -> R { return (object.get()->*method)(std::move(each)...); }, all);
      };
      return answer_of<R>(call, wanted);
    };
    return with_object(arguments[0], [=, all = std::move(values)](const c10::IValue& object) {
      return call_on(unboxed<T>(object), all, form);
    });
  }

 private:
  static const std::string& text() {
    static const auto signature = SignatureOf<R(Args...)>::text();
    return signature;
  }

  Method method_;
};

/// Of T or of a base of it.
template <class T, class R, class Base, class... Args>
std::shared_ptr<const Callable> method_callable(R (Base::*method)(Args...)) {
  static_assert(std::derived_from<T, Base>);
  return std::make_shared<RegisteredMethod<T, R (Base::*)(Args...), R, Args...>>(method);
}
template <class T, class R, class Base, class... Args>
std::shared_ptr<const Callable> method_callable(R (Base::*method)(Args...) const) {
  static_assert(std::derived_from<T, Base>);
  return std::make_shared<RegisteredMethod<T, R (Base::*)(Args...) const, R, Args...>>(method);
}

/// Names of a class's methods, by pointers to them.
template <class T, class Method>
std::vector<std::pair<Method, std::string>>& method_names() {
  static auto* const names = new std::vector<std::pair<Method, std::string>>;
  return *names;
}

template <class T>
std::string& class_name() {
  static auto* const name = new std::string;
  return *name;
}

void check_class_name(const std::string& given, const std::string& before, const std::type_info& type);
/// A class has one name.
template <class T>
void name_class(const std::string& name) {
  check_class_name(name, class_name<T>(), typeid(T));
  class_name<T>() = name;
}

[[noreturn]] void refuse_unregistered(const std::string& what, const std::string& remedy);

template <class T, class Method>
const std::string& name_of_method(Method method) {
  for (const auto& [each, name] : method_names<T, Method>()) {
    if (each == method) return name;
  }
  refuse_unregistered(str("a method of type ", readable(typeid(Method))),
                      "class_<T>(\"name\").method(\"name\", &T::method)");
}

template <class Method>
struct MethodTraits;
template <class R, class T, class... A>
struct MethodTraits<R (T::*)(A...)> {
  using Class = T;
  using Signature = R(A...);
};
template <class R, class T, class... A>
struct MethodTraits<R (T::*)(A...) const> : MethodTraits<R (T::*)(A...)> {};

template <class Signature, class F>
concept SignatureFrom = requires(F function) {
  { std::function(function) } -> std::same_as<std::function<Signature>>;
};

template <class F>
struct SignatureIn;
template <class Signature>
struct SignatureIn<std::function<Signature>> {
  using Type = Signature;
};
template <class F>
using Signature = typename SignatureIn<decltype(std::function(std::declval<F>()))>::Type;

}  // namespace detail

/// The name of a function together with its type: calls through it are checked by the compiler.
template <class Signature>
class Function {
 public:
  explicit Function(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

/// Registers `fn` (a function, lambda or std::function that is not overloaded) under a name that is not taken yet.
template <class F>
auto function(const std::string& name, F fn) {
  using Signature = detail::Signature<F>;
  detail::register_function(name, std::make_shared<detail::RegisteredFunction<F, Signature>>(std::move(fn)));
  return Function<Signature>(name);
}

/// One of libtorch's operators by schema name, such as "aten::add.Tensor". Callees run those they allow, see
/// allow_operator(); the signature is the caller's view of it, trailing arguments with defaults may be left out.
template <class Signature>
Function<Signature> builtin(std::string schema_name) {
  return Function<Signature>(std::move(schema_name));
}

/// Lets other workers run this operator here. Allowed from the start is arithmetic on tensors; others, such as those
/// that open files, are only run if you say so.
void allow_operator(const std::string& schema_name);

/// Registers a class: its constructors' arguments for remote<T>(), its methods for calls through an RRef.
template <class T>
class class_ {  // NOLINT(readability-identifier-naming): as torch::class_
 public:
  explicit class_(std::string name) : name_(std::move(name)) { detail::name_class<T>(name_); }

  /// One constructor per class.
  template <class... Args>
  class_& constructor() {
    function(name_, [](std::decay_t<Args>... args) { return std::make_shared<T>(std::move(args)...); });
    return *this;
  }

  template <class Method>
  class_& method(const std::string& name, Method method) {
    auto full = str(name_, ".", name);
    detail::register_function(full, detail::method_callable<T>(method));
    detail::method_names<T, Method>().emplace_back(method, std::move(full));
    return *this;
  }

 private:
  std::string name_;
};

}  // namespace lockstep::rpc
