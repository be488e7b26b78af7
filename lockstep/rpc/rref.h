// RRef<T>: a reference to an object on some worker, its owner. Travels as argument and result; the object lives until
// its last reference anywhere is gone.
//
// The reference counts are libtorch's (rref_context.h); objects are in boxes (box.h), and come to users by calls of
// ours, since libtorch's own fetch knows no C++ objects.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/nn/tensor_tree.h"
#include "lockstep/rpc/box.h"
#include "lockstep/rpc/callee.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"

namespace torch::distributed::rpc {
class RRef;
}  // namespace torch::distributed::rpc

namespace lockstep::rpc {

template <class T>
class RRef;

namespace detail {

using RRefPtr = c10::intrusive_ptr<c10::RRefInterface>;

/// Sends a call. The future's value is the result; its error is a RemoteError.
FuturePtr call(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments);
/// The same, waiting: cheaper than a future.
c10::IValue call_and_wait(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments);
RRefPtr call_remote(const Callee& to, const std::string& function, std::vector<c10::IValue> arguments);

/// An argument in the parameter's type. What would lose digits on the way does not compile, or is refused.
template <class Param, class Arg>
c10::IValue wire_as(Arg&& arg) {
  using From = std::remove_cvref_t<Arg>;
  if constexpr (std::integral<Param> && std::is_arithmetic_v<From>) {
    static_assert(!std::floating_point<From>, "the function takes an integer, and is given a floating point number");
    if constexpr (!std::same_as<From, bool> && !std::same_as<Param, bool>) {
      if (!std::in_range<Param>(arg)) throw WireMismatch(str("int of ", sizeof(Param), " bytes"), str(arg));
    }
  }
  return Wire<Param>::to(std::forward<Arg>(arg));
}

template <class... Params, class... Args>
std::vector<c10::IValue> to_wires(Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "the function takes another number of arguments");
  std::vector<c10::IValue> wires;
  wires.reserve(sizeof...(Args));
  (wires.push_back(wire_as<std::decay_t<Params>>(std::forward<Args>(args))), ...);
  return wires;
}

/// What an RRef knows whatever it holds.
class RRefBase {
 public:
  bool is_owner() const;
  /// The owner knows of this reference; always true there.
  bool confirmed_by_owner() const;
  const WorkerInfo& owner() const;
  std::string owner_name() const { return owner().name_; }
  /// Printable, the same for all references to one object.
  std::string to_string() const;

  /// Starts a backward at the tensor behind the reference: in context `context_id`, or, on the owner only, an ordinary
  /// one if there is none. The object must be a tensor with one element.
  void backward(std::optional<std::int64_t> context_id = std::nullopt, bool retain_graph = false) const;

  const RRefPtr& impl() const { return impl_; }
  /// Throws if the object cannot be used any more, or never could.
  void check_usable() const;
  /// For calls: whom to call, and arguments that begin with which object is meant.
  Callee callee() const;
  std::vector<c10::IValue> with_handle(std::vector<c10::IValue> arguments) const;

 protected:
  RRefBase() = default;
  explicit RRefBase(RRefPtr impl);

  const c10::IValue& owned_value(const std::type_info& wanted) const;
  c10::IValue fetch() const;

  RRefPtr impl_;
  int session_ = 0;  // in which it was made
  std::optional<std::chrono::duration<float>> limit_;
};

RRefPtr new_owned(const c10::IValue& boxed_value);
/// One that came in a message. It may be ahead of the request that creates its object, and libtorch's owner forgets
/// what nobody refers to: a use by the owner itself would let go of it, and the object come to be behind another
/// reference that nobody waits for. So it is held until there is an object.
RRefPtr received(RRefPtr impl);

}  // namespace detail

template <class T>
class RRef : public detail::RRefBase {
 public:
  RRef() = default;
  /// This worker owns the value.
  explicit RRef(T value)
    requires std::move_constructible<T>
      : RRef(std::make_shared<T>(std::move(value))) {}
  explicit RRef(std::shared_ptr<T> value) : RRefBase(detail::new_owned(detail::boxed(std::move(value)))) {}
  explicit RRef(detail::RRefPtr impl) : RRefBase(std::move(impl)) {}

  /// The value: the owner's own, a copy on other workers. Waits until the owner has it. Objects come as pointers:
  /// copies of modules that remote() made, others only to their owner.
  auto to_here() const {
    if constexpr (Wired<T>) {
      if (is_owner()) return T(local_value());
      return Wire<T>::from(fetch());
    } else if constexpr (std::derived_from<T, torch::nn::Module>) {
      return is_owner() ? pointer() : detail::unboxed<T>(detail::module_from_wire(fetch(), detail::class_name<T>()));
    } else {
      return pointer();
    }
  }

  /// The object itself, on its owner only. Waits until it is there.
  T& local_value() const { return *pointer(); }
  std::shared_ptr<T> pointer() const { return detail::unboxed<T>(owned_value(typeid(T))); }

  /// The same reference, for calls with their own time limit.
  RRef within(std::chrono::duration<float> limit) const {
    auto copy = *this;
    copy.limit_ = limit;
    return copy;
  }

  /// Calls of registered methods where the object lives.
  template <class Method, class... Args>
  auto rpc_sync(Method method, Args&&... args) const {
    using R = typename MethodResult<Method>::Type;
    auto value = detail::call_and_wait(callee(), detail::name_of_method<T>(method),
                                       with_handle(wires<Method>(std::forward<Args>(args)...)));
    if constexpr (!std::is_void_v<R>) return Wire<R>::from(value);
  }
  template <class Method, class... Args>
  auto rpc_async(Method method, Args&&... args) const {
    using R = typename MethodResult<Method>::Type;
    return Future<R>(detail::call(callee(), detail::name_of_method<T>(method),
                                  with_handle(wires<Method>(std::forward<Args>(args)...))));
  }
  template <class Method, class... Args>
  auto remote(Method method, Args&&... args) const {
    using R = typename MethodResult<Method>::Type;
    return RRef<typename detail::Held<R>::Type>(detail::call_remote(
        callee(), detail::name_of_method<T>(method), with_handle(wires<Method>(std::forward<Args>(args)...))));
  }

 private:
  template <class Method, class Signature = typename detail::MethodTraits<Method>::Signature>
  struct MethodResult;
  template <class Method, class R, class... Params>
  struct MethodResult<Method, R(Params...)> {
    using Type = typename detail::Result<R>::Type;
    template <class... Args>
    static std::vector<c10::IValue> to_wires(Args&&... args) {
      return detail::to_wires<Params...>(std::forward<Args>(args)...);
    }
  };
  template <class Method, class... Args>
  static std::vector<c10::IValue> wires(Args&&... args) {
    return MethodResult<Method>::to_wires(std::forward<Args>(args)...);
  }
};

/// So that wrappers find the tensors in what a module returns, where they are this worker's: DDP's search for unused
/// parameters, say. It becomes a reference to a copy, in which tensors may be exchanged without anybody else noticing.
/// References to other workers' objects have none.
template <class T, class Visit>
void for_each_tensor(RRef<T>& rref, Visit&& visit) {
  if constexpr (std::copy_constructible<T>) {
    if (!rref.impl() || !rref.is_owner()) return;
    rref = RRef<T>(T(rref.local_value()));
    visit_tensors(rref.local_value(), visit);
  }
}

template <class T>
std::ostream& operator<<(std::ostream& out, const RRef<T>& rref) {
  return out << rref.to_string();
}

template <class T>
struct Wire<RRef<T>> {
  static c10::IValue to(const RRef<T>& rref) {
    rref.check_usable();
    return c10::IValue(rref.impl());
  }
  static RRef<T> from(const c10::IValue& value) {
    if (!value.isRRef()) throw WireMismatch(name(), value);
    return RRef<T>(detail::received(value.toRRef()));
  }
  static std::string name() { return str("RRef[", detail::wire_name<T>(), "]"); }
};

}  // namespace lockstep::rpc
