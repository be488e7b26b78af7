// Calls of functions on other workers: rpc_sync() waits for the result, rpc_async() returns a Future of it, remote()
// leaves it with the callee and returns an RRef at once. Any thread may call, functions that are being called too, and
// a worker may call itself.
//
// Tensors in arguments are not copied at once: leave them unchanged until the call is over. A call runs at most once.
#pragma once

#include <string>
#include <vector>

#include "lockstep/rpc/callee.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/rref.h"

namespace lockstep::rpc {

/// Throws RemoteError if the function throws, is not registered there or takes too long, or if the worker is gone.
template <class R, class... Params, class... Args>
typename detail::Result<R>::Type rpc_sync(const Callee& to, const Function<R(Params...)>& function, Args&&... args) {
  using T = typename detail::Result<R>::Type;
  auto value = detail::call_and_wait(to, function.name(), detail::to_wires<Params...>(std::forward<Args>(args)...));
  if constexpr (!std::is_void_v<T>) {
    static_assert(Wired<T>, "this result does not travel: call remote(), which leaves it with the callee");
    return Wire<T>::from(value);
  }
}

template <class R, class... Params, class... Args>
Future<typename detail::Result<R>::Type> rpc_async(const Callee& to, const Function<R(Params...)>& function,
                                                   Args&&... args) {
  using T = typename detail::Result<R>::Type;
  static_assert(std::is_void_v<T> || Wired<T>,
                "this result does not travel: call remote(), which leaves it with the callee");
  return Future<T>(detail::call(to, function.name(), detail::to_wires<Params...>(std::forward<Args>(args)...)));
}

/// Does not wait: errors come with the first use of the RRef.
template <class R, class... Params, class... Args>
auto remote(const Callee& to, const Function<R(Params...)>& function, Args&&... args) {
  using T = typename detail::Held<typename detail::Result<R>::Type>::Type;
  return RRef<T>(detail::call_remote(to, function.name(), detail::to_wires<Params...>(std::forward<Args>(args)...)));
}

/// A new T on the callee, made by its registered constructor.
template <class T, class... Args>
RRef<T> remote(const Callee& to, Args&&... args) {
  const auto& name = detail::class_name<T>();
  if (name.empty()) {
    detail::refuse_unregistered(str("class ", detail::readable(typeid(T))), "class_<T>(\"name\").constructor<…>()");
  }
  return RRef<T>(detail::call_remote(to, name, {Wire<std::decay_t<Args>>::to(args)...}));
}

}  // namespace lockstep::rpc
