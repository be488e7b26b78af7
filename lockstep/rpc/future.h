// The result of a call that is under way.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <type_traits>
#include <vector>

#include "lockstep/rpc/box.h"
#include "lockstep/rpc/wire.h"

namespace lockstep::rpc {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

template <class T>
class Future;

namespace detail {

FuturePtr new_future();
void check_valid(const FuturePtr& future);
/// Waits; throws the error, a RemoteError if it came from a call.
c10::IValue wait_for_value(const FuturePtr& future);
/// Runs `next` when the future is complete, in the distributed autograd context of the thread that asked for it.
FuturePtr then(const FuturePtr& future, std::function<c10::IValue(c10::ivalue::Future&)> next);
FuturePtr then_async(const FuturePtr& future, std::function<FuturePtr(c10::ivalue::Future&)> next);

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {
  using Value = T;
};

template <class T>
c10::IValue to_wire(const T& value) {
  return Wire<T>::to(value);
}

}  // namespace detail

/// Copies share the result. T is void, or a type that travels.
template <class T>
class Future {
 public:
  using Value = T;

  Future() = default;
  explicit Future(FuturePtr future) : future_(std::move(future)) {}

  /// Blocks until the answer is there, then returns it or throws what the call failed by. May be called repeatedly.
  T wait() const {
    auto value = detail::wait_for_value(future_);
    if constexpr (!std::is_void_v<T>) return Wire<T>::from(value);
  }

  bool done() const {
    detail::check_valid(future_);
    return future_->completed();
  }
  /// Does not wait.
  bool has_error() const { return done() && future_->hasError(); }

  /// `next` gets the value (nothing if it is void), on the thread that completed it, and may return a value, nothing
  /// or a Future. It is not called after an error, which is then the result's.
  template <class Next>
  auto then(Next next) const {
    detail::check_valid(future_);
    auto call = [next = std::move(next)](c10::ivalue::Future& done) {
      if constexpr (std::is_void_v<T>) {
        done.value();  // throws its error
        return next();
      } else {
        return next(Wire<T>::from(done.value()));
      }
    };
    using Result = std::invoke_result_t<decltype(call), c10::ivalue::Future&>;
    if constexpr (detail::IsFuture<Result>::value) {
      return Result(detail::then_async(
          future_, [call = std::move(call)](c10::ivalue::Future& done) { return call(done).impl(); }));
    } else {
      return Future<Result>(detail::then(future_, [call = std::move(call)](c10::ivalue::Future& done) -> c10::IValue {
        if constexpr (std::is_void_v<Result>) {
          call(done);
          return {};
        } else {
          return Wire<Result>::to(call(done));
        }
      }));
    }
  }

  const FuturePtr& impl() const { return future_; }

 private:
  FuturePtr future_;
};

/// The other end of a Future, for functions that answer later.
template <class T>
class Promise {
 public:
  Future<T> future() const { return Future<T>(future_); }
  template <class... Value>
  void set_value(const Value&... value) const {
    if constexpr (std::is_void_v<T>) {
      future_->markCompleted();
    } else {
      future_->markCompleted(Wire<T>::to(value...));
    }
  }
  void set_exception(std::exception_ptr error) const { future_->setError(std::move(error)); }

 private:
  FuturePtr future_ = detail::new_future();
};

/// Waits for all, then throws the first error, if any.
void wait_all(const std::vector<FuturePtr>& futures);

template <class T>
auto wait_all(const std::vector<Future<T>>& futures) {
  std::vector<FuturePtr> all;
  for (const auto& each : futures) all.push_back(each.impl());
  wait_all(all);
  if constexpr (!std::is_void_v<T>) {
    std::vector<T> values;
    for (const auto& each : futures) values.push_back(each.wait());
    return values;
  }
}

/// Waits, at its end, for every rpc_async() of this thread since it began, and throws the first error. Scopes nest.
class WaitAll {
 public:
  WaitAll();
  ~WaitAll() noexcept(false);
  WaitAll(const WaitAll&) = delete;
  WaitAll& operator=(const WaitAll&) = delete;
  WaitAll(WaitAll&&) = delete;
  WaitAll& operator=(WaitAll&&) = delete;

 private:
  friend void remember_for_wait_all(const FuturePtr& future);
  WaitAll* outer_;
  std::vector<FuturePtr> futures_;
  int exceptions_;
};

/// For calls.
void remember_for_wait_all(const FuturePtr& future);

}  // namespace lockstep::rpc
