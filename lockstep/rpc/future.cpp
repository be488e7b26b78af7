#include "lockstep/rpc/future.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <exception>

#include "lockstep/rpc/context_scope.h"

namespace lockstep::rpc {
namespace detail {

FuturePtr new_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
}

void check_valid(const FuturePtr& future) {
  TORCH_CHECK(future, "[lockstep/rpc] this Future was made by no call.");
}

c10::IValue wait_for_value(const FuturePtr& future) {
  check_valid(future);
  future->wait();
  return future->value();
}

FuturePtr then(const FuturePtr& future, std::function<c10::IValue(c10::ivalue::Future&)> next) {
  return future->then(
      [next = std::move(next), context = current_context_id()](c10::ivalue::Future& done) {
        const ContextScope scope(context);
        return next(done);
      },
      c10::AnyType::get());
}

FuturePtr then_async(const FuturePtr& future, std::function<FuturePtr(c10::ivalue::Future&)> next) {
  return future->thenAsync(
      [next = std::move(next), context = current_context_id()](c10::ivalue::Future& done) {
        const ContextScope scope(context);
        auto result = next(done);
        check_valid(result);
        return result;
      },
      c10::AnyType::get());
}

}  // namespace detail

void wait_all(const std::vector<FuturePtr>& futures) {
  for (const auto& each : futures) {
    detail::check_valid(each);
    each->wait();
  }
  for (const auto& each : futures) {
    if (each->hasError()) std::rethrow_exception(each->exception_ptr());
  }
}

namespace {
thread_local WaitAll* innermost_scope = nullptr;
}  // namespace

WaitAll::WaitAll() : outer_(innermost_scope), exceptions_(std::uncaught_exceptions()) {
  innermost_scope = this;
}

WaitAll::~WaitAll() noexcept(false) {
  innermost_scope = outer_;
  if (std::uncaught_exceptions() == exceptions_) {
    wait_all(futures_);
  } else {
    for (const auto& each : futures_) each->wait();  // another error is on its way
  }
}

void remember_for_wait_all(const FuturePtr& future) {
  if (innermost_scope != nullptr) innermost_scope->futures_.push_back(future);
}

}  // namespace lockstep::rpc
